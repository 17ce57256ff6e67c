"""Save a model as a file or folder of any dialect; convert one dialect into another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitkit.checkpoints import containers, external_configs, native, sidecar
from vitkit.checkpoints.atomic import staging
from vitkit.checkpoints.dialects import DIALECTS, to_dialect
from vitkit.checkpoints.reading import load
from vitkit.errors import ConfigError, OutputError, pick
from vitkit.model.backbone import Backbone


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
    row, path = pick(DIALECTS, dialect, "dialect"), Path(path).expanduser()
    if (extra or pretraining) and dialect != "native":
        raise ConfigError(f"Only native files can hold extra= and pretraining=; got dialect {dialect!r}.")
    tensors = to_dialect(model, dialect)
    tensors |= {f"{native.PRETRAINING}{name}": tensor for name, tensor in (pretraining or {}).items()}
    extra = dict(extra or {}) | ({"known": model.known.to_text()} if model.known is not None else {})
    config, spec = model.config, model.input_spec
    terms = {"licence": model.licence} if model.licence else {}
    if row.suffixes == ("",):
        if path.suffix in containers.WRITERS or path.is_file():
            raise OutputError(
                f"Expected the name of a folder, because the {dialect} dialect keeps config.json next to the weights; "
                f"got {path}."
            )
        with staging(path) as private:
            containers.write(tensors, private / "model.safetensors")
            values = external_configs.write_config(config, spec, dialect)
            _write_json(private / "config.json", {**values, "vitkit": values["vitkit"] | terms})
            _write_json(private / "preprocessor_config.json", external_configs.write_preprocessor(spec))
        return path / "model.safetensors"
    if path.suffix.lower() not in row.suffixes:
        raise OutputError(
            f"Expected a file ending in {' or '.join(row.suffixes)} for the {dialect} dialect; got {str(path)!r}."
        )
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
        destination: as for `save`.
        to: a row of DIALECTS (default: native).
        overrides: as for `load`.

    Returns:
        The model that was written.
    """
    pick(DIALECTS, to, "dialect")
    model = load(source, **overrides)
    save(model, destination, to)
    return model


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
