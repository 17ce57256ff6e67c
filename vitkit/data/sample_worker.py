"""A worker's job: rows (epoch, index) -> 8-bit pixels, a function of the rows and the seed alone.

SampleWorker    rows for training, augmented
EvalWorker      pieces of a data set for evaluation, preprocessed and, if needed, hashed
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitkit.data.augment import Augment, augment, augment_many, takes_many
from vitkit.data.base import Source
from vitkit.data.decode import decode, digest
from vitkit.data.order import sample_rngs
from vitkit.data.preprocess import cropped
from vitkit.errors import BadImage
from vitkit.model.config import InputSpec
from vitkit.types import Array

Row = tuple[int, int]  # epoch, index in the source
Bad = tuple[int, str]  # position in the rows, error message

PIECE = 32  # images per task: few, so that every worker has something to do until the end
TINY_PIECE = 128  # images per task for tiny images in memory, where handing over a task takes longer than an image
TINY = 4096  # largest such image, in bytes


class SampleWorker:
    """Turn rows into augmented images [n, C, H, W] uint8, and list the rows that cannot be read; their pixels are left
    out.

    Args:
        source: where the images come from.
        spec: the input that the model expects.
        how: how images are augmented.
        seed: the run's seed.
    """

    def __init__(self, source: Source, spec: InputSpec, how: Augment, seed: int) -> None:
        self.source, self.spec, self.how, self.seed = source, spec, how, seed
        self.shape = (len(spec.mean), *spec.size)
        self.tiny = source.in_memory and math.prod(self.shape) <= TINY
        self.piece = TINY_PIECE if self.tiny else PIECE

    def __call__(self, rows: list[Row]) -> tuple[Tensor | Array, list[Bad]]:
        """Make many images."""
        out = torch.empty((len(rows), *self.shape), dtype=torch.uint8)
        bad: list[Bad] = []
        good = 0
        if self.tiny:
            with contextlib.suppress(BadImage):  # the loop below finds out which one is bad
                raws = [self.source.raw(index) for _, index in rows]
                if takes_many(self.how, self.spec, raws):
                    return augment_many(raws, self.spec, self.how, sample_rngs(self.seed, rows)).numpy(), bad
        for position, ((_, index), rng) in enumerate(zip(rows, sample_rngs(self.seed, rows))):
            try:
                name, raw = self.source.names[index], self.source.raw(index)
                out[good].copy_(augment(raw, self.spec, self.how, rng, name))
                good += 1
            except BadImage as error:
                bad.append((position, str(error)))
        # A tensor reaches the parent through shared memory, an array through a pipe, which is faster to set up.
        return out[:good].numpy() if self.tiny else out[:good], bad


@dataclass(frozen=True)
class Piece:
    """What a worker tells about a piece of a data set whose pixels are in its slot.

    Args:
        good: number of images in the slot, [good, H, W, C] uint8: those that could be read, in order.
        bad: the others.
        digests: [good, 32] uint8, if they were asked for.
    """

    good: int
    bad: list[Bad]
    digests: Array | None


class EvalWorker:
    """Preprocess pieces of a data set for evaluation, each into a slot of `size` bytes.

    Args:
        source: where the images come from.
        spec: the input that the model expects.
        pieces: positions in the source, for each piece.
        hashed: whether images are hashed too, from the same bytes that are decoded.
    """

    def __init__(self, source: Source, spec: InputSpec, pieces: Sequence[range], hashed: bool) -> None:
        self.source, self.spec, self.pieces, self.hashed = source, spec, pieces, hashed
        self.ready = source.ready_for == spec.of_images
        self.shape = (*spec.size, len(spec.mean))
        self.size = max(map(len, pieces), default=0) * math.prod(self.shape)

    def __call__(self, piece: int, slot: Array) -> Piece:
        """Preprocess one piece.

        Args:
            piece: its number.
            slot: where its pixels go, [size] uint8.
        """
        index = self.pieces[piece]
        out = slot[: len(index) * math.prod(self.shape)].reshape(len(index), *self.shape)
        digests = np.empty((len(index), 32), np.uint8) if self.hashed else None
        bad: list[Bad] = []
        good = 0
        for position, i in enumerate(index):
            try:
                raw, name = self.source.raw(i), self.source.names[i]
                if digests is not None:
                    digests[good] = digest(raw)
                if self.ready and isinstance(raw, np.ndarray):
                    out[good] = raw
                else:
                    out[good] = cropped(decode(raw, name), self.spec, name)
                good += 1
            except BadImage as error:
                bad.append((position, str(error)))
        return Piece(good, bad, digests[:good] if digests is not None else None)


class Sent:
    """An EvalWorker where processes share no memory: the slot is part of the answer."""

    def __init__(self, work: EvalWorker) -> None:
        self.work = work

    def __call__(self, piece: int) -> tuple[Piece, Tensor]:
        """Preprocess one piece."""
        slot = torch.empty(self.work.size, dtype=torch.uint8)
        return self.work(piece, slot.numpy()), slot
