"""inspect: what a checkpoint is, without building a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitkit.checkpoints import sidecar
from vitkit.checkpoints.reading import open_checkpoint
from vitkit.model.config import NUMERICS, variant_of


def inspect(source: str | Path, **arguments: Any) -> dict[str, Any]:
    """Say what a checkpoint holds, in values that JSON can hold.

    Args:
        source: what `load` takes.
        arguments: what `load` takes.

    Returns:
        dialect, variant, tensors, parameters, dtype, numerics, heads, image and patch size, classes, InputSpec, notes,
        sha256.
    """
    found = open_checkpoint(source, **arguments)
    config, spec = found.config, found.input_spec.to_dict()
    names = spec.pop("class_names")
    return {
        "source": str(source),
        "file": str(found.files.weights),
        "dialect": found.dialect.name,
        "variant": variant_of(config),
        "tensors": found.tensors,
        "unused": found.unused,
        "parameters": sum(tensor.numel() for tensor in found.state.values()),
        "dtype": ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in found.state.values()})),
        "numerics": {name: getattr(config, name) for name in NUMERICS["paper"]},
        "config": config.to_dict(),
        "input_spec": spec,
        "classes": config.num_classes,
        "class_names": names,
        "extra": found.extra,
        "notes": found.notes,
        "sha256": sidecar.sha256(found.files.weights),
    }
