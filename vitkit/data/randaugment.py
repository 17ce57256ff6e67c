"""RandAugment (arXiv 1909.13719) as the ViT authors use it: n operations from OPERATIONS, all of the same strength.

TrivialAugment (arXiv 2103.10158) is one operation from TRIVIAL, of random strength.

Strengths follow the ViT authors' code: 10 is full scale, and recipes with 15 or 20 go beyond it. Geometric operations
fill with gray. Every operation takes and returns an 8-bit image.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from PIL import Image, ImageChops, ImageEnhance, ImageOps
from torch import Tensor

from vitkit.types import Array

Rng = np.random.Generator
Operation = Callable[[Image.Image, float, Rng], Image.Image]
FILL = 128  # gray, where a geometric operation uncovers something


def _table(image: Image.Image, values: Array) -> Image.Image:
    """Replace every level v with values[v]."""
    levels = values.clip(0, 255).astype(np.uint8).tolist()
    return image.point(levels * len(image.getbands()))


def brightness(image: Image.Image, factor: float) -> Image.Image:
    """Change the brightness: factor 0 gives black, 1 the original."""
    return _table(image, np.arange(256) * factor)


def contrast(image: Image.Image, factor: float) -> Image.Image:
    """Change the contrast: factor 0 gives the mean gray, 1 the original."""
    histogram = np.asarray(image.convert("L").histogram())
    mean = int((histogram @ np.arange(256)) / histogram.sum() + 0.5)
    return _table(image, mean + (np.arange(256) - mean) * factor)


def blend_gray(image: Image.Image, factor: float) -> Image.Image:
    """Change the saturation: factor 0 gives a gray image, 1 the original."""
    if image.mode == "L":
        return image
    return Image.blend(image.convert("L").convert("RGB"), image, factor)


def _affine(image: Image.Image, coefficients: tuple[float, ...]) -> Image.Image:
    return image.transform(
        image.size,
        Image.Transform.AFFINE,
        coefficients,
        Image.Resampling.BILINEAR,
        fillcolor=(FILL,) * len(image.getbands()) if image.mode != "L" else FILL,
    )


def _sign(rng: Rng) -> float:
    return 1.0 if rng.random() < 0.5 else -1.0


def _rotate(image: Image.Image, m: float, rng: Rng) -> Image.Image:
    fill = FILL if image.mode == "L" else (FILL, FILL, FILL)
    return image.rotate(_sign(rng) * 3.0 * m, Image.Resampling.BILINEAR, fillcolor=fill)


def _translate(image: Image.Image, m: float, rng: Rng, *, along_x: bool) -> Image.Image:
    far = _sign(rng) * m / 10 * 100 / 224  # 100 pixels at 224
    return _affine(image, (1, 0, far * image.width, 0, 1, 0) if along_x else (1, 0, 0, 0, 1, far * image.height))


def _shear(image: Image.Image, m: float, rng: Rng, *, along_x: bool) -> Image.Image:
    by = _sign(rng) * 0.03 * m
    return _affine(image, (1, by, 0, 0, 1, 0) if along_x else (1, 0, 0, by, 1, 0))


def _posterize(image: Image.Image, m: float, rng: Rng) -> Image.Image:
    bits = min(max(int(0.4 * m), 0), 8)
    return _table(image, np.arange(256) & (0xFF << (8 - bits) & 0xFF))


def _solarize_add(image: Image.Image, m: float, rng: Rng) -> Image.Image:
    levels = np.arange(256)
    return _table(image, np.where(levels < 128, levels + int(11 * m), levels))


def _cutout(image: Image.Image, m: float, rng: Rng) -> Image.Image:
    pad = round(4 * m / 224 * min(image.size))
    x, y = int(rng.integers(0, image.width)), int(rng.integers(0, image.height))
    image = image.copy()
    image.paste(
        FILL if image.mode == "L" else (FILL, FILL, FILL),
        (max(x - pad, 0), max(y - pad, 0), min(x + pad, image.width), min(y + pad, image.height)),
    )
    return image


Number = TypeVar("Number", float, Tensor)


def factor(m: Number) -> Number:
    """Return the factor of the colour operations at a strength: 0.1 at 0, 1 in the middle of the scale, 1.9 at 10."""
    return m * 0.18 + 0.1


OPERATIONS: dict[str, Operation] = {
    "autocontrast": lambda image, m, rng: ImageOps.autocontrast(image),
    "equalize": lambda image, m, rng: ImageOps.equalize(image),
    "invert": lambda image, m, rng: ImageChops.invert(image),
    "rotate": _rotate,
    "posterize": _posterize,
    "solarize": lambda image, m, rng: ImageOps.solarize(image, min(int(25.6 * m), 256)),
    "color": lambda image, m, rng: blend_gray(image, factor(m)),
    "contrast": lambda image, m, rng: contrast(image, factor(m)),
    "brightness": lambda image, m, rng: brightness(image, factor(m)),
    "sharpness": lambda image, m, rng: ImageEnhance.Sharpness(image).enhance(factor(m)),
    "shear_x": lambda image, m, rng: _shear(image, m, rng, along_x=True),
    "shear_y": lambda image, m, rng: _shear(image, m, rng, along_x=False),
    "translate_x": lambda image, m, rng: _translate(image, m, rng, along_x=True),
    "translate_y": lambda image, m, rng: _translate(image, m, rng, along_x=False),
    "cutout": _cutout,
    "solarize_add": _solarize_add,
}


def rand_augment(image: Image.Image, layers: int, magnitude: float, rng: Rng) -> Image.Image:
    """Apply `layers` operations, each drawn from OPERATIONS.

    Args:
        image: an image in mode RGB or L.
        layers: number of operations.
        magnitude: strength of the operations; 10 is full scale.
        rng: the sample's generator.
    """
    names = list(OPERATIONS)
    for which in rng.integers(0, len(names), layers):
        image = OPERATIONS[names[which]](image, magnitude, rng)
    return image


# TrivialAugment's operations and the strengths that each is drawn from, (least, most), counted as above.
TRIVIAL: dict[str, tuple[float, float]] = {
    "identity": (0, 10),
    "autocontrast": (0, 10),
    "equalize": (0, 10),
    "rotate": (0, 10),
    "solarize": (0, 10),
    "color": (0, 10),
    "posterize": (10, 22.5),  # 4 to 8 bits
    "contrast": (0, 10),
    "brightness": (0, 10),
    "sharpness": (0, 10),
    "shear_x": (0, 10),
    "shear_y": (0, 10),
    "translate_x": (0, 10),
    "translate_y": (0, 10),
}


def trivial_augment(image: Image.Image, rng: Rng) -> Image.Image:
    """Apply one operation of TRIVIAL, or none, with a strength of its own.

    Args:
        image: an image in mode RGB or L.
        rng: the sample's generator.
    """
    name = list(TRIVIAL)[rng.integers(0, len(TRIVIAL))]
    strength = rng.uniform(*TRIVIAL[name])
    return image if name == "identity" else OPERATIONS[name](image, strength, rng)
