from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitkit.data.order import Order, rng, rngs, seed_words, share
from vitkit.errors import ConfigError

DRAWN = [0.3546178129773735, 0.45937788753132336]  # a change of these changes every recorded run


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
    assert pickle.loads(pickle.dumps(order)).rows(59) == forward[59]


def test_seed_and_epoch_change_the_order():
    a, b = Order(500, 10, seed=0), Order(500, 10, seed=1)
    assert a.epoch(0).tolist() != b.epoch(0).tolist()
    assert a.epoch(0).tolist() != a.epoch(1).tolist()
    assert Order(500, 10, shuffle=False).epoch(4).tolist() == list(range(500))


def test_no_two_places_share_a_stream():
    places = [
        ("sample", 0),
        ("sample", 0, 0),
        ("sample", 0, 1),
        ("sample", 1, 0),
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


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=7, max_size=7), min_size=1, max_size=9), st.integers(1, 7))
@settings(deadline=None, max_examples=50)
def test_seeds_of_many_places_are_numpys(entropy, words):
    rows = np.array(entropy, np.uint32)[:, :words]
    expected = [np.random.SeedSequence(row).generate_state(4, np.uint64) for row in rows]
    assert np.array_equal(seed_words(rows), expected)


@pytest.mark.parametrize("seed", [0, 5, 2**32 - 1, 2**32, 2**70 + 1])
def test_generators_of_many_places_are_those_of_each(seed):
    for places in ([], [(0, 0)], [(3, i) for i in range(40)], [(0, 2**32 - 1), (2**33, 7)], [(4,)]):
        draws = [(g.random(), g.integers(0, 7), g.random()) for g in rngs(seed, "sample", places)]
        assert draws == [
            (g.random(), g.integers(0, 7), g.random()) for g in (rng(seed, "sample", *place) for place in places)
        ]


def test_draws_are_those_of_every_run_before():
    assert rng(7, "sample", 3, 11).random(2).tolist() == DRAWN
    assert next(rngs(7, "sample", [(3, 11)])).random(2).tolist() == DRAWN


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
        lambda: next(rngs(-1, "sample", [(0, 0)])),
        lambda: share(4, 2, 2),
    ],
)
def test_nonsense_is_refused(make):
    with pytest.raises(ConfigError):
        make()
