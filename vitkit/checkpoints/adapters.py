"""LoRA files: low-rank adapters and a head in a small safetensors file, over a backbone that it names.

The metadata holds the model's configuration and preprocessing, the backbone's name, and the digest of its tensors, so
that the adapters are never merged into other weights.

Legend: W [out, in], A [rank, in], B [out, rank].
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoints import containers
from vitkit.checkpoints.atomic import staging
from vitkit.errors import CheckpointError, TensorMismatch, UnreadableFile
from vitkit.model.backbone import Backbone, Config
from vitkit.model.config import InputSpec, config_from_dict

KEY = "vitkit-lora"  # of the metadata
HEADS = ("head.", "pre_logits.")  # replaced, so not part of a backbone's digest


@dataclass(frozen=True)
class Reference:
    """The backbone that adapters belong to.

    Args:
        source: anything that `load` accepts.
        sha256: digest of its tensors, see `digest`.
        loading: further arguments of `load` that it was loaded with.
    """

    source: str
    sha256: str
    loading: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Adapted:
    """A LoRA file.

    Args:
        config: the whole model's architecture.
        input_spec: what the model expects to be fed.
        backbone: what the adapters belong to.
        licence: of the weights.
    """

    config: Config
    input_spec: InputSpec
    backbone: Reference
    licence: str


def digest(state: Mapping[str, Tensor]) -> str:
    """Return the sha256 of a backbone: names, types, shapes and bytes of its tensors without the head.

    Args:
        state: tensors by the model's names, so that it does not depend on the dialect of a file.
    """
    found = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        if not name.startswith(HEADS):
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def write(path: Path, model: Backbone, adapters: Mapping[str, Tensor], backbone: Reference) -> None:
    """Write a LoRA file, completely or not at all.

    Args:
        path: ends in .safetensors.
        model: the adapted model; its head, configuration and preprocessing are kept.
        adapters: `blocks.0.msa.qkv.weight.A` and the like.
        backbone: what the adapters belong to.
    """
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(HEADS)}
    values = {
        "config": model.config.to_dict(),
        "input_spec": model.input_spec.to_dict(),
        "backbone": vars(backbone),
        "licence": model.licence,
    }
    with staging(path.parent, named=path) as private:
        containers.write({**adapters, **own}, private / path.name, {KEY: json.dumps(values, sort_keys=True)})


def understand(text: str, path: Path) -> Adapted:
    """Parse the metadata of a LoRA file.

    Raises:
        UnreadableFile: this version of vitkit cannot read it.
    """
    try:
        values = json.loads(text)
        config, spec = config_from_dict(values["config"]), InputSpec.from_dict(values["input_spec"])
        return Adapted(config, spec, Reference(**values["backbone"]), str(values["licence"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableFile(f"{path} is a LoRA file that this version of vitkit cannot read ({error}).") from None


def merged(
    path: Path, found: Adapted, tensors: Mapping[str, Tensor], backbone: str | None, read: Callable[..., Any]
) -> dict[str, Tensor]:
    """Return the tensors of the whole model: those of its backbone with the adapters merged, and the head.

    Args:
        path: the LoRA file.
        found: its metadata.
        tensors: its tensors.
        backbone: where the backbone is (default: where the file says, or a file of that name next to it).
        read: `reading.open_checkpoint`.

    Raises:
        UnreadableFile: the backbone was not found.
        TensorMismatch: the backbone is another one, or has no place for an adapter.
    """
    named = found.backbone.source
    beside = path.parent / Path(named).name
    source = backbone or (str(beside) if not Path(named).exists() and beside.is_file() else named)
    try:
        own = read(source, **found.backbone.loading)
    except CheckpointError as error:
        raise UnreadableFile(
            f"{path} holds LoRA adapters for {named}, which could not be read: {error} Say where it is with backbone= "
            f"(--backbone)."
        ) from None
    if digest(own.state) != found.backbone.sha256:
        raise TensorMismatch(
            f"{path} holds LoRA adapters for {named} (sha256 {found.backbone.sha256[:12]}...); {source} has other "
            f"weights. Give the backbone that they were trained with as backbone= (--backbone)."
        )
    if own.config.image_size != found.config.image_size:
        own = read(source, **found.backbone.loading, image_size=found.config.image_size)
    like = next(iter(tensors.values())).dtype
    state = {name: tensor.to(like) for name, tensor in own.state.items() if not name.startswith(HEADS)}
    for name in sorted({name[:-2] for name in tensors if not name.startswith(HEADS)}):
        A, B = (tensors.get(f"{name}.{part}") for part in "AB")
        if A is None or B is None or name not in state or (len(B), A.shape[-1]) != state[name].shape:
            raise TensorMismatch(f"{path} holds an adapter for {name!r} that does not fit the backbone {source}.")
        state[name] = state[name] + B @ A
    return state | {name: tensor for name, tensor in tensors.items() if name.startswith(HEADS)}
