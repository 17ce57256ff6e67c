"""What weights alone cannot say: inside a native file, or next to another in `<file>.vitkit.json`, tied by sha256."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from vitkit.errors import ConfigError, UnreadableFile
from vitkit.model.backbone import Config
from vitkit.model.config import InputSpec, config_from_dict

VERSION = 1


def place(weights: Path) -> Path:
    """Return the path of a file's sidecar."""
    return weights.with_name(weights.name + ".vitkit.json")


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(config: Config, spec: InputSpec, **more: Any) -> str:
    """Return, as JSON, what travels with weights: architecture, numerics, preprocessing and class names."""
    values = {"version": VERSION, "config": config.to_dict(), "input_spec": spec.to_dict(), **more}
    return json.dumps(values, sort_keys=True, indent=1)


def understand(text: str) -> tuple[Config, InputSpec, dict[str, str], str] | None:
    """Parse what `describe` returned: configuration, InputSpec, extra strings, licence; None for another text.

    Raises:
        UnreadableFile: it describes a model that this version of vitkit does not know.
    """
    try:
        values = json.loads(text)
        spec = InputSpec.from_dict(values["input_spec"])
        extra, licence = dict(values.get("extra") or {}), str(values.get("licence") or "")
        return config_from_dict(values["config"]), spec, extra, licence
    except ConfigError as error:  # to ignore it would be to compute something else
        raise UnreadableFile(
            f"Expected weights that this version of vitkit can describe; {error} A newer vitkit may have written them."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write(weights: Path, config: Config, spec: InputSpec, dialect: str, **more: Any) -> None:
    """Write the sidecar of a file that has just been written."""
    text = describe(config, spec, dialect=dialect, sha256=sha256(weights), **more)
    place(weights).write_text(text + "\n", encoding="utf-8")


def read(weights: Path, notes: list[str]) -> tuple[Config, InputSpec, str] | None:
    """Read the sidecar of a file: configuration, InputSpec, licence.

    Args:
        weights: the file.
        notes: receives a sentence if the sidecar cannot be trusted.

    Returns:
        None if there is no sidecar, or if its digest is not that of the file.
    """
    path = place(weights)
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (ValueError, OSError):
        text = ""
    if (found := understand(text)) is None:
        notes.append(f"{path.name} is not a sidecar that this version can read; it is ignored.")
        return None
    if json.loads(text).get("sha256") != sha256(weights):
        notes.append(f"{path.name} belongs to other weights (its sha256 does not match); it is ignored.")
        return None
    return found[0], found[1], found[3]
