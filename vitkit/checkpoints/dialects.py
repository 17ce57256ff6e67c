"""DIALECTS: every public spelling of the Vision Transformer, one row each, and the translation both ways."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitkit.checkpoints.aimv2 import AIMV2_HF
from vitkit.checkpoints.beit import BEIT_HF
from vitkit.checkpoints.capabilities import check_expressible
from vitkit.checkpoints.clip import CLIP, CLIP_HF
from vitkit.checkpoints.course import COURSE
from vitkit.checkpoints.dinov2 import DINOV2, DINOV2_HF
from vitkit.checkpoints.dinov3 import DINOV3, DINOV3_HF
from vitkit.checkpoints.google import GOOGLE
from vitkit.checkpoints.huggingface import HUGGINGFACE
from vitkit.checkpoints.native import NATIVE
from vitkit.checkpoints.resnets import RESNET_DIALECTS, check_resnet
from vitkit.checkpoints.rules import REFUSED, Dialect, check, complete_positions, few, refuse
from vitkit.checkpoints.siglip import SIGLIP_HF
from vitkit.checkpoints.timm import TIMM
from vitkit.checkpoints.torchvision import TORCHVISION
from vitkit.errors import CannotExpress, UnknownDialect, pick
from vitkit.model.backbone import Backbone, Config
from vitkit.model.create import build
from vitkit.model.resnet_config import ResNetConfig

# What wrappers put in front of names.
PREFIXES = (
    *("module.", "_orig_mod.", "model.", "net.", "backbone.", "encoder."),
    *("vit.", "deit.", "ijepa.", "student.", "teacher."),
)
TORCH_ENCODER = re.compile(r"layers\.\d+\.self_attn\.in_proj_")
_ROWS = (
    *(NATIVE, HUGGINGFACE, TIMM, TORCHVISION, GOOGLE, DINOV2, DINOV2_HF, COURSE),
    *(CLIP, CLIP_HF, SIGLIP_HF, DINOV3, DINOV3_HF, BEIT_HF, AIMV2_HF),
)
DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in _ROWS}


def every_dialect(name: str | None = None) -> list[Dialect]:
    """Return the dialects of ViTs and of ResNets: those of this name, or all."""
    if name is not None:
        pick(DIALECTS, name, "dialect")
    return [row for row in (*DIALECTS.values(), *RESNET_DIALECTS.values()) if name in (None, row.name)]


def dialect_of(config: Config, name: str) -> Dialect:
    """Return the dialect of this name for a model.

    Raises:
        UnknownName: there is no such dialect.
        CannotExpress: it has no place for a property of the model.
    """
    row = pick(DIALECTS, name, "dialect")
    if isinstance(config, ResNetConfig):
        check_resnet(config, name)
        return RESNET_DIALECTS[name]
    check_expressible(config, name)
    return row


def recognise(names: Iterable[str], origin: str = "") -> Dialect:
    """Return the dialect of a file.

    Args:
        names: the names of its tensors.
        origin: what else is known about the file, for the message.

    Raises:
        CannotExpress: the names reveal an architecture that vitkit does not support.
        UnknownDialect: no dialect recognises the names; the message shows those that do not fit the closest one.
    """
    names = list(names)
    for dialect in every_dialect():
        if dialect.recognises(names):
            return dialect
    for name in names:
        refuse(name, REFUSED)
    closest = max(DIALECTS.values(), key=lambda dialect: sum(dialect.fits(name) for name in names))
    odd = [name for name in names if not closest.fits(name)]
    lacking = [name for name in closest.signature if name not in {closest.spelled(name) for name in names}]
    what = f"{few(odd)} {'do' if len(odd) > 1 else 'does'} not fit" if odd else f"{few(lacking)} is missing"
    raise UnknownDialect(
        f"Expected the tensor names of a Vision Transformer in one of the dialects {', '.join(DIALECTS)}; this file"
        f"{origin} has none of them. "
        + (f"In {closest.name}, the closest, {what}. " if len(odd) < len(names) else f"Its names: {few(odd)}. ")
        + "If it is such a model, rename its tensors (rename=, --rename)."
    )


def identify(
    names: Mapping[str, str], among: Iterable[Dialect], origin: str, notes: list[str]
) -> tuple[Dialect, dict[str, str]]:
    """Find the dialect of a file, ignoring the prefixes that wrappers put in front of its names.

    Args:
        names: each tensor's name in the file -> its name, which may be a new one.
        among: the dialects to consider.
        origin: what else is known about the file, for messages.
        notes: receives a sentence if a prefix was removed.

    Returns:
        The dialect, and the names without the prefix.

    Raises:
        CannotExpress, UnknownDialect: see `recognise`.
    """
    among, bare, removed = list(among), dict(names), ""
    if torch_encoder := next((name for name in bare.values() if TORCH_ENCODER.search(name)), None):
        raise CannotExpress(
            f"This file comes from torch.nn.TransformerEncoder (tensor {torch_encoder!r}), whose names do not tell "
            f"pre-norm from post-norm, PyTorch's default, so the model cannot be known. If it was built with "
            f"norm_first=True, rename its tensors to those of a dialect (rename=, --rename)."
        )
    while not (found := [dialect for dialect in among if dialect.recognises(bare.values())]):
        shorter = {p: {old: new.removeprefix(p) for old, new in bare.items()} for p in PREFIXES}
        shorter = {p: new for p, new in shorter.items() if new != bare and len(set(new.values())) == len(new)}
        known = [p for p in shorter if any(dialect.recognises(shorter[p].values()) for dialect in among)]
        shared = [p for p in shorter if all(name.startswith(p) for name in bare.values())]
        if not known and not shared:
            found = [recognise(bare.values(), origin)]
            break
        prefix = (known or shared)[0]
        bare, removed = shorter[prefix], removed + prefix
    if removed:
        notes.append(f"The prefix {removed!r} was removed from the names of the tensors.")
    return found[0], bare


class _NoFilling(TorchFunctionMode):
    """Skip initialisation: without storage it has no effect, but torch would import its compiler for it (seconds)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_", "trunc_normal_", "fill_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def skeleton(config: Config) -> Backbone:
    """Build a model without storage: names and shapes only."""
    with torch.device("meta"), _NoFilling():
        return build(config)


