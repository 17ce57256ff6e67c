"""The order of samples and their random numbers, as functions of (seed, epoch, index): starting at step n is free.

rng            the generator for an order, a mix or a split
sample_rngs    the generators for the augmentation of training samples
Order          (seed, step) -> the global batch; each epoch follows the last without a gap
BalancedOrder  the same, with every class equally often
Batches        a process's batches from step n on, as a batch sampler of torch's DataLoader
share          one process's part of the rows
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from vitkit.errors import ConfigError
from vitkit.types import Array

# Part of every seed, so that two purposes never share a stream. "split" must keep its number: it decides which images
# are held out, and another choice would evaluate existing models on images that they were trained on.
PURPOSES: dict[str, int] = {"order": 1, "mix": 3, "split": 4, "subset": 6, "balance": 7, "folds": 8}
# The version of everything drawn here, and by stochastic depth: a run resumes only with the version it started with.
RANDOM_NUMBERS = 3


def rng(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Make a generator; the same arguments give the same draws everywhere.

    Args:
        seed: the run's seed, at least 0.
        purpose: a row of PURPOSES.
        numbers: what the draws are for: (epoch,) for an order, (step,) for a mix.
    """
    within("seed", seed, 0)
    # The length goes last because SeedSequence treats [1] and [1, 0] as the same.
    entropy = [seed, PURPOSES[purpose], *numbers, len(numbers) + 1]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def sample_rngs(seed: int, rows: Iterable[tuple[int, int]]) -> Iterator[np.random.Generator]:
    """Yield a generator for each training sample; the same (seed, epoch, index) gives the same draws everywhere.

    Every item is the same object, moved to the next sample: finish drawing for one before you take the next. Creating
    a new generator takes longer than resizing a 28 x 28 image; moving Philox only sets its counter.

    Args:
        seed: the run's seed, at least 0.
        rows: (epoch, index) of each sample.
    """
    within("seed", seed, 0, 2**128 - 1)
    philox = np.random.Philox(key=seed)
    state, generator = philox.state, np.random.Generator(philox)
    counter = state["state"]["counter"]  # [draws, epoch, index, 0]
    for row in rows:
        counter[1:3] = row
        philox.state = state
        yield generator


def within(name: str, value: float, least: float, most: float = math.inf) -> None:
    """Raise a ConfigError that names the value unless it lies between `least` and `most`."""
    if not least <= value <= most or math.isinf(value):
        span = f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
        raise ConfigError(f"{name} must be a finite number, {span}; got {value!r}.")


def share(count: int, rank: int, ranks: int) -> slice:
    """Return the contiguous part of `count` rows that belongs to one process; the parts cover every row once.

    Args:
        count: total number of rows.
        rank: this process, counted from 0.
        ranks: number of processes.
    """
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank must be between 0 and {ranks - 1}; got {rank}.")
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


