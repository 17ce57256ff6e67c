"""Which sample comes when: functions of numbers, so that starting at step n is the same as having come there.

    rng(seed, ...)     the only source of randomness of this room
    Order              (seed, step) -> the global batch; epochs follow one another without a gap
    share              the part of one process of many
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from vitkit.errors import ConfigError

Array = np.ndarray[Any, np.dtype[Any]]

# What a random number is for. Part of every seed: two purposes never share a stream.
PURPOSES: dict[str, int] = {"order": 1, "sample": 2, "mix": 3, "split": 4}


def rng(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """The generator of one purpose at one place; the same arguments give the same draws everywhere.

    Args:
        seed: the run's seed, at least 0.
        purpose: a row of PURPOSES.
        numbers: the place: (epoch, index) of a sample, (epoch,) of an order, (step,) of a mix.
    """
    if seed < 0:
        raise ConfigError(f"seed must be a whole number of at least 0; got {seed}.")
    # A number of the length ends the list: SeedSequence takes [1] and [1, 0] for the same.
    entropy = [seed, PURPOSES[purpose], *numbers, len(numbers) + 1]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def within(name: str, value: float, least: float, most: float = math.inf) -> None:
    """Refuse a number that does not lie between `least` and `most`, by its name."""
    if not least <= value <= most or math.isinf(value):
        span = f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
        raise ConfigError(f"{name} must be a finite number, {span}; got {value!r}.")


def share(count: int, rank: int, ranks: int) -> slice:
    """The part of `count` rows that process `rank` of `ranks` takes: contiguous, every row exactly once.

    Args:
        count: rows in all.
        rank: this process, from 0.
        ranks: processes in all.
    """
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank must lie between 0 and {ranks - 1}; got {rank}.")
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


class Order:
    """The training order: an endless row of shuffled epochs, cut into global batches.

    No sample is dropped and no batch is short: a batch that reaches the end of an epoch goes on in the next one.

    Args:
        count: samples of the data set.
        batch_size: samples of a global batch (over all processes); may exceed `count`.
        seed: the run's seed.
        shuffle: False keeps the source's order in every epoch.
    """

    def __init__(self, count: int, batch_size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if count < 1 or batch_size < 1:
            raise ConfigError(f"An order needs at least 1 sample and a batch size of at least 1; got {count} samples "
                              f"and batch size {batch_size}.")
        self.count, self.batch_size, self.seed, self.shuffle = count, batch_size, seed, shuffle
        self._epoch = functools.lru_cache(maxsize=2)(self._draw)

    def _draw(self, epoch: int) -> Array:
        small = np.arange(self.count, dtype=np.int32 if self.count < 2**31 else np.int64)
        return rng(self.seed, "order", epoch).permutation(small) if self.shuffle else small

    def epoch(self, epoch: int) -> Array:
        """The order of one epoch: a permutation of the samples, a function of (seed, epoch)."""
        return self._epoch(epoch)

    def rows(self, step: int) -> list[tuple[int, int]]:
        """The global batch of a step, as (epoch, index) of its samples.

        Args:
            step: from 0; any step costs the same.
        """
        return [self.at(place) for place in range(step * self.batch_size, (step + 1) * self.batch_size)]

    def at(self, place: int) -> tuple[int, int]:
        """(epoch, index) of the sample at a place of the endless row."""
        epoch, within = divmod(place, self.count)
        return epoch, int(self.epoch(epoch)[within])

    def steps(self, epochs: float) -> int:
        """Steps that make up so many epochs (the last one may reach into the next)."""
        return math.ceil(round(epochs * self.count) / self.batch_size)

    def epoch_of(self, step: int) -> int:
        """The epoch in which a step's first sample lies."""
        return step * self.batch_size // self.count

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_epoch"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._epoch = functools.lru_cache(maxsize=2)(self._draw)
