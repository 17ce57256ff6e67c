"""Image -> evaluation input, exactly as the InputSpec says.

With Pillow, the pixels equal those of timm and of Hugging Face's Pillow processor; `backend="tensor"` resizes like
Hugging Face's default processor. Normalisation is the same three operations, in the same order, as in those libraries.
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

IN_CACHE = 2**16  # numbers that fit into a core's cache


def resized(width: int, height: int, spec: InputSpec) -> tuple[int, int]:
    """Return (width, height) after the resize and before the crop.

    Args:
        width: width of the image in pixels.
        height: height of the image in pixels.
        spec: the input that the model expects.
    """
    H, W = spec.size
    if spec.resize == "squash":
        return W, H
    H, W = math.floor(H / spec.crop), math.floor(W / spec.crop)
    if H == W:  # the shorter side becomes H, the longer one is rounded down
        return (H, int(H * height / width)) if width <= height else (int(H * width / height), H)
    ratio = min(height / H, width / W)  # the resized image covers H x W
    return round(width / ratio), round(height / ratio)


def pixels(image: Image.Image, spec: InputSpec, name: str = "image") -> Tensor:
    """Resize and crop a decoded image: [C, H, W] uint8.

    Args:
        image: a decoded image.
        spec: the input that the model expects.
        name: name of the image in error messages.
    """
    return torch.from_numpy(np.array(cropped(image, spec, name).transpose(2, 0, 1), order="C"))


def cropped(image: Image.Image, spec: InputSpec, name: str = "image") -> Array:
    """Resize and crop a decoded image: [H, W, C] uint8, as `pixels` but with the channels of a pixel side by side.

    Args:
        image: a decoded image.
        spec: the input that the model expects.
        name: name of the image in error messages.
    """
    image = to_channels(image, spec.channels, len(spec.mean), name)
    H, W = spec.size
    width, height = resized(*image.size, spec)
    left, top = round((width - W) / 2), round((height - H) / 2)
    if spec.backend == "tensor":
        x = resize_tensor(planes(np.array(image)), (height, width), spec.interpolation)
        return x[:, top : top + H, left : left + W].permute(1, 2, 0).numpy()
    if width > W and 2 * image.height <= 3 * image.width and image.mode in ("RGB", "L"):
        # Pillow resizes the width of such an image first; some versions begin with the height of very high ones.
        # Cropping between the two passes gives the same pixels and saves resizing the height of columns that the crop
        # drops.
        image = image.resize((width, image.height), FILTERS[spec.interpolation]).crop((left, 0, left + W, image.height))
        width, left = W, 0
    if image.size != (width, height):
        image = image.resize((width, height), FILTERS[spec.interpolation])
    if (width, height) != (W, H):
        image = image.crop((left, top, left + W, top + H))
    return np.atleast_3d(np.asarray(image))


def preprocess(image: Image.Image, spec: InputSpec, name: str = "image") -> Tensor:
    """Turn a decoded image into a model's input: [C, H, W] float32.

    Args:
        image: a decoded image.
        spec: the input that the model expects.
        name: name of the image in error messages.
    """
    return normalize(pixels(image, spec, name)[None], spec)[0]


def normalize(x: Tensor | Sequence[Tensor], spec: InputSpec) -> Tensor:
    """Scale pixels to 0..1, subtract the mean and divide by the standard deviation.

    Args:
        x: [B, C, H, W] uint8, on any device; or several of them, which are joined.
        spec: the input that the model expects.

    Returns:
        [B, C, H, W] float32.
    """
    parts = [x] if isinstance(x, Tensor) else list(x)
    device = parts[0].device
    mean, std = _colours(spec.mean, device), _colours(spec.std, device)
    if device.type != "cpu":
        return torch.cat(parts).div(255).sub_(mean).div_(std).contiguous()
    out = torch.empty((sum(map(len, parts)), *parts[0].shape[1:]), dtype=torch.float32)
    few = max(1, IN_CACHE // max(1, parts[0][:1].numel()))  # images per block
    start = 0
    for images in (images for part in parts for images in part.split(few)):
        out[start : start + len(images)].copy_(images).div_(255).sub_(mean).div_(std)
        start += len(images)
    return out


@functools.lru_cache(maxsize=16)
def _colours(values: tuple[float, ...], device: torch.device) -> Tensor:
    # Cached, because even a small copy to a GPU waits for all the work queued there.
    return torch.tensor(values, device=device)[:, None, None]


def resize_tensor(x: Tensor, size: tuple[int, int], interpolation: Interpolation) -> Tensor:
    """Resize with torch's antialiased filter.

    Args:
        x: pixels, [C, H, W] or [n, C, H, W] uint8.
        size: the new (height, width).
        interpolation: `bilinear`, `bicubic` or `nearest`.
    """
    if interpolation == "lanczos":
        raise ConfigError("interpolation='lanczos' needs backend='pillow'; 'tensor' has bilinear, bicubic and nearest.")
    if x.ndim == 3:
        return resize_tensor(x[None], size, interpolation)[0]
    if interpolation == "nearest":
        return F.interpolate(x, size, mode="nearest-exact")
    return F.interpolate(x, size, mode=interpolation, antialias=True)


def planes(array: Array) -> Tensor:
    """View pixels [H, W, C] or [H, W] as a tensor [C, H, W], without a copy."""
    return torch.from_numpy(array if array.ndim == 3 else array[:, :, None]).permute(2, 0, 1)