class Order:
    """The training order: an endless sequence of shuffled epochs, cut into global batches.

    No sample is dropped and no batch is short: a batch that reaches the end of an epoch continues into the next one.
    It holds no state, so any step of any process is one call away; `batches` is for your own DataLoader.

    Args:
        count: number of samples in the data set.
        batch_size: samples in a global batch, over all processes; may exceed `count`.
        seed: the run's seed (default: 0).
        shuffle: False keeps the source's order in every epoch (default: True).

    Example:
        >>> from vitkit.data import Order
        >>> order = Order(10, batch_size=6)
        >>> order.rows(1)  # (epoch, index): the second batch reaches into the second epoch
        [(0, 5), (0, 4), (0, 7), (0, 1), (1, 4), (1, 0)]
        >>> list(order.batches(start=1, stop=2, rank=0, ranks=2)), list(order.batches(start=1, stop=2, rank=1, ranks=2))
        ([[5, 4, 7]], [[1, 4, 0]])
    """

    def __init__(self, count: int, batch_size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if count < 1 or batch_size < 1:
            raise ConfigError(
                f"Expected at least 1 sample and a batch size of at least 1; got {count} samples "
                f"and batch size {batch_size}."
            )
        self.count, self.batch_size, self.seed, self.shuffle = count, batch_size, seed, shuffle
        self.epoch = functools.lru_cache(maxsize=2)(self._epoch)  # a batch may lie in two epochs

    def _epoch(self, epoch: int) -> Array:
        """The order of one epoch: a permutation of the samples that depends on (seed, epoch) alone."""
        every = np.arange(self.count, dtype=np.int32 if self.count < 2**31 else np.int64)
        return rng(self.seed, "order", epoch).permutation(every) if self.shuffle else every

    def rows(self, step: int) -> list[tuple[int, int]]:
        """Return the (epoch, index) of each sample in a step's global batch.

        Args:
            step: counted from 0; every step takes the same time.
        """
        return [(epoch, index) for epoch, index in self.array(step).tolist()]

    def array(self, step: int) -> Array:
        """Return the same as `rows`, as an array [batch_size, 2] of int64, which takes much less time.

        Args:
            step: counted from 0.
        """
        place, stop = step * self.batch_size, (step + 1) * self.batch_size
        parts: list[Array] = []
        while place < stop:  # one pass per epoch that the batch touches
            epoch, within = divmod(place, self.count)
            parts.append(self._part(epoch, within, within + stop - place))
            place += len(parts[-1])
        return np.concatenate(parts)

    def _part(self, epoch: int, start: int, stop: int) -> Array:
        """The rows of one epoch from `start` to `stop`, or to its end, [n, 2]."""
        index = self.epoch(epoch)[start:stop]
        return np.stack([np.full(len(index), epoch), index], axis=1)

    def at(self, place: int) -> tuple[int, int]:
        """Return the (epoch, index) of one sample of the endless sequence, counted from 0."""
        epoch, index = self._part(*divmod(place, self.count), place % self.count + 1)[0].tolist()
        return epoch, index

    def steps(self, epochs: float) -> int:
        """Return the number of steps in `epochs` epochs; the last step may reach into the next epoch."""
        return math.ceil(round(epochs * self.count) / self.batch_size)

    def batches(
        self, start: int = 0, stop: int | None = None, *, rank: int = 0, ranks: int = 1, epochs: bool = False
    ) -> Batches:
        """Return one process's part of each global batch, for `DataLoader(dataset, batch_sampler=...)`.

        The parts of all processes are the global batch, in rank order, whatever their number; their sizes differ by at
        most one. A resumed run passes the steps that it has done as `start`.

        Args:
            start: first step (default: 0); a later one takes no longer to reach.
            stop: the step to stop before, such as `steps(90)` (default: never stop).
            rank: this process, counted from 0 (default: 0).
            ranks: number of processes (default: 1).
            epochs: whether to yield (epoch, index) instead of the index, for augmentation that is a function of both;
                see `sample_rngs` (default: False).
        """
        return Batches(self, start, stop, rank, ranks, epochs)


class Batches:
    """One process's batches, made by `Order.batches`: iterating starts at `start` every time.

    Args:
        order: the order.
        start: first step.
        stop: the step to stop before; None never stops.
        rank: this process, counted from 0.
        ranks: number of processes.
        epochs: whether to yield (epoch, index) instead of the index.
    """

    def __init__(self, order: Order, start: int, stop: int | None, rank: int, ranks: int, epochs: bool) -> None:
        within("start", start, 0)
        if order.batch_size < ranks:
            raise ConfigError(
                f"Expected at least one sample per process; got a batch of {order.batch_size} for {ranks} processes. "
                f"Use a larger batch size or fewer processes."
            )
        self.order, self.start, self.stop, self.epochs = order, start, stop, epochs
        self.own = share(order.batch_size, rank, ranks)

    def __iter__(self) -> Iterator[list[Any]]:
        for step in itertools.count(self.start) if self.stop is None else range(self.start, self.stop):
            rows = self.order.rows(step)[self.own]
            yield rows if self.epochs else [index for _, index in rows]

    def __len__(self) -> int:
        if self.stop is None:
            raise TypeError("These batches never end; pass `stop` to `batches` to give them a length.")
        return max(self.stop - self.start, 0)


class BalancedOrder(Order):
    """A training order in which every class comes equally often; an epoch has as many samples as the data set.

    Each class is an endless sequence of shuffled passes over its own samples, and every epoch takes the next part of
    each, so all samples of a class are used equally often. A row holds the pass instead of the epoch: a sample that
    comes twice in an epoch belongs to two passes, and so is augmented in two ways.

    Args:
        labels: the class of each sample; a class without samples takes no part.
        batch_size: samples in a global batch, over all processes.
        seed: the run's seed (default: 0).
    """

    def __init__(self, labels: Sequence[int] | Array, batch_size: int, *, seed: int = 0) -> None:
        super().__init__(len(labels), batch_size, seed=seed)
        found = np.asarray(labels)
        self.classes = [np.flatnonzero(found == label) for label in np.unique(found)]

    def _epoch(self, epoch: int) -> Array:
        """The rows (pass, sample) of one epoch, [count, 2]."""
        parts, K = [], len(self.classes)
        for k, members in enumerate(self.classes):
            # The class's part of its endless sequence; the parts of all classes have `count` samples together.
            place, stop = ((self.count * e + k) // K for e in (epoch, epoch + 1))
            while place < stop:
                turn, within = divmod(place, len(members))
                part = rng(self.seed, "balance", k, turn).permutation(members)[within : within + stop - place]
                parts.append(np.stack([np.full(len(part), turn), part], axis=1))
                place += len(part)
        return rng(self.seed, "order", epoch).permutation(np.concatenate(parts))

    def _part(self, epoch: int, start: int, stop: int) -> Array:
        rows: Array = self.epoch(epoch)[start:stop]
        return rows