def fill(model: Backbone, state: Mapping[str, Tensor]) -> Backbone:
    """Give a skeleton its tensors, without copying them, and return it; it gets the device and type of the first."""
    model.load_state_dict(state, assign=True)
    like = next(model.parameters())
    for module in model.modules():
        for name, buffer in module._buffers.items():  # none of them is in files: they hold device and type only
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=like.dtype, device=like.device)
    return model


def to_dialect(model: Backbone, dialect: str) -> dict[str, Tensor]:
    """Return the tensors of a model as a dialect's files have them. They may share the model's memory.

    Args:
        model: a ViT or a ResNet.
        dialect: a row of DIALECTS.

    Raises:
        CannotExpress: the model has a property that the dialect has no place for.
    """
    return dialect_of(model.config, dialect).write(plain_state(model), model.config)


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state dict as if it had no parametrizations: the tensors that it computes with."""
    state = model.state_dict()
    for name, module in model.named_modules():
        for part in getattr(module, "parametrizations", ()):
            inside = f"{name}.parametrizations.{part}."
            state = {key: tensor for key, tensor in state.items() if not key.startswith(inside)}
            state[f"{name}.{part}"] = getattr(module, part).detach()
    return state


def from_dialect(tensors: Mapping[str, Tensor], dialect: str, config: Config) -> dict[str, Tensor]:
    """Return a dialect's tensors as the model's state dict, ready for `build(config).load_state_dict`.

    Args:
        tensors: all tensors of a file of that dialect.
        dialect: a row of DIALECTS.
        config: the model they are for.

    Raises:
        TensorMismatch: tensors missing, left over, or of another shape.
        CannotExpress: the file holds an architecture that the model does not have.
    """
    pick(DIALECTS, dialect, "dialect")
    row = (RESNET_DIALECTS if isinstance(config, ResNetConfig) else DIALECTS)[dialect]
    state, _, _ = row.read(tensors)
    complete_positions(state, config)
    check(state, {name: tensor.shape for name, tensor in skeleton(config).state_dict().items()}, row)
    return state
