"""What every explanation starts with: the plain ViT, still, with its pixels beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.model.inputs import validate_and_pad
from vitkit.model.vit import ViT
from vitkit.types import Array

Arrays = dict[str, Array]
Grid = tuple[int, int]
Pixels = Tensor | Iterable[Tensor]  # one batch [B, C, H, W], or batches one after another


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """What a user may choose about an explanation.

    Args:
        target: class to explain; the most probable one of each image when None.
        patch: (row, column) of the patch that others are compared with; the one in the middle when None.
        layer: states to compare, 0 (after Eq. 1) to L, or from the end; the last one when None.
        names: of the classes; the checkpoint's own, else their numbers, when empty.
        progress: called with (done, of how many) by what takes long.
    """

    target: int | None = None
    patch: Grid | None = None
    layer: int | None = None
    names: tuple[str, ...] = ()
    progress: Callable[[int, int], None] | None = None


def unwrap(model: nn.Module) -> ViT:
    """The plain ViT beneath a compiled or otherwise wrapped one (same parameters, no copy).

    Args:
        model: a ViT, or what torch.compile or DistributedDataParallel made of it.
    """
    inner: Any = model
    while not isinstance(inner, ViT):
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
    """Yield the plain model without dropout, and pixels that fit it; every module's mode is put back afterwards.

    Args:
        model: see `unwrap`.
        x: pixels [B, C, H, W], on any device.
    """
    vit = unwrap(model)
    modes = {module: module.training for module in vit.modules()}
    weight = vit.patch_embedding.projection.weight
    try:
        vit.eval()
        yield vit, validate_and_pad(x, vit.config).to(weight.device, weight.dtype)
    finally:
        for module, mode in modes.items():
            module.training = mode


def batches(pixels: Pixels, size: int = 8) -> Iterator[Tensor]:
    """Yield batches of at most `size` images, whether one tensor was given or batches."""
    for x in [pixels] if isinstance(pixels, Tensor) else pixels:
        yield from x.split(size)


def grid_of(model: nn.Module, x: Tensor) -> Grid:
    """(rows, columns) of the patches of pixels that fit the model."""
    P = unwrap(model).config.patch_size
    return -(-x.shape[2] // P), -(-x.shape[3] // P)


def patch_map(values: Array, model: nn.Module, grid: Grid) -> Array:
    """The patches' part of values of tokens: [..., T] -> [..., rows, columns]."""
    prefix = unwrap(model).config.num_prefix_tokens
    return values[..., prefix:].reshape(*values.shape[:-1], *grid)


def to_array(x: Tensor) -> Array:
    """A tensor of any device and type as NumPy; floating point becomes float32, or stays float64."""
    x = x.detach().cpu()
    return (x.float() if x.is_floating_point() and x.dtype != torch.float64 else x).numpy()


def image_of(x: Tensor, model: nn.Module) -> NDArray[np.uint8]:
    """Pixels as a person sees them: normalisation undone, [B, H, W, 3] uint8 (one or two channels become gray)."""
    spec = unwrap(model).input_spec
    mean, std = (torch.tensor(v, device=x.device)[:, None, None] for v in (spec.mean, spec.std))
    shown = (x.float() * std + mean).clamp(0, 1).mul(255).round().byte()  # [B, C, H, W]
    shown = shown[:, :3] if shown.shape[1] >= 3 else shown[:, :1].expand(-1, 3, -1, -1)
    return shown.permute(0, 2, 3, 1).cpu().numpy()


def reader(model: nn.Module) -> tuple[slice, str]:
    """Which tokens the head reads, and what they are called.

    With pool="cls" that is the class token. With pool="mean" no single token sums the image up: the mean over the
    patches' rows takes its place, because that mean is what the head is given (Eq. 4).
    """
    c = unwrap(model).config
    if c.pool == "cls":
        return slice(0, 1), "class token"
    return slice(c.num_prefix_tokens, None), "mean of the patches"


def targets_of(logits: Tensor, target: int | None) -> Tensor:
    """The class to explain of each image, [B]: the one asked for, or the most probable.

    Args:
        logits: [B, K].
        target: a class, or None.
    """
    K = logits.shape[1]
    if target is None:
        return logits.argmax(1)
    if not 0 <= target < K:
        raise InputError(f"Expected a class between 0 and {K - 1}; got {target}.")
    return torch.full((len(logits),), target, device=logits.device)


def needs_head(vit: ViT, what: str) -> None:
    """Refuse a model without classes where a class is to be explained."""
    if not vit.config.num_classes:
        raise InputError(
            f"{what} explains a class, but this model has no head (num_classes=0); load one that "
            f"classifies, or look at its attention and rollout."
        )


def patch_at(patch: Grid | None, grid: Grid) -> Grid:
    """(row, column) of the patch that was asked for, checked; the middle one when None."""
    if patch is None:
        return grid[0] // 2, grid[1] // 2
    row, column = patch
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise InputError(
            f"Expected a patch in a grid of {grid[0]} rows and {grid[1]} columns, counted from 0; got "
            f"row {row}, column {column}."
        )
    return row, column
