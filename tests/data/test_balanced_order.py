"""The balanced order: every class equally often, every image of a class too, and a function of (seed, epoch)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from vitkit import InputSpec
from vitkit.data import Augment, BalancedOrder, TrainLoader
from vitkit.data.base import Numbered, Pixels
from vitkit.errors import ConfigError

LABELS = np.repeat([0, 1, 2, 4], [50, 20, 7, 1])  # class 3 has no images


def rows(order: BalancedOrder, epochs: int) -> list[tuple[int, int]]:
    assert order.count % order.batch_size == 0
    return [row for step in range(epochs * order.count // order.batch_size) for row in order.rows(step)]


def test_every_class_comes_equally_often() -> None:
    order = BalancedOrder(LABELS, 13, seed=3)
    for epoch in range(6):
        found = [row for step in range(6) for row in order.rows(6 * epoch + step)]
        counts = Counter(LABELS[index] for _, index in found)
        assert sum(counts.values()) == len(LABELS)
        assert set(counts) == {0, 1, 2, 4}
        assert max(counts.values()) - min(counts.values()) <= 1
    assert Counter(LABELS[index] for _, index in rows(order, 4)) == dict.fromkeys([0, 1, 2, 4], len(LABELS))


def test_every_image_of_a_class_comes_equally_often_and_never_twice_in_a_pass() -> None:
    found = rows(BalancedOrder(LABELS, 39), 20)
    assert len(set(found)) == len(found)
    for label in (0, 1, 2, 4):
        counts = Counter(index for _, index in found if LABELS[index] == label)
        assert set(counts) == set(np.flatnonzero(label == LABELS))
        assert max(counts.values()) - min(counts.values()) <= 1


def test_the_order_depends_on_seed_and_step_alone() -> None:
    order = BalancedOrder(LABELS, 10, seed=1)
    whole = [order.rows(step) for step in range(40)]
    assert BalancedOrder(LABELS, 10, seed=1).rows(37) == whole[37]
    assert [BalancedOrder(LABELS, 10, seed=1).at(375)] == [whole[37][5]]
    assert BalancedOrder(LABELS, 10, seed=2).rows(0) != whole[0]
    flat = [row for step in whole for row in step]
    assert [index for _, index in flat[:78]] != [index for _, index in flat[78:156]]


def imbalanced() -> Pixels:
    pixels = np.random.default_rng(0).integers(0, 256, (len(LABELS), 8, 8), dtype=np.uint8)
    return Pixels(pixels, LABELS, list("abcde"), Numbered(len(LABELS)))


def loader(**how: object) -> TrainLoader:
    spec = InputSpec(size=(8, 8), mean=(0.5,), std=(0.5,), channels="gray")
    return TrainLoader(
        imbalanced(), spec, Augment(scale=(0.3, 1.0)), batch_size=16, sampling="balanced", **{"workers": 0, **how}
    )


def test_an_image_that_comes_again_is_augmented_anew() -> None:
    batches = list(loader().batches(0, 4))
    index, pixels = torch.cat([b.index for b in batches]), torch.cat([b.pixels for b in batches])
    lone = pixels[index == len(LABELS) - 1]
    assert len(lone) >= 12
    assert len(torch.unique(lone.flatten(1), dim=0)) > len(lone) - 3  # of so few pixels, two crops may be the same


def test_processes_workers_and_later_starts_see_the_same_batches() -> None:
    whole = list(loader().batches(0, 6))
    late = list(loader(workers=2).batches(4, 6))
    parts = [list(loader(rank=rank, ranks=2).batches(0, 6)) for rank in (0, 1)]
    for step in range(6):
        assert torch.equal(torch.cat([parts[rank][step].pixels for rank in (0, 1)]), whole[step].pixels)
    for a, b in zip(late, whole[4:], strict=True):
        assert torch.equal(a.pixels, b.pixels)


def test_an_unknown_sampling_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Unknown sampling 'balance'.*did you mean.*balanced"):
        TrainLoader(imbalanced(), InputSpec(size=(8, 8), mean=(0.5,), std=(0.5,), channels="gray"), sampling="balance")
