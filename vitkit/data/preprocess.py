"""An image -> what a model was evaluated with: InputSpec, obeyed to the bit.

Pillow's resize gives timm's and Hugging Face's Pillow pixels exactly; `backend="tensor"` resizes as Hugging Face's
default processor does. Normalising is written as the three operations that everybody's is, in their order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitkit.data.decode import to_channels
from vitkit.errors import ConfigError
from vitkit.model.config import InputSpec, Interpolation
from vitkit.types import Array

FILTERS: dict[Interpolation, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

IN_CACHE = 2**16  # numbers


def resized(width: int, height: int, spec: InputSpec) -> tuple[int, int]:
    """(width, height) after the resize and before the crop.

    Args:
        width: of the image.
        height: of the image.
        spec: what the model expects.
    """
    H, W = spec.size
    if spec.resize == "squash":
        return W, H
    H, W = math.floor(H / spec.crop), math.floor(W / spec.crop)
    if H == W:  # the shorter side becomes that long, the other is cut down to whole pixels
        return (H, int(H * height / width)) if width <= height else (int(H * width / height), H)
    ratio = min(height / H, width / W)  # both sides cover the wanted ones
    return round(width / ratio), round(height / ratio)


def pixels(image: Image.Image, spec: InputSpec, name: str = "image") -> Tensor:
    """Resize and crop a decoded image: [C, H, W] uint8.

    Args:
        image: as `decode` returns it.
        spec: what the model expects.
        name: what to call the image in an error.
    """
    image = to_channels(image, spec.channels, len(spec.mean), name)
    H, W = spec.size
    width, height = resized(*image.size, spec)
    left, top = round((width - W) / 2), round((height - H) / 2)
    if spec.backend == "tensor":
        x = resize_tensor(planes(np.array(image)), (height, width), spec.interpolation)
        return x[:, top : top + H, left : left + W]
    if width > W and image.width >= image.height and image.mode in ("RGB", "L"):
        # Of such an image Pillow resizes the width first. Done in two steps, with the same result, the columns that the
        # crop drops are never resized in height.
        image = image.resize((width, image.height), FILTERS[spec.interpolation]).crop((left, 0, left + W, image.height))
        width, left = W, 0
    if image.size != (width, height):
        image = image.resize((width, height), FILTERS[spec.interpolation])
    if (width, height) != (W, H):
        image = image.crop((left, top, left + W, top + H))
    return torch.from_numpy(np.array(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1), order="C"))


def preprocess(image: Image.Image, spec: InputSpec, name: str = "image") -> Tensor:
    """A decoded image as a model expects it: [C, H, W] float32.

    Args:
        image: as `decode` returns it.
        spec: what the model expects.
        name: what to call the image in an error.
    """
    return normalize(pixels(image, spec, name)[None], spec)[0]


def normalize(x: Tensor | Sequence[Tensor], spec: InputSpec) -> Tensor:
    """Bring pixels to 0..1, subtract the mean, divide by the standard deviation.

    Args:
        x: [B, C, H, W] uint8, on any device; or several of them, which become one batch.
        spec: what the model expects.

    Returns:
        [B, C, H, W] float32.
    """
    parts = [x] if isinstance(x, Tensor) else list(x)
    device = parts[0].device
    mean, std = _colours(spec.mean, device), _colours(spec.std, device)
    if device.type != "cpu":
        return torch.cat(parts).div(255).sub_(mean).div_(std)
    out = torch.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=torch.float32)
    few = max(1, IN_CACHE // max(1, parts[0][:1].numel()))  # so few images at a time stay in the processor's cache
    start = 0
    for images in (images for part in parts for images in part.split(few)):
        out[start : start + len(images)].copy_(images).div_(255).sub_(mean).div_(std)
        start += len(images)
    return out


@functools.lru_cache(maxsize=16)
def _colours(values: tuple[float, ...], device: torch.device) -> Tensor:
    # Kept: a copy to a GPU, however small, would wait for all that the GPU has yet to do.
    return torch.tensor(values, device=device)[:, None, None]


def resize_tensor(x: Tensor, size: tuple[int, int], interpolation: Interpolation) -> Tensor:
    """Resize [C, H, W] or [n, C, H, W] uint8 by torch's antialiased filter.

    Args:
        x: the pixels.
        size: (height, width) wanted.
        interpolation: `bilinear`, `bicubic` or `nearest`.
    """
    if interpolation == "lanczos":
        raise ConfigError("interpolation='lanczos' needs backend='pillow'; tensors have bilinear, bicubic and nearest.")
    if x.ndim == 3:
        return resize_tensor(x[None], size, interpolation)[0]
    if interpolation == "nearest":
        return F.interpolate(x, size, mode="nearest-exact")
    return F.interpolate(x, size, mode=interpolation, antialias=True)


def planes(array: Array) -> Tensor:
    """Pixels [H, W, C] or [H, W] as [C, H, W], not copied."""
    return torch.from_numpy(array if array.ndim == 3 else array[:, :, None]).permute(2, 0, 1)
