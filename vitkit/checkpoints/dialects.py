"""DIALECTS: every public spelling of the Vision Transformer, one row each, and the translation both ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitkit.checkpoints.capabilities import check_expressible
from vitkit.checkpoints.course import COURSE
from vitkit.checkpoints.dinov2 import DINOV2, DINOV2_HF
from vitkit.checkpoints.google import GOOGLE
from vitkit.checkpoints.huggingface import HUGGINGFACE
from vitkit.checkpoints.native import NATIVE
from vitkit.checkpoints.rules import Dialect, check, complete_positions
from vitkit.checkpoints.timm import TIMM
from vitkit.checkpoints.torchvision import TORCHVISION
from vitkit.errors import UnknownDialect, pick
from vitkit.model.config import ViTConfig
from vitkit.model.vit import ViT

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect for dialect in (NATIVE, HUGGINGFACE, TIMM, TORCHVISION, GOOGLE, DINOV2, DINOV2_HF, COURSE)
}


def recognise(names: Iterable[str]) -> Dialect:
    """Return the dialect of a file, given the names of its tensors.

    Raises:
        UnknownDialect: no dialect recognises them; the message shows some of them.
    """
    names = list(names)
    for dialect in DIALECTS.values():
        if dialect.recognises(names):
            return dialect
    shown = ", ".join(repr(str(name)) for name in names[:4]) or "none at all"
    raise UnknownDialect(
        f"No dialect recognises these tensor names: {shown}{', ...' if len(names) > 4 else ''}. "
        f"Expected a Vision Transformer of one of: {', '.join(DIALECTS)}."
    )


class _NoFilling(TorchFunctionMode):
    """Skip initialisation: without storage it has no effect, but torch would import its compiler for it (seconds)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_", "trunc_normal_", "fill_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def skeleton(config: ViTConfig) -> ViT:
    """Build a model without storage: names and shapes only."""
    with torch.device("meta"), _NoFilling():
        return ViT(config)


def to_dialect(model: ViT, dialect: str) -> dict[str, Tensor]:
    """Return the tensors of a model as a dialect's files have them. They may share the model's memory.

    Args:
        model: a ViT.
        dialect: a row of DIALECTS.

    Raises:
        CannotExpress: the model has a property that the dialect has no place for.
    """
    row = pick(DIALECTS, dialect, "dialect")
    check_expressible(model.config, dialect)
    return row.write(model.state_dict(), model.config)


def from_dialect(tensors: Mapping[str, Tensor], dialect: str, config: ViTConfig) -> dict[str, Tensor]:
    """Return a dialect's tensors as the model's state dict, ready for `ViT(config).load_state_dict`.

    Args:
        tensors: all tensors of a file of that dialect.
        dialect: a row of DIALECTS.
        config: the model they are for.

    Raises:
        TensorMismatch: tensors missing, left over, or of another shape.
        CannotExpress: the file holds an architecture that the model does not have.
    """
    row = pick(DIALECTS, dialect, "dialect")
    state, _, _ = row.read(tensors)
    complete_positions(state, config)
    check(state, {name: tensor.shape for name, tensor in skeleton(config).state_dict().items()}, row)
    return state
