"""Save a model as a file or folder of any dialect; convert one dialect into another."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitkit.checkpoints import containers, external_configs, native, sidecar
from vitkit.checkpoints.atomic import staging
from vitkit.checkpoints.dialects import DIALECTS, to_dialect
from vitkit.checkpoints.outputs import check_file, check_folder
from vitkit.checkpoints.reading import load
from vitkit.errors import ConfigError, Occupied, OutputError, pick
from vitkit.model.backbone import Backbone

FOLDER = ("model.safetensors", "config.json", "preprocessor_config.json")  # the files of a dialect that is a folder


def save(
    model: Backbone,
    path: str | Path,
    dialect: str = "native",
    *,
    extra: Mapping[str, str] | None = None,
    pretraining: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a model, completely or not at all.

    Args:
        model: a ViT or a ResNet.
        path: a file with one of the dialect's suffixes, or (huggingface, and those ending in -hf) a folder.
        dialect: a row of DIALECTS (default: native).
        extra: free-form strings to keep in a native file.
        pretraining: tensors that pre-training has beside the model, such as a mask token, to keep in a native file;
            `load` leaves them out.

    Returns:
        The path of the weights.

    Raises:
        CannotExpress: the model has a property that the dialect has no place for.
        OutputError: the path cannot be written to; what was there is unchanged.
    """
    path = Path(path).expanduser()
    pick(DIALECTS, dialect, "dialect")
    if (extra or pretraining) and dialect != "native":
        raise ConfigError(f"Only native files can hold extra= and pretraining=; got dialect {dialect!r}.")
    tensors = to_dialect(model, dialect)
    tensors |= {f"{native.PRETRAINING}{name}": tensor for name, tensor in (pretraining or {}).items()}
    extra = dict(extra or {}) | ({"known": model.known.to_text()} if model.known is not None else {})
    config, spec = DIALECTS[dialect].written(model.config), model.input_spec
    terms = {"licence": model.licence} if model.licence else {}
    if _is_folder(path, dialect):
        with staging(path) as private:
            containers.write(tensors, private / "model.safetensors")
            values = external_configs.write_config(config, spec, dialect)
            _write_json(private / "config.json", {**values, "vitkit": values["vitkit"] | terms})
            _write_json(private / "preprocessor_config.json", external_configs.write_preprocessor(spec))
        return path / "model.safetensors"
    with staging(path.parent, named=path) as private:
        file = private / path.name
        if dialect == "native":
            containers.write(tensors, file, {"vitkit": sidecar.describe(config, spec, extra=extra, **terms)})
        else:
            containers.write(tensors, file)
            sidecar.write(file, config, spec, dialect, **terms)
    return path


def convert(source: str | Path, destination: str | Path, to: str = "native", **overrides: Any) -> Backbone:
    """Load one checkpoint and save it in another dialect.

    Args:
        source: as for `load`.
        destination: as for `save`, but nothing may be there: it could be the only copy of some weights.
        to: a row of DIALECTS (default: native).
        overrides: as for `load`.

    Returns:
        The model that was written.

    Raises:
        Occupied: the destination exists.
    """
    pick(DIALECTS, to, "dialect")
    _check_free(Path(destination), to)
    model = load(source, **overrides)
    save(model, destination, to)
    return model


def _is_folder(path: Path, dialect: str) -> bool:
    """Return whether a dialect's weights are a folder, and refuse a name that does not fit."""
    suffixes = DIALECTS[dialect].suffixes
    if suffixes != ("",) and path.suffix.lower() not in suffixes:
        raise OutputError(
            f"Expected a file ending in {' or '.join(suffixes)} for the {dialect} dialect; got {str(path)!r}."
        )
    if suffixes == ("",) and (path.suffix in containers.WRITERS or path.is_file()):
        raise OutputError(
            f"Expected the name of a folder, because the {dialect} dialect keeps config.json next to the weights; "
            f"got {path}."
        )
    return suffixes == ("",)


def _check_free(destination: Path, dialect: str) -> None:
    """Refuse a destination that cannot be written, or where a file would be replaced, before weights are read."""
    path = destination.expanduser()
    if _is_folder(path, dialect):
        check_folder(path)
        files = [path / name for name in FOLDER]
    else:
        files = [check_file(path)]
    for file in files:
        if os.path.lexists(file):
            raise Occupied(
                f"Expected a new {'folder' if len(files) > 1 else 'file'} to write; {file} exists. Choose another "
                f"name, or delete it first."
            )


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
