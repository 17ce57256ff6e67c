"""Image -> training sample: pure functions of (image, rng), so that (seed, epoch, index) decides every pixel.

The order is RandomResizedCrop, padded crop, flip, RandAugment or TrivialAugment, colour jitter, random erasing; all on
8-bit pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitkit.data.decode import JPEGS, Box, Raw, decode, header, region, upright_size
from vitkit.data.order import within
from vitkit.data.preprocess import pixels, planes, resize_tensor
from vitkit.data.randaugment import FILL, rand_augment, trivial_augment
from vitkit.errors import ConfigError
from vitkit.model.config import InputSpec, Interpolation
from vitkit.types import Array

Rng = np.random.Generator


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How training images are augmented.

    Args:
        scale: (min, max) share of the image's area that a random crop covers; None resizes as for evaluation.
        ratio: (min, max) width / height of a random crop.
        interpolation: filter of the resize (default: the InputSpec's).
        pad: pixels of gray on every side, of which a random crop of the model's size is taken (4 is usual for 32
            pixels); 0 for none.
        flip: probability of a horizontal flip.
        color_jitter: maximum change of brightness, contrast and saturation (0.4: a factor of 0.6 to 1.4).
        rand_layers: RandAugment operations per image; 0 for none.
        rand_magnitude: strength of RandAugment; 10 is the authors' full scale, and larger values go beyond it.
        trivial: whether one operation of random strength is applied to each image (TrivialAugment), instead of
            RandAugment.
        erase: probability that a rectangle is erased.
        erase_area: (min, max) share of the image's area that is erased.
        erase_fill: `mean` fills the rectangle with the mean colour, `noise` with random pixels.
    """

    scale: tuple[float, float] | None = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Interpolation | None = None
    pad: int = 0
    flip: float = 0.5
    color_jitter: float = 0.0
    rand_layers: int = 0
    rand_magnitude: float = 10.0
    trivial: bool = False
    erase: float = 0.0
    erase_area: tuple[float, float] = (0.02, 1 / 3)
    erase_fill: str = "mean"

    def __post_init__(self) -> None:
        within("flip", self.flip, 0, 1)
        within("erase", self.erase, 0, 1)
        within("color_jitter", self.color_jitter, 0)
        within("rand_magnitude", self.rand_magnitude, 0)
        within("rand_layers", self.rand_layers, 0)
        within("pad", self.pad, 0)
        if self.trivial and self.rand_layers:
            raise ConfigError(
                f"Expected trivial or rand_layers; got both, with {self.rand_layers} layers. Leave one out."
            )
        for name in ("scale", "ratio", "erase_area"):
            value = getattr(self, name)
            if not value and name == "scale":  # None, or an empty list of a file that cannot say None
                object.__setattr__(self, name, None)
                continue
            object.__setattr__(self, name, tuple(value))
            top = math.inf if name == "ratio" else 1.0
            if len(value) != 2 or not 0 < value[0] <= value[1] <= top:
                raise ConfigError(
                    f"{name} must be (min, max) with 0 < min <= max{' <= 1' if top == 1 else ''}; got {value!r}."
                )
        if self.erase_fill not in ("mean", "noise"):
            raise ConfigError(f"erase_fill must be 'mean' or 'noise'; got {self.erase_fill!r}.")
        if self.interpolation == "lanczos":
            raise ConfigError("interpolation of training crops must be bilinear, bicubic or nearest; got 'lanczos'.")


def augment(raw: Raw, spec: InputSpec, how: Augment, rng: Rng, name: str = "image") -> Tensor:
    """Make one training sample, [C, H, W] uint8.

    Args:
        raw: the bytes of an encoded file, or a decoded image.
        spec: the input that the model expects.
        how: which augmentations.
        rng: the sample's generator, the only source of randomness.
        name: name of the image in error messages.

    Raises:
        BadImage: the image cannot be read; the message names it.
    """
    if how.scale is None:
        x = pixels(decode(raw, name), spec, name)
    else:
        opened = header(raw, name) if isinstance(raw, bytes) else None
        if opened is not None and opened.format not in JPEGS:  # only a JPEG can be decoded in part
            raw, opened = decode(raw, name), None
        box = random_box(*upright_size(opened or raw), how.scale, how.ratio, rng)
        cut = region(raw, name, box, spec.size, spec.channels, len(spec.mean), opened)
        filter_ = how.interpolation or ("bicubic" if spec.interpolation == "lanczos" else spec.interpolation)
        x = resize_tensor(planes(cut), spec.size, filter_)
    if how.pad:
        top, left = rng.integers(0, 2 * how.pad + 1, 2)
        x = F.pad(x, (how.pad,) * 4, value=FILL)[:, top : top + spec.size[0], left : left + spec.size[1]]
    if rng.random() < how.flip:
        x = x.flip(2)
    if (how.rand_layers or how.trivial) and spec.channels != "raw":
        array = x.permute(1, 2, 0).contiguous().numpy()
        image = Image.fromarray(array if array.shape[2] == 3 else array[:, :, 0])
        if how.trivial:
            image = trivial_augment(image, rng)
        x = planes(np.array(rand_augment(image, how.rand_layers, how.rand_magnitude, rng)))
    if how.color_jitter and spec.channels != "raw":
        x = color_jitter(x, how.color_jitter, rng)
    if rng.random() < how.erase:
        x = random_erase(x, spec, how, rng)
    return x


def takes_many(how: Augment, spec: InputSpec, images: Sequence[Raw]) -> bool:
    """Return whether `augment_many` can replace `augment` for these images."""
    count = {"gray": 1, "rgb": 3}.get(spec.channels)
    return (
        how.scale is not None
        and not (how.pad or how.rand_layers or how.trivial or how.color_jitter)
        and all(isinstance(raw, np.ndarray) and raw.shape[2] == count for raw in images)
    )


