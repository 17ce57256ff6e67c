"""Pillow's resize for many images at once, to the bit: of different sizes, on a GPU, in two launches of a kernel.

Pillow resizes an 8-bit image in two passes, first the width, then the height. Each output is a sum of a few pixels with
integer weights of 22 bits, rounded to 8 bits. All of that is repeated here with the same integers, but only for pixels
that the crop keeps. The kernel is in triton_resize.py; the same mathematics in plain torch runs on other devices, and
tests compare both with Pillow.

Legend: n images of C channels; an axis of `size` pixels is resized to `to` pixels, of which a crop keeps some.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitkit.data.preprocess import resized
from vitkit.model.config import InputSpec, Interpolation
from vitkit.types import Array

BITS = 22  # of the weights
REMEMBERED = 4096  # axes whose weights stay on the device: about 10 kB each


def _bilinear(x: Array) -> Array:
    x = np.abs(x)
    return np.where(x < 1, 1 - x, 0.0)


def _bicubic(x: Array) -> Array:
    a, x = -0.5, np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    return np.where(x < 1, near, np.where(x < 2, (((x - 5) * x + 8) * x - 4) * a, 0.0))


def _lanczos(x: Array) -> Array:
    return np.where((x >= -3) & (x < 3), _sinc(x) * _sinc(x / 3), 0.0)


def _sinc(x: Array) -> Array:
    x = np.where(x == 0, 1e-20, x * math.pi)
    return np.vectorize(math.sin, otypes=[np.float64])(x) / x  # NumPy's own sine may differ from C's in the last bit


# Pillow's filters: the function, and how far it reaches.
FILTERS: dict[Interpolation, tuple[Callable[[Array], Array], float]] = {
    "bilinear": (_bilinear, 1.0),
    "bicubic": (_bicubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}


class Axis(NamedTuple):
    """One axis of an image: `size` pixels are resized to `to`, of which those from `first` on are kept."""

    size: int
    to: int
    first: int


def axes(width: int, height: int, spec: InputSpec) -> tuple[Axis, Axis]:
    """Return how the width and the height of an image are resized and cropped; see `preprocess.cropped`.

    Args:
        width: width of the image in pixels.
        height: height of the image in pixels.
        spec: the input that the model expects.
    """
    (H, W), (wide, high) = spec.size, resized(width, height, spec)
    return Axis(width, wide, round((wide - W) / 2)), Axis(height, high, round((high - H) / 2))


def takes(spec: InputSpec) -> bool:
    """Return whether images for this input are resized by Pillow's filters, and not by another library's or by none."""
    return spec.backend == "pillow" and spec.interpolation in FILTERS


def width_first(across: Axis, down: Axis) -> bool:
    """Return whether every version of Pillow resizes the width of an image first.

    Pillow 13 begins with the height of an image that loses many more rows than columns; rounding in between makes that
    another result.
    """
    return down.size - down.to <= 2 * max(0, across.size - across.to)


@functools.lru_cache(maxsize=REMEMBERED)
def weights(axis: Axis, count: int, interpolation: Interpolation) -> Array:
    """Return Pillow's weights for resizing an axis, [count, 1 + taps] int32.

    Each row holds the first input pixel of an output, then the weight of that pixel and of the following ones, in units
    of 1 / 2**BITS. All of these pixels lie inside the image.

    Args:
        axis: the axis.
        count: number of outputs that are kept.
        interpolation: a row of FILTERS.
    """
    size, to, first = axis
    if size == to:  # Pillow skips this pass
        start = np.arange(first, first + count)
        return np.stack([start, np.full(count, 1 << BITS)], axis=1).astype(np.int32)
    function, reach = FILTERS[interpolation]
    scale = size / to
    stretch = max(scale, 1.0)
    center = (np.arange(first, first + count) + 0.5) * scale
    low = np.maximum((center - reach * stretch + 0.5).astype(np.int64), 0)
    high = np.minimum((center + reach * stretch + 0.5).astype(np.int64), size)
    taps = int((high - low).max())
    start = np.minimum(low, size - taps)
    at = start[:, None] + np.arange(taps)
    k = function((at - center[:, None] + 0.5) * (1.0 / stretch))
    k = np.where((at >= low[:, None]) & (at < high[:, None]), k, 0.0)
    total = np.add.accumulate(k, axis=1)[:, -1:]  # one after the other, as Pillow adds them
    k = np.divide(k, total, out=k, where=total != 0) * (1 << BITS)
    k = np.trunc(k + np.where(k < 0, -0.5, 0.5))
    return np.concatenate([start[:, None], k], axis=1).astype(np.int32)


def by_triton(x: Tensor) -> bool:
    """Return whether the Triton kernel runs on x: on CUDA, and on any device in Triton's interpreter."""
    return (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and has_triton()


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


class Resize:
    """Resize and crop images of any sizes to a model's input size, as Pillow would.

    Args:
        spec: the input that the model expects; `takes(spec)` must hold.
        device: where the images are.
    """

    def __init__(self, spec: InputSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self._tables: OrderedDict[tuple[Axis, int], Tensor] = OrderedDict()

    def __call__(self, images: Sequence[Tensor], plain: Sequence[bool] | None = None) -> Tensor:
        """Return the images in the model's size, [n, C, H, W] uint8.

        Args:
            images: [C, h, w] uint8 each, on the device, with any strides.
            plain: whether each image has the model's size already (default: none has, so that the crop is applied).
        """
        H, W = self.spec.size
        plans: list[tuple[Axis, Axis]] = []
        for n, image in enumerate(images):
            _, height, width = image.shape
            ready = plain is not None and plain[n]
            plans.append((Axis(W, W, 0), Axis(H, H, 0)) if ready else axes(width, height, self.spec))
        out = torch.empty((len(images), len(self.spec.mean), H, W), dtype=torch.uint8, device=self.device)
        if images:
            (self._by_triton if by_triton(out) else self._by_torch)(images, plans, out)
        return out

    def _by_torch(self, images: Sequence[Tensor], plans: list[tuple[Axis, Axis]], out: Tensor) -> None:
        H, W = self.spec.size
        for n, (image, (across, down)) in enumerate(zip(images, plans, strict=True)):
            x = image.int()
            for axis, count in ((across, W), (down, H)):  # turned over each time: [C, w, h], then [C, h, w]
                table = torch.from_numpy(weights(axis, count, self.spec.interpolation)).to(self.device)
                at = table[:, :1] + torch.arange(table.shape[1] - 1, device=self.device)
                x = (x[:, :, at] * table[:, 1:]).sum(-1, dtype=torch.int32)  # [C, h, count]
                x = ((x + (1 << (BITS - 1))) >> BITS).clamp_(0, 255).mT
            out[n] = x

    def _by_triton(self, images: Sequence[Tensor], plans: list[tuple[Axis, Axis]], out: Tensor) -> None:
        from vitkit.data import triton_resize

        H, W = self.spec.size
        tables = self._on_device([(axis, count) for plan in plans for axis, count in zip(plan, (W, H))])
        pixels, numbers = images[0], tables[0]
        about = np.empty((len(images), triton_resize.FIELDS), np.int64)
        held, most = 0, 0
        for n, (image, (_, down)) in enumerate(zip(images, plans, strict=True)):
            a, d = tables[2 * n], tables[2 * n + 1]
            rows = weights(down, H, self.spec.interpolation)
            begin, end = int(rows[0, 0]), int(rows[-1, 0]) + rows.shape[1] - 1  # the rows that the height is made of
            channel, row, column = image.stride()
            about[n] = (
                image.data_ptr() - pixels.data_ptr() + begin * row,
                channel,
                row,
                column,
                (a.data_ptr() - numbers.data_ptr()) // 4,
                a.shape[1],
                (d.data_ptr() - numbers.data_ptr()) // 4,
                d.shape[1],
                begin,
                end - begin,
                held,
            )
            held, most = held + end - begin, max(most, end - begin)
        between = torch.empty((held, out.shape[1], W), dtype=torch.uint8, device=self.device)
        triton_resize.resize(pixels, numbers, self._moved(about), between, out, most, BITS)

    def _on_device(self, wanted: list[tuple[Axis, int]]) -> list[Tensor]:
        """Return the weights of axes on the device; those that are new there are copied at once."""
        distinct = dict.fromkeys(wanted)
        if new := [axis for axis in distinct if axis not in self._tables]:
            found = [weights(*axis, self.spec.interpolation) for axis in new]
            flat = self._moved(np.concatenate([table.reshape(-1) for table in found]))
            for axis, table, part in zip(new, found, flat.split([table.size for table in found]), strict=True):
                self._tables[axis] = part.view(table.shape)
        for axis in distinct:
            self._tables.move_to_end(axis)
        result = [self._tables[axis] for axis in wanted]
        while len(self._tables) > REMEMBERED:
            self._tables.popitem(last=False)
        return result

    def _moved(self, array: Array) -> Tensor:
        """Copy numbers to the device; from pinned memory, because a copy from any other would wait for the device."""
        found = torch.from_numpy(array)
        return found.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else found
