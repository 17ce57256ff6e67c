"""Pixels -> pixels: maps brought to an image's size and laid over it, frames, smaller images, files in memory."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitkit.types import Array

FRAME = (20, 200, 255)
# From cold to warm: dark violet, red, orange, pale yellow.
WARM = (
    (0, 0, 4),
    (31, 12, 72),
    (85, 15, 109),
    (136, 34, 106),
    (186, 54, 85),
    (227, 89, 51),
    (249, 140, 10),
    (249, 201, 50),
    (252, 255, 164),
)


def encoded(image: NDArray[np.uint8], kind: str, **how: Any) -> bytes:
    """[H, W, 3] pixels as the bytes of a file in one of Pillow's formats."""
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(out, kind, **how)
    return out.getvalue()


def png(image: NDArray[np.uint8]) -> bytes:
    """The bytes of a PNG file of [H, W, 3] pixels."""
    return encoded(image, "PNG")


def jpeg(image: NDArray[np.uint8]) -> bytes:
    """The bytes of a JPEG file of [H, W, 3] pixels."""
    return encoded(image, "JPEG", quality=85)


def unit(values: Array, most: float = 0.97) -> Array:
    """Values brought to 0..1; all zeros where they are all the same.

    Args:
        values: any; NaN is passed over.
        most: the quantile that becomes 1: a few glaring patches must not make the rest invisible.
    """
    values = np.asarray(values, np.float32)
    low, high = float(np.nanmin(values)), float(np.nanquantile(values, most))
    high = high if high > low else float(np.nanmax(values))
    return np.clip((values - low) / (high - low), 0, 1) if high > low else np.zeros_like(values)


def enlarged(values: Array, height: int, width: int) -> Array:
    """A map [rows, columns] at [height, width], bilinear between the centres of the patches."""

    def axis(old: int, new: int) -> tuple[Array, Array, Array]:
        at = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        low = np.minimum(np.floor(at).astype(int), max(old - 2, 0))
        return low, np.minimum(low + 1, old - 1), at - low

    r0, r1, fr = axis(values.shape[0], height)
    c0, c1, fc = axis(values.shape[1], width)
    values = np.asarray(values, np.float32)
    rows = values[r0] * (1 - fr)[:, None] + values[r1] * fr[:, None]  # [height, columns]
    return (rows[:, c0] * (1 - fc) + rows[:, c1] * fc).astype(np.float32)


def overlay(image: NDArray[np.uint8], heat: Array, strength: float = 0.7) -> NDArray[np.uint8]:
    """A map over an image, at the image's own resolution: gray where it is small, coloured where it is large.

    Args:
        image: [H, W, 3].
        heat: [rows, columns] of patches; brought to 0..1 here.
        strength: share of the colour where the map is largest.
    """
    h = enlarged(unit(heat), *image.shape[:2])[..., None]
    at = np.linspace(0, len(WARM) - 1, 256)
    colours = np.stack([np.interp(at, range(len(WARM)), [c[i] for c in WARM]) for i in range(3)], -1)  # [256, 3]
    colours = colours.astype(np.float32)
    gray = image.mean(-1, keepdims=True, dtype=np.float32) * 0.6 + 15
    return (gray * (1 - strength * h) + colours[(h[..., 0] * 255).astype(np.uint8)] * strength * h).astype(np.uint8)


def spotlight(image: NDArray[np.uint8], heat: Array) -> NDArray[np.uint8]:
    """Figure 6's way: the image as bright as the map is large.

    Args:
        image: [H, W, 3].
        heat: [rows, columns] of patches.
    """
    h = enlarged(unit(heat), *image.shape[:2])[..., None]
    return (image * h).astype(np.uint8)


def framed(image: NDArray[np.uint8], patch: tuple[int, ...], grid: tuple[float, ...]) -> NDArray[np.uint8]:
    """An image with a frame around one patch.

    Args:
        image: [H, W, 3].
        patch: (row, column).
        grid: patches down and across; broken numbers where the last ones are cut.
    """
    result = image.copy()
    top, left = (round(i * side / n) for i, side, n in zip(patch, image.shape, grid, strict=False))
    bottom, right = (round((i + 1) * side / n) for i, side, n in zip(patch, image.shape, grid, strict=False))
    wide = max(min(image.shape[:2]) // 120, 1)
    result[top:bottom, left:right] = FRAME
    inside = slice(top + wide, bottom - wide), slice(left + wide, right - wide)
    result[inside] = image[inside]
    return result


def shrunk(image: NDArray[np.uint8], most: int) -> NDArray[np.uint8]:
    """An image made smaller where it is wider than `most` pixels.

    Args:
        image: [H, W, 3].
        most: pixels.
    """
    H, W = image.shape[:2]
    if most >= W:
        return image
    size = most, max(round(H * most / W), 1)
    return np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize(size, Image.Resampling.BOX))


def spread(cut: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], int]:
    """Patches [rows, columns, P, P, C] laid out with white gaps; and the step from one to the next in pixels."""
    rows, columns, P, _, channels = cut.shape
    step = P + max(P // 8, 1)
    sheet = np.full((rows * step - step + P, columns * step - step + P, channels), 255, np.uint8)
    for r in range(rows):
        for c in range(columns):
            sheet[r * step : r * step + P, c * step : c * step + P] = cut[r, c]
    return sheet, step
