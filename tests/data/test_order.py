from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from vitkit.data.base import stratified
from vitkit.data.order import RANDOM_NUMBERS, BalancedOrder, Order, rng, sample_rngs, share
from vitkit.errors import ConfigError


@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 2**31))
@settings(deadline=None, max_examples=50)
def test_epochs_follow_one_another_without_a_gap(count, batch, seed):
    order = Order(count, batch, seed=seed)
    steps = order.steps(3)
    rows = [row for step in range(steps) for row in order.rows(step)]
    for epoch in range(3):
        seen = [i for e, i in rows if e == epoch]
        assert sorted(seen) == list(range(count))
        assert seen == order.epoch(epoch).tolist()
    assert 0 <= len(rows) - 3 * count < batch


@given(st.integers(0, 1000), st.integers(1, 9))
@settings(deadline=None, max_examples=50)
def test_shares_cover_every_row_once(count, ranks):
    parts = [list(range(count))[share(count, r, ranks)] for r in range(ranks)]
    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_any_step_is_the_same_from_anywhere():
    order = Order(1000, 48, seed=3)
    forward = [order.rows(step) for step in range(60)]
    again = Order(1000, 48, seed=3)
    assert [again.rows(step) for step in reversed(range(60))] == forward[::-1]


def test_seed_and_epoch_change_the_order():
    a, b = Order(500, 10, seed=0), Order(500, 10, seed=1)
    assert a.epoch(0).tolist() != b.epoch(0).tolist()
    assert a.epoch(0).tolist() != a.epoch(1).tolist()
    assert Order(500, 10, shuffle=False).epoch(4).tolist() == list(range(500))


def test_no_two_places_share_a_stream():
    places = [
        ("split", 0),
        ("split", 0, 0),
        ("split", 0, 1),
        ("split", 1, 0),
        ("order", 0),
        ("order", 1),
        ("mix", 0),
    ]
    draws = [rng(5, *place).random() for place in places]
    assert len(set(draws)) == len(places)
    assert draws == [rng(5, *place).random() for place in places]


@given(st.integers(1, 40), st.integers(1, 90), st.integers(0, 100))
@settings(deadline=None, max_examples=50)
def test_rows_are_the_places_one_by_one(count, batch, step):
    order = Order(count, batch, seed=2)
    assert order.rows(step) == [order.at(place) for place in range(step * batch, (step + 1) * batch)]


def drawn(seed, rows):
    """Draws of several kinds for each row, an odd number of 32-bit ones among them (Philox keeps the other half)."""
    return [(g.random(), g.integers(0, 7), g.standard_normal(), g.random()) for g in sample_rngs(seed, rows)]


@pytest.mark.parametrize("seed", [0, 5, 2**32, 2**70 + 1])
def test_a_sample_draws_the_same_whatever_was_drawn_before_it(seed):
    rows = [(epoch, index) for epoch in (0, 3, 2**33) for index in (0, 1, 40, 2**32 - 1)]
    together = drawn(seed, rows)
    assert together == [drawn(seed, [row])[0] for row in rows]
    assert together[::-1] == drawn(seed, rows[::-1])
    assert len({draws[0] for draws in together}) == len(rows)
    assert drawn(seed, []) == []


def test_samples_are_philox_at_their_own_counter():
    generator = np.random.Generator(np.random.Philox(key=7, counter=[0, 3, 11, 0]))
    assert next(sample_rngs(7, [(3, 11)])).random(5).tolist() == generator.random(5).tolist()


def test_draws_never_change():
    """A change here needs another RANDOM_NUMBERS; a change of the split must never happen."""
    assert RANDOM_NUMBERS == 3
    assert next(sample_rngs(7, [(3, 11)])).random(2).tolist() == [0.32082649032164157, 0.11444785604454488]
    assert rng(7, "order", 3).permutation(8).tolist() == [4, 1, 3, 6, 0, 5, 7, 2]
    assert rng(7, "mix", 3).permutation(8).tolist() == [5, 4, 1, 0, 6, 3, 7, 2]
    assert rng(7, "split", 3).permutation(8).tolist() == [3, 5, 4, 1, 6, 7, 2, 0]
    assert stratified(np.repeat([0, 1], [9, 7]), 0.3, 1)[1].tolist() == [0, 4, 8, 12, 15]


def test_global_generators_are_left_alone():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    Order(100, 10, seed=1).rows(7)
    assert (np.random.get_state()[1] == before).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Order(0, 4),
        lambda: Order(4, 0),
        lambda: rng(-1, "order", 0),
        lambda: next(sample_rngs(-1, [(0, 0)])),
        lambda: share(4, 2, 2),
    ],
)
def test_nonsense_is_refused(make):
    with pytest.raises(ConfigError):
        make()


class Pairs(Dataset):
    """Gives back what it was asked for."""

    def __len__(self):
        return 100

    def __getitem__(self, item):
        return torch.tensor(item)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (2, 1), (3, 0)])
def test_a_plain_data_loader_takes_its_batches(ranks, workers):
    """The parts that the processes get are the global batches, on any number of processes, from any step."""
    order = Order(100, 16, seed=2)
    stop = order.steps(2)
    loaders = [
        DataLoader(Pairs(), batch_sampler=order.batches(5, stop, rank=rank, ranks=ranks), num_workers=workers)
        for rank in range(ranks)
    ]
    assert [len(loader) for loader in loaders] == [stop - 5] * ranks
    for _ in range(2):  # a second pass starts at the same step
        found = [torch.cat(parts).tolist() for parts in zip(*loaders, strict=True)]
        assert found == [[index for _, index in order.rows(step)] for step in range(5, stop)]
    rows = next(iter(DataLoader(Pairs(), batch_sampler=order.batches(6, rank=ranks - 1, ranks=ranks, epochs=True))))
    assert [tuple(row) for row in rows.tolist()] == order.rows(6)[share(16, ranks - 1, ranks)]


def test_batches_of_any_order():
    order = BalancedOrder([0, 0, 0, 0, 0, 1], 4)
    assert list(order.batches(1, 3)) == [[index for _, index in order.rows(step)] for step in (1, 2)]
    assert list(order.batches(3, 2)) == []
    assert len(order.batches(3, 2)) == 0
    endless = iter(order.batches(1000))
    assert next(endless) == [index for _, index in order.rows(1000)]
    with pytest.raises(TypeError, match="never end"):
        len(order.batches())
    with pytest.raises(ConfigError, match="at least one sample per process; got a batch of 4 for 5 processes"):
        order.batches(rank=0, ranks=5)
    with pytest.raises(ConfigError, match="start must be"):
        order.batches(-1)
    with pytest.raises(ConfigError, match="rank must be between 0 and 1"):
        order.batches(rank=2, ranks=2)
