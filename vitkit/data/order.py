"""Which sample comes when: functions of numbers, so that starting at step n is the same as having come there.

rng(seed, ...)     the only source of randomness of this room; `rngs` gives those of many places
Order              (seed, step) -> the global batch; epochs follow one another without a gap
share              the part of one process of many
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.random.bit_generator import ISeedSequence

from vitkit.errors import ConfigError
from vitkit.types import Array

# What a random number is for. Part of every seed: two purposes never share a stream.
PURPOSES: dict[str, int] = {"order": 1, "sample": 2, "mix": 3, "split": 4}

_INIT_A, _MULT_A, _INIT_B, _MULT_B = 0x43B0D7E5, 0x931E8875, 0x8B51F9DD, 0x58F38DED  # of NumPy's SeedSequence


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


def rngs(seed: int, purpose: str, places: Sequence[tuple[int, ...]]) -> Iterator[np.random.Generator]:
    """rng(seed, purpose, *place) of each place: the same draws, for a fraction of what it costs one by one.

    Args:
        seed: see `rng`.
        purpose: see `rng`.
        places: the numbers of each place, equally many.
    """
    entropy = [[seed, PURPOSES[purpose], *place, len(place) + 1] for place in places]
    if not entropy or not 0 <= seed < 2**32 or max(map(max, entropy)) >= 2**32:  # more than one word a number
        yield from (rng(seed, purpose, *place) for place in places)
        return
    for words in seed_words(np.array(entropy, np.uint32)):
        yield np.random.Generator(np.random.PCG64(cast(np.random.SeedSequence, _Words(words))))


def seed_words(entropy: Array) -> Array:
    """SeedSequence(row).generate_state(4, np.uint64) of each row of entropy: [n, k] uint32 -> [n, 4] uint64.

    NumPy's own, which it promises never to change, takes longer to set up than an image of 28 x 28 takes to resize.
    Here every operation is on a whole column.
    """
    const = _INIT_A

    def scramble(column: Array, factor: int) -> Array:
        nonlocal const
        column = column ^ np.uint32(const)
        const = const * factor % 2**32
        column = column * np.uint32(const)
        return column ^ column >> np.uint32(16)

    def join(a: Array, b: Array) -> Array:
        both: Array = a * np.uint32(0xCA01F9DD) - b * np.uint32(0x4973F715)
        return both ^ both >> np.uint32(16)

    columns = [*entropy.T, *[np.zeros(len(entropy), np.uint32)] * (4 - entropy.shape[1])]
    pool = [scramble(column, _MULT_A) for column in columns[:4]]
    for source in range(4):
        for target in range(4):
            if source != target:
                pool[target] = join(pool[target], scramble(pool[source], _MULT_A))
    for column in columns[4:]:
        pool = [join(target, scramble(column, _MULT_A)) for target in pool]
    const = _INIT_B
    words = np.stack([scramble(pool[i % 4], _MULT_B) for i in range(8)], axis=1).astype(np.uint64)
    return words[:, 0::2] | words[:, 1::2] << np.uint64(32)


class _Words(ISeedSequence):
    """A SeedSequence whose words are known already."""

    def __init__(self, words: Array) -> None:
        self.words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> Array:
        return self.words


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
            raise ConfigError(
                f"An order needs at least 1 sample and a batch size of at least 1; got {count} samples "
                f"and batch size {batch_size}."
            )
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
        place, stop = step * self.batch_size, (step + 1) * self.batch_size
        rows: list[tuple[int, int]] = []
        while place < stop:  # one round an epoch
            epoch, within = divmod(place, self.count)
            part = self.epoch(epoch)[within : within + stop - place].tolist()
            rows += [(epoch, index) for index in part]
            place += len(part)
        return rows

    def at(self, place: int) -> tuple[int, int]:
        """(epoch, index) of the sample at a place of the endless row."""
        epoch, within = divmod(place, self.count)
        return epoch, int(self.epoch(epoch)[within])

    def steps(self, epochs: float) -> int:
        """Steps that make up so many epochs (the last one may reach into the next)."""
        return math.ceil(round(epochs * self.count) / self.batch_size)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_epoch"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._epoch = functools.lru_cache(maxsize=2)(self._draw)