def augment_many(images: Sequence[Any], spec: InputSpec, how: Augment, generators: Iterable[Rng]) -> Tensor:
    """Make many training samples, [n, C, H, W] uint8, byte for byte what `augment` makes of each image.

    Crops of the same size are resized together, which is much faster for small images.

    Args:
        images: pixels [height, width, C] of each image, for which `takes_many` is true.
        spec: the input that the model expects.
        how: which augmentations.
        generators: one per image; all draws for an image come before the next generator is taken.
    """
    assert how.scale is not None
    filter_ = how.interpolation or ("bicubic" if spec.interpolation == "lanczos" else spec.interpolation)
    alike: dict[tuple[int, int], list[int]] = {}
    cuts: list[Array] = []
    flips: list[int] = []
    erased: list[tuple[int, Rectangle]] = []
    for i, (image, rng) in enumerate(zip(images, generators, strict=True)):  # draws in the order of `augment`
        left, top, right, bottom = random_box(image.shape[1], image.shape[0], how.scale, how.ratio, rng)
        cuts.append(image[top:bottom, left:right])
        alike.setdefault((bottom - top, right - left), []).append(i)
        if rng.random() < how.flip:
            flips.append(i)
        if rng.random() < how.erase and (found := draw_rectangle(spec, how, rng)) is not None:
            erased.append((i, found))
    stacks = [torch.from_numpy(np.stack([cuts[i] for i in those])).permute(0, 3, 1, 2) for those in alike.values()]
    resized = [resize_tensor(stack, spec.size, filter_) for stack in stacks]
    out = torch.cat(resized)[torch.tensor(list(chain.from_iterable(alike.values()))).argsort()]
    if flips:
        out[flips] = out[flips].flip(3)
    for i, (top, left, colour) in erased:
        out[i, :, top : top + colour.shape[1], left : left + colour.shape[2]] = colour
    return out


def random_box(width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float], rng: Rng) -> Box:
    """Draw the box of a RandomResizedCrop: ten tries at an area and an aspect ratio, else the largest centred box.

    Args:
        width: width of the image in pixels.
        height: height of the image in pixels.
        scale: (min, max) share of the image's area.
        ratio: (min, max) width / height; its logarithm is drawn uniformly.
        rng: the sample's generator.
    """
    for _ in range(10):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
            return left, top, left + w, top + h
    w = min(width, max(round(height * ratio[1]), 1)) if width / height > ratio[1] else width
    h = min(height, max(round(width / ratio[0]), 1)) if width / height < ratio[0] else height
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def color_jitter(x: Tensor, strength: float, rng: Rng) -> Tensor:
    """Change brightness, contrast and saturation, each by its own factor, in random order.

    Args:
        x: [C, H, W] uint8, RGB or gray.
        strength: factors are drawn from 1 - strength (at least 0) to 1 + strength.
        rng: the sample's generator.
    """
    factors = rng.uniform(max(0.0, 1 - strength), 1 + strength, 3)
    z = x.to(torch.float32)
    for which in rng.permutation(3):
        if which == 0:
            z = z.mul_(float(factors[0]))
        elif which == 1:
            # The mean gray is a sum of whole numbers, so that the number of threads cannot change it.
            mean = _gray(z).round_().sum(dtype=torch.float64).item() / z[0].numel()
            z = z.sub_(mean).mul_(float(factors[1])).add_(mean)
        elif len(z) == 3:
            gray = _gray(z)
            z = z.sub_(gray).mul_(float(factors[2])).add_(gray)
        z = z.clamp_(0, 255)
    return z.round_().to(torch.uint8)


def _gray(z: Tensor) -> Tensor:
    return z[0] * 0.299 + z[1] * 0.587 + z[2] * 0.114 if len(z) == 3 else z[0].clone()


Rectangle = tuple[int, int, Tensor]  # top, left, fill [C, height, width] uint8


def draw_rectangle(spec: InputSpec, how: Augment, rng: Rng) -> Rectangle | None:
    """Draw a rectangle to erase and its fill; None if ten tries find none that fits.

    Args:
        spec: the input that the model expects: image size, and mean and std of the fill.
        how: area and kind of fill; `noise` is normally distributed.
        rng: the sample's generator.
    """
    (H, W), C = spec.size, len(spec.mean)
    for _ in range(10):
        wanted = H * W * rng.uniform(*how.erase_area)
        aspect = math.exp(rng.uniform(math.log(0.3), math.log(1 / 0.3)))
        h, w = round(math.sqrt(wanted * aspect)), round(math.sqrt(wanted / aspect))
        if 0 < h < H and 0 < w < W:
            top, left = int(rng.integers(0, H - h + 1)), int(rng.integers(0, W - w + 1))
            colour: Array = np.asarray(spec.mean)[:, None, None]
            if how.erase_fill == "noise":
                colour = colour + rng.standard_normal((C, h, w)) * np.asarray(spec.std)[:, None, None]
            small = torch.from_numpy(np.rint(colour * 255).clip(0, 255).astype(np.uint8))
            return top, left, small.expand(C, h, w)
    return None


def random_erase(x: Tensor, spec: InputSpec, how: Augment, rng: Rng) -> Tensor:
    """Return a copy of an image in which one random rectangle is erased.

    Args:
        x: [C, H, W] uint8.
        spec: see `draw_rectangle`.
        how: see `draw_rectangle`.
        rng: the sample's generator.
    """
    found = draw_rectangle(spec, how, rng)
    if found is None:
        return x
    top, left, colour = found
    x = x.clone(memory_format=torch.contiguous_format)
    x[:, top : top + colour.shape[1], left : left + colour.shape[2]] = colour
    return x
