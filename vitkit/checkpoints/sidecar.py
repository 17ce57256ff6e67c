"""What a file of weights cannot say, beside it: `<file>.vitkit.json`, tied to the weights by their sha256."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from vitkit.errors import ConfigError
from vitkit.model.config import InputSpec, ViTConfig

VERSION = 1


def place(weights: Path) -> Path:
    """Where the sidecar of a file stands."""
    return weights.with_name(weights.name + ".vitkit.json")


def sha256(path: Path) -> str:
    """The digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(config: ViTConfig, spec: InputSpec) -> dict[str, Any]:
    """What travels with weights: architecture, numerics, preprocessing and class names."""
    return {"version": VERSION, "config": config.to_dict(), "input_spec": spec.to_dict()}


def understand(values: Any) -> tuple[ViTConfig, InputSpec] | None:
    """The configuration and InputSpec that `describe` wrote; None where this is something else."""
    try:
        return ViTConfig.from_dict(values["config"]), InputSpec.from_dict(values["input_spec"])
    except (KeyError, TypeError, AttributeError, ConfigError):
        return None


def write(weights: Path, config: ViTConfig, spec: InputSpec, dialect: str) -> None:
    """Write the sidecar of a file that has just been written."""
    values = {"dialect": dialect, "sha256": sha256(weights), **describe(config, spec)}
    place(weights).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read(weights: Path, notes: list[str]) -> tuple[ViTConfig, InputSpec] | None:
    """What the sidecar of a file says.

    Args:
        weights: the file.
        notes: takes a sentence when there is a sidecar that cannot be trusted.

    Returns:
        None where there is no sidecar, or its digest is not that of the file.
    """
    path = place(weights)
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        values = None
    if not isinstance(values, dict) or (found := understand(values)) is None:
        notes.append(f"{path.name} is no sidecar that this version can read; it is not used.")
        return None
    if values.get("sha256") != sha256(weights):
        notes.append(f"{path.name} belongs to other weights (its sha256 is not theirs); it is not used.")
        return None
    return found
