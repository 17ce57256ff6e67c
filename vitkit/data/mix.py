"""MixUp (arXiv 1710.09412) and CutMix (arXiv 1905.04899) over the global batch, as functions of (seed, step).

Each step shuffles its global batch and mixes neighbours in pairs. Each process takes a contiguous part of the shuffled
batch, so only a pair at the border of two parts can be separated; both processes then read both images. So any number
of processes mixes the same images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitkit.data.order import rng as generator
from vitkit.data.order import within
from vitkit.errors import ConfigError
from vitkit.types import Array


@dataclass(frozen=True, kw_only=True)
class Mix:
    """How images are mixed.

    Args:
        mixup: alpha of MixUp's Beta distribution; 0 for no MixUp.
        cutmix: alpha of CutMix's Beta distribution; 0 for no CutMix. If both are given, each step draws one of them.
        probability: share of the steps that mix.
        switch: share of CutMix in the steps that mix, if both are given.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch: float = 0.5

    def __post_init__(self) -> None:
        within("mixup", self.mixup, 0)
        within("cutmix", self.cutmix, 0)
        within("probability", self.probability, 0, 1)
        within("switch", self.switch, 0, 1)

    def __bool__(self) -> bool:
        return bool((self.mixup or self.cutmix) and self.probability)


@dataclass(frozen=True)
class Plan:
    """How one step is mixed.

    Args:
        order: a permutation of the global batch.
        weight: share of its own pixels that each image keeps; 1.0 if nothing is mixed.
        box: (top, left, bottom, right) of what CutMix takes from the partner, as fractions of the height and width;
            None for MixUp.
    """

    order: list[int]
    weight: float
    box: tuple[float, float, float, float] | None

    def pixels(self, H: int, W: int) -> tuple[tuple[slice, slice], float]:
        """Return the rows and columns that CutMix replaces in images of H x W pixels, and the share of what is left."""
        assert self.box is not None
        top, left, bottom, right = (round(share * side) for share, side in zip(self.box, (H, W, H, W)))
        return (slice(top, bottom), slice(left, right)), 1 - (bottom - top) * (right - left) / (H * W)


def partners(places: Array, count: int) -> Array:
    """Return the positions that `places` are mixed with: their neighbours, or the first for one that has none.

    Args:
        places: positions in the shuffled global batch.
        count: images in the global batch.
    """
    found: Array = np.where(places ^ 1 < count, places ^ 1, 0)
    return found


def plan(mix: Mix, seed: int, step: int, count: int) -> Plan:
    """Draw how a step is mixed.

    Args:
        mix: how images are mixed.
        seed: the run's seed.
        step: counted from 0.
        count: images in the global batch.
    """
    if not mix:
        return Plan(list(range(count)), 1.0, None)
    if count < 2:
        raise ConfigError(f"MixUp and CutMix need at least 2 images in the global batch; got {count}.")
    rng = generator(seed, "mix", step)
    order = rng.permutation(count).tolist()
    if rng.random() >= mix.probability:
        return Plan(order, 1.0, None)
    cut = bool(mix.cutmix) and (not mix.mixup or rng.random() < mix.switch)
    alpha = mix.cutmix if cut else mix.mixup
    weight = float(rng.beta(alpha, alpha))
    if not cut:
        return Plan(order, weight, None)
    side = math.sqrt(1 - weight)
    y, x = rng.random(2)
    top, bottom = np.clip([y - side / 2, y + side / 2], 0, 1).tolist()
    left, right = np.clip([x - side / 2, x + side / 2], 0, 1).tolist()
    return Plan(order, 1 - (bottom - top) * (right - left), (top, left, bottom, right))


def apply(x: Tensor, other: Tensor, how: Plan) -> tuple[Tensor, float]:
    """Mix images with their partners.

    Args:
        x: [B, C, H, W], normalised.
        other: their partners, of the same shape.
        how: the step's plan.

    Returns:
        The mixed images, and the share of its own pixels in each (for CutMix the exact share of whole pixels).
    """
    if how.weight == 1.0:
        return x, 1.0
    if how.box is None:
        return (x * how.weight).add_(other * (1 - how.weight)), how.weight
    (rows, columns), weight = how.pixels(*x.shape[2:])
    out = x.clone()
    out[:, :, rows, columns] = other[:, :, rows, columns]
    return out, weight


def shares(how: Plan, H: int, W: int) -> tuple[Array, float]:
    """Return what `apply` does as numbers: mixed images are shares[0] x their own pixels + shares[1] x the others'.

    Args:
        how: the step's plan.
        H: height of the images in pixels.
        W: width of the images in pixels.

    Returns:
        [2, H, W] float32, and the share of its own pixels in each image.
    """
    if how.box is None:
        return np.broadcast_to(np.array([[[how.weight]], [[1 - how.weight]]], np.float32), (2, H, W)), how.weight
    (rows, columns), weight = how.pixels(H, W)
    found = np.array([[[1.0]], [[0.0]]], np.float32).repeat(H, 1).repeat(W, 2)
    found[:, rows, columns] = [[[0.0]], [[1.0]]]
    return found, weight


def soft_targets(labels: Tensor, others: Tensor, weight: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """Return the targets of mixed images, [B, classes]: each row sums to one, or with several labels per image each
    number is that of one label.

    Args:
        labels: [B], the images' own classes; or [B, classes], 1 for each of their labels.
        others: their partners', of the same shape.
        weight: [B], the share of its own pixels in each image.
        classes: number of classes.
        smoothing: share of each target to spread over all classes (default: 0); of several labels, each moves by this
            share towards 1/2, halfway between present and absent, as in Keras.
    """
    if labels.ndim == 2:
        y = weight[:, None] * labels + (1 - weight[:, None]) * others
        return (1 - smoothing) * y + smoothing / 2
    low = smoothing / classes
    y = torch.full((len(labels), classes), low, device=labels.device)
    rows = torch.arange(len(labels), device=labels.device)
    y[rows, labels] += (1 - smoothing) * weight
    y[rows, others] += (1 - smoothing) * (1 - weight)
    return y
