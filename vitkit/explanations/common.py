"""What every explanation needs first: the plain ViT in evaluation mode, and pixels that fit it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.model.backbone import Backbone
from vitkit.model.config import InputSpec, ViTConfig
from vitkit.model.create import need_vit
from vitkit.model.inputs import checked, validate_and_pad
from vitkit.model.vit import ViT
from vitkit.types import Array, Progress

Arrays = dict[str, Array]
Grid = tuple[int, int]
Pixels = Tensor | Iterable[Tensor]  # one batch [B, C, H, W], or an iterable of batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """What a user can choose about an explanation.

    Args:
        target: class to explain (default: the most probable class of each image).
        patch: (row, column), counted from 0, of the patch to compare the others with (default: the middle one).
        layer: compare the patches in z_layer: 0 is the output of Eq. 1, L that of the last layer; negative numbers
            count from the end (default: the output of the final LayerNorm).
        names: class names (default: those in the checkpoint, or else the class numbers).
        progress: called with (done, total) during long computations.
    """

    target: int | None = None
    patch: Grid | None = None
    layer: int | None = None
    names: tuple[str, ...] = ()
    progress: Progress | None = None


def unwrap(model: nn.Module) -> ViT:
    """Return the plain ViT inside a wrapped one, without copying parameters.

    Args:
        model: a ViT, or one wrapped by torch.compile or DistributedDataParallel.
    """
    return need_vit(unwrap_any(model), "Looking at tokens or attention")


def unwrap_any(model: nn.Module) -> Backbone:
    """Return the plain ViT or ResNet inside a wrapped one, without copying parameters.

    Args:
        model: a ViT or ResNet, or one wrapped by torch.compile or DistributedDataParallel.
    """
    inner: Any = model
    while not isinstance(inner, Backbone):
        wrapped = getattr(inner, "_orig_mod", None)
        wrapped = getattr(inner, "module", None) if wrapped is None else wrapped
        if not isinstance(wrapped, nn.Module):
            raise InputError(
                f"Expected a vitkit.ViT, or one wrapped by torch.compile; got {type(model).__name__}. "
                f"Load it with vitkit.load(...)."
            )
        inner = wrapped
    return inner


@contextmanager
def eval_mode(model: nn.Module, x: Tensor) -> Iterator[tuple[ViT, Tensor]]:
    """Yield the plain ViT in evaluation mode and its checked pixels; restore every module's mode on exit.

    Args:
        model: see `unwrap`.
        x: pixels [B, C, H, W], on any device; padded, cast and moved to match the model.
    """
    vit = unwrap(model)
    with eval_mode_any(vit, x) as (_, fitted):
        yield vit, fitted


@contextmanager
def eval_mode_any(model: nn.Module, x: Tensor) -> Iterator[tuple[Backbone, Tensor]]:
    """Do the same for a ViT or a ResNet.

    Args:
        model: see `unwrap_any`.
        x: as for `eval_mode`.
    """
    inner = unwrap_any(model)
    modes = {module: module.training for module in inner.modules()}
    weight, c = next(inner.parameters()), inner.config
    try:
        inner.eval()
        x = validate_and_pad(x, c) if isinstance(c, ViTConfig) else checked(x, c)
        yield inner, x.to(weight.device, weight.dtype)
    finally:
        for module, mode in modes.items():
            module.training = mode


def batches(pixels: Pixels, size: int = 8) -> Iterator[Tensor]:
    """Yield batches of at most `size` images."""
    for x in [pixels] if isinstance(pixels, Tensor) else pixels:
        yield from x.split(size)


def grid_of(model: nn.Module, x: Tensor) -> Grid:
    """Return the (rows, columns) of patches in pixels x [B, C, H, W]; of a ResNet, those of its last feature map."""
    P = cell_of(model)
    return -(-x.shape[2] // P), -(-x.shape[3] // P)


def cell_of(model: nn.Module) -> int:
    """Return the side in pixels of what one value of a map stands for: a patch, or a place of a ResNet's last map."""
    c = unwrap_any(model).config
    return c.patch_size if isinstance(c, ViTConfig) else c.pixels


def patch_map(values: Array, model: nn.Module, grid: Grid) -> Array:
    """Drop the values of the prefix tokens and arrange the rest as a grid: [..., T] -> [..., rows, columns]."""
    prefix = unwrap(model).config.num_prefix_tokens
    return values[..., prefix:].reshape(*values.shape[:-1], *grid)


def to_array(x: Tensor) -> Array:
    """Convert a tensor to NumPy; half-precision values become float32."""
    x = x.detach().cpu()
    return (x.float() if x.is_floating_point() and x.dtype != torch.float64 else x).numpy()


def image_of(x: Tensor, model: nn.Module) -> NDArray[np.uint8]:
    """Undo the normalisation: [B, C, H, W] -> [B, H, W, 3] uint8 (one or two channels are shown in gray)."""
    return shown(x, unwrap_any(model).input_spec)


def shown(x: Tensor, spec: InputSpec) -> NDArray[np.uint8]:
    """Do the same for pixels that were prepared as `spec` says."""
    mean, std = (torch.tensor(v, device=x.device)[:, None, None] for v in (spec.mean, spec.std))
    image = (x.float() * std + mean).clamp(0, 1).mul(255).round().byte()  # [B, C, H, W]
    image = image[:, :3] if image.shape[1] >= 3 else image[:, :1].expand(-1, 3, -1, -1)
    return image.permute(0, 2, 3, 1).cpu().numpy()


def reader(model: nn.Module) -> tuple[slice, str]:
    """Return which tokens the head reads, and a name for them.

    With pool="cls" that is the class token. With pool="mean" no single token represents the image; the head reads the
    mean over all patches (Eq. 4), so explanations average over the rows of all patches too.
    """
    c = unwrap(model).config
    if c.pool == "cls":
        return slice(0, 1), "class token"
    return slice(c.num_prefix_tokens, None), "mean of the patches"


def targets_of(logits: Tensor, target: int | None) -> Tensor:
    """Return the class to explain for each image, [B].

    Args:
        logits: [B, K].
        target: a class (default: the most probable one).
    """
    K = logits.shape[1]
    if target is None:
        return logits.argmax(1)
    if not 0 <= target < K:
        raise InputError(f"Expected a class between 0 and {K - 1}; got {target}.")
    return torch.full((len(logits),), target, device=logits.device)


def needs_head(vit: Backbone, what: str) -> None:
    """Raise InputError if the model has no head, because `what` explains a class."""
    if not vit.config.num_classes:
        raise InputError(
            f"{what} needs a model with a classification head, but this one has no head (num_classes=0). "
            f"Load one that has classes, or look at attention or rollout instead."
        )


def patch_at(patch: Grid | None, grid: Grid) -> Grid:
    """Check a patch's (row, column), counted from 0, against the grid (default: the middle patch)."""
    if patch is None:
        return grid[0] // 2, grid[1] // 2
    row, column = patch
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise InputError(
            f"Expected a patch in a grid of {grid[0]} rows and {grid[1]} columns, both counted from 0; got "
            f"row {row}, column {column}."
        )
    return row, column
