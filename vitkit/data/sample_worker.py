"""A worker's job: rows (epoch, index) -> 8-bit pixels, a function of the rows and the seed alone."""

from __future__ import annotations

import contextlib
import itertools
import math

import numpy as np
import torch
from torch import Tensor

from vitkit.data.augment import Augment, augment, augment_many, takes_many
from vitkit.data.base import Source
from vitkit.data.decode import decode
from vitkit.data.order import sample_rngs
from vitkit.data.preprocess import pixels, planes
from vitkit.errors import BadImage
from vitkit.model.config import InputSpec
from vitkit.types import Array

Row = tuple[int, int]  # epoch, index in the source
Bad = tuple[int, str]  # position in the rows, error message

PIECE = 32  # images per task: few, so that every worker has something to do until the end
TINY_PIECE = 128  # images per task for tiny images in memory, where handing over a task takes longer than an image
TINY = 4096  # largest such image, in bytes


class SampleWorker:
    """Turn rows into [n, C, H, W] uint8, and list the rows that cannot be read; their pixels are left out.

    Args:
        source: where the images come from.
        spec: the input that the model expects.
        how: how images are augmented; None to preprocess them for evaluation.
        seed: the run's seed.
    """

    def __init__(self, source: Source, spec: InputSpec, how: Augment | None, seed: int) -> None:
        self.source, self.spec, self.how, self.seed = source, spec, how, seed
        self.ready = source.ready_for == spec.of_images
        self.shape = (len(spec.mean), *spec.size)
        self.tiny = source.in_memory and math.prod(self.shape) <= TINY
        self.piece = TINY_PIECE if self.tiny else PIECE

    def one(self, index: int, rng: np.random.Generator | None) -> Tensor:
        """Make one image, [C, H, W] uint8.

        Args:
            index: its position in the source.
            rng: its generator, if it is augmented.
        """
        name, raw = self.source.names[index], self.source.raw(index)
        if self.how is not None and rng is not None:
            return augment(raw, self.spec, self.how, rng, name)
        if self.ready and isinstance(raw, np.ndarray):
            return planes(raw)
        return pixels(decode(raw, name), self.spec, name)

    def __call__(self, rows: list[Row]) -> tuple[Tensor | Array, list[Bad]]:
        """Make many images."""
        out = torch.empty((len(rows), *self.shape), dtype=torch.uint8)
        bad: list[Bad] = []
        good = 0
        if self.how is not None and self.tiny:
            with contextlib.suppress(BadImage):  # the loop below finds out which one is bad
                raws = [self.source.raw(index) for _, index in rows]
                if takes_many(self.how, self.spec, raws):
                    return augment_many(raws, self.spec, self.how, sample_rngs(self.seed, rows)).numpy(), bad
        generators = sample_rngs(self.seed, rows) if self.how is not None else itertools.repeat(None)
        for position, ((_, index), rng) in enumerate(zip(rows, generators)):
            try:
                out[good].copy_(self.one(index, rng))
                good += 1
            except BadImage as error:
                bad.append((position, str(error)))
        # A tensor reaches the parent through shared memory, an array through a pipe, which is faster to set up.
        return out[:good].numpy() if self.tiny else out[:good], bad
