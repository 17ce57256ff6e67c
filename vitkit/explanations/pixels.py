"""Pixels -> pixels: resize a map and lay it over its image, frame a patch, shrink and encode images."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitkit.types import Array

FRAME = (20, 200, 255)
# Nine evenly spaced colours of matplotlib's "inferno": this file does not import matplotlib.
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
    """Encode [H, W, 3] pixels in one of Pillow's formats."""
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(out, kind, **how)
    return out.getvalue()


def png(image: NDArray[np.uint8]) -> bytes:
    """Encode [H, W, 3] pixels as PNG."""
    return encoded(image, "PNG")


def jpeg(image: NDArray[np.uint8]) -> bytes:
    """Encode [H, W, 3] pixels as JPEG."""
    return encoded(image, "JPEG", quality=85)


def to_unit_range(values: Array, most: float = 0.97) -> Array:
    """Scale values to 0..1, saturating at a quantile; constant values become zeros.

    Args:
        values: any shape; NaN is ignored.
        most: the quantile that becomes 1 (default: 0.97), so that a few extreme patches do not hide the rest.
    """
    values = np.asarray(values, np.float32)
    low, high = float(np.nanmin(values)), float(np.nanquantile(values, most))
    high = high if high > low else float(np.nanmax(values))
    return np.clip((values - low) / (high - low), 0, 1) if high > low else np.zeros_like(values)


def enlarged(values: Array, height: int, width: int) -> Array:
    """Resize a map [rows, columns] to [height, width], bilinearly between the centres of the patches."""

    def axis(old: int, new: int) -> tuple[Array, Array, Array]:
        at = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        low = np.minimum(np.floor(at).astype(int), max(old - 2, 0))
        return low, np.minimum(low + 1, old - 1), at - low

    r0, r1, fr = axis(values.shape[0], height)
    c0, c1, fc = axis(values.shape[1], width)
    values = np.asarray(values, np.float32)
    rows = values[r0] * (1 - fr)[:, None] + values[r1] * fr[:, None]  # [height, columns]
    return (rows[:, c0] * (1 - fc) + rows[:, c1] * fc).astype(np.float32)


def overlay(image: NDArray[np.uint8], heat: Array, limits: tuple[float, float] | None = None) -> NDArray[np.uint8]:
    """Brighten an image where a map is high: dimmed and nearly gray where it is low, itself with a warm tint above.

    Args:
        image: [H, W, 3].
        heat: [rows, columns], one value per patch, in any range.
        limits: values that are shown as lowest and highest (default: the map's own; see `to_unit_range`).
    """
    low, high = limits or (0.0, 0.0)
    unit = np.clip((heat - low) / (high - low), 0, 1) if high > low else to_unit_range(heat)
    h = enlarged(unit, *image.shape[:2])[..., None]
    at = np.linspace(0, len(WARM) - 1, 256)
    colours = np.stack([np.interp(at, range(len(WARM)), [c[i] for c in WARM]) for i in range(3)], -1)  # [256, 3]
    tint = colours.astype(np.float32)[((0.35 + 0.6 * h[..., 0]) * 255).astype(np.uint8)]
    colour = image.astype(np.float32)
    dim = (0.8 * colour.mean(-1, keepdims=True) + 0.2 * colour) * 0.35 + 8
    return ((dim * (1 - h) + colour * h) * (1 - 0.45 * h) + tint * 0.45 * h).astype(np.uint8)


def framed(image: NDArray[np.uint8], patch: tuple[int, ...], grid: tuple[float, ...]) -> NDArray[np.uint8]:
    """Draw a frame around one patch.

    Args:
        image: [H, W, 3].
        patch: (row, column), counted from 0.
        grid: (rows, columns); fractional if padding was cut from the last ones.
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
    """Shrink an image [H, W, 3] that is wider than `most` pixels."""
    H, W = image.shape[:2]
    if most >= W:
        return image
    size = most, max(round(H * most / W), 1)
    return np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize(size, Image.Resampling.BOX))
