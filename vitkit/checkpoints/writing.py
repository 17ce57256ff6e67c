"""save: ViT -> a file or folder of any dialect; convert: one into another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitkit.checkpoints import containers, external_configs, sidecar
from vitkit.checkpoints.atomic import staging
from vitkit.checkpoints.dialects import DIALECTS, to_dialect
from vitkit.checkpoints.reading import load
from vitkit.errors import ConfigError, OutputError, pick
from vitkit.model.vit import ViT


def save(model: ViT, path: str | Path, dialect: str = "native", *, extra: Mapping[str, str] | None = None) -> Path:
    """Write a model, whole or not at all.

    Args:
        model: a ViT.
        path: a file whose suffix the dialect writes, or (huggingface, dinov2-hf) a folder.
        dialect: a row of DIALECTS.
        extra: free-form strings for a native file.

    Returns:
        The path of the weights.

    Raises:
        CannotExpress: the model has a property that the dialect has no place for.
        OutputError: the place cannot be written to; what was there is unchanged.
    """
    row, path = pick(DIALECTS, dialect, "dialect"), Path(path)
    if extra and dialect != "native":
        raise ConfigError(f"extra= is kept in native files only; got dialect {dialect!r}.")
    tensors = to_dialect(model, dialect)
    config, spec = model.config, model.input_spec
    if row.suffixes == ("",):
        if path.suffix in containers.WRITERS or path.is_file():
            raise OutputError(
                f"The {dialect} dialect is a folder with config.json beside the weights; got {path}. "
                f"Give the name of a folder."
            )
        with staging(path) as private:
            containers.write(tensors, private / "model.safetensors")
            _write_json(private / "config.json", external_configs.write_config(config, spec, dialect))
            _write_json(private / "preprocessor_config.json", external_configs.write_preprocessor(spec))
        return path / "model.safetensors"
    if path.suffix.lower() not in row.suffixes:
        raise OutputError(
            f"The {dialect} dialect is written to a file ending in {' or '.join(row.suffixes)}; got {str(path)!r}."
        )
    with staging(path.parent) as private:
        file = private / path.name
        if dialect == "native":
            values = {**sidecar.describe(config, spec), "extra": dict(extra or {})}
            containers.write(tensors, file, {"vitkit": json.dumps(values)})
        else:
            containers.write(tensors, file)
            sidecar.write(file, config, spec, dialect)
    return path


def convert(source: str | Path, destination: str | Path, to: str = "native", **overrides: Any) -> ViT:
    """Load one checkpoint and save it in another dialect.

    Args:
        source: what `load` takes.
        destination: what `save` takes.
        to: a row of DIALECTS.
        overrides: what `load` takes.

    Returns:
        The model that was written.
    """
    pick(DIALECTS, to, "dialect")
    model = load(source, **overrides)
    save(model, destination, to)
    return model


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
