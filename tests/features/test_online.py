"""Online ridge regression: equal to the closed form after any changes, and its leave-one-out equal to refitting."""

from __future__ import annotations

import numpy as np
import pytest

from vitkit.features import online, ridge
from vitkit.features.head import Head, Standard
from vitkit.features.online import Choices, OnlineRidge, choose


def photos(n: int, F: int = 12, K: int = 3, seed: int = 0, apart: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % K
    means = rng.normal(size=(K, F))
    return rng.normal(size=(n, F)) + apart * means[y], y


def direct(choices: Choices, X: np.ndarray, y: np.ndarray, K: int) -> Head:
    """Solve the normal equations, with the scale that is given."""
    A = np.concatenate([choices.scale(X), np.full((len(X), 1), ridge.BIAS)], 1)
    W = np.linalg.solve(A.T @ A + choices.l2 * np.eye(A.shape[1]), A.T @ online.targets(y, K))
    return Head(W[:-1].T, ridge.BIAS * W[-1]).over(choices.scale).times(choices.factor)


def names(n: int) -> list[str]:
    return [str(i) for i in range(n)]


def test_it_is_the_ridge_of_the_probe() -> None:
    X, y = photos(40)
    head, _ = OnlineRidge(Choices(Standard.of(X), factor=1.0), names(40), X).answers(y, 3, np.arange(40))
    expected = ridge.ridge(X, y, 3)
    np.testing.assert_allclose(head.W, expected.W, atol=1e-12)
    np.testing.assert_allclose(head.b, expected.b, atol=1e-12)


@pytest.mark.parametrize("F", [12, 60])  # fewer values than photos, and more
def test_after_many_changes_it_is_what_a_fresh_fit_is(F: int) -> None:
    X, y = photos(400, F)
    choices, rng = Choices(Standard.of(X[:30]), l2=256.0), np.random.default_rng(1)
    model, inside = OnlineRidge(choices, names(30), X[:30]), set(range(30))
    for _ in range(120):
        out = sorted(set(range(400)) - inside)
        new = [int(i) for i in rng.permutation(out)[: rng.integers(0, 8)]]
        gone = [int(i) for i in rng.permutation(sorted(inside))[: rng.integers(0, 6)]]
        model.remove(str(i) for i in gone)
        model.add([str(i) for i in new], X[new])
        inside = inside - set(gone) | set(new)
    rows = [int(key) for key in model.keys]
    assert set(rows) == inside
    assert len(rows) > 100
    head, _ = model.answers(y[rows], 3, np.arange(len(rows)))
    expected = direct(choices, X[rows], y[rows], 3)
    np.testing.assert_allclose(head.W, expected.W, rtol=1e-8, atol=1e-11)
    np.testing.assert_allclose(head.b, expected.b, rtol=1e-8, atol=1e-11)


def test_leave_one_out_is_exact() -> None:
    X, y = photos(24, 40)
    choices = Choices(Standard.of(X), l2=300.0, factor=3.0)
    _, logits = OnlineRidge(choices, names(24), X).answers(y, 3, np.arange(24))
    for i in range(24):
        others = np.delete(np.arange(24), i)
        expected = direct(choices, X[others], y[others], 3).logits(X[i : i + 1])[0]
        np.testing.assert_allclose(logits[i], expected, atol=1e-9)


def test_leaving_out_a_burst_is_exact() -> None:
    X, y = photos(30, 10)
    groups = np.where(np.arange(30) % 3 == 0, np.arange(30) // 9, 100 + np.arange(30))  # bursts of three of one class
    choices = Choices(Standard.of(X), l2=300.0, factor=1.0)
    _, logits = OnlineRidge(choices, names(30), X).answers(y, 3, groups)
    assert np.bincount(groups).max() == 3
    for group in np.unique(groups):
        inside, held = groups != group, groups == group
        expected = direct(choices, X[inside], y[inside], 3).logits(X[held])
        np.testing.assert_allclose(logits[held], expected, atol=1e-9)


def test_removing_everything_and_starting_again() -> None:
    X, y = photos(20)
    model = OnlineRidge(Choices(Standard.of(X)), names(20), X)
    model.remove(names(20))
    assert model.keys == []
    model.add(names(9), X[:9])
    expected = direct(model.choices, X[:9], y[:9], 3)
    np.testing.assert_allclose(model.answers(y[:9], 3, np.arange(9))[0].W, expected.W, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("F", [12, 90])  # the two products whose eigenvalues are taken
def test_the_choice_is_the_best_of_all_by_leave_one_out(F: int) -> None:
    X, y = photos(60, F, apart=0.6)
    groups = np.arange(60) // 2 * 2 + np.arange(60) % 2 * (np.arange(60) < 40)  # pairs among the last photos
    chosen = choose(X, y, 3, groups)
    T, found = online._smoothed(y, 3), {}
    for l2 in online.STRENGTHS:
        _, logits = OnlineRidge(Choices(chosen.scale, l2, 1.0), names(60), X).answers(y, 3, groups)
        for factor in online.FACTORS:
            found[l2, float(factor)] = online._cross_entropy(factor * logits, T)
    assert found[chosen.l2, chosen.factor] == pytest.approx(min(found.values()), rel=1e-9)


def test_few_photos_get_the_defaults_and_no_false_certainty() -> None:
    X, y = photos(9, apart=20.0)
    chosen = choose(X, y, 3, np.arange(9))
    assert (chosen.l2, chosen.factor) == (ridge.L2, online.FACTOR)
    X, y = photos(30, apart=20.0)  # no photo is ever wrong
    chosen = choose(X, y, 3, np.arange(30))
    _, logits = OnlineRidge(chosen, names(30), X).answers(y, 3, np.arange(30))
    p = online.softmax(logits)
    assert (p.argmax(1) == y).all()
    assert 0.8 < p.max(1).mean() < 0.97  # ten photos of a class do not show that errors are rarer than one in twelve
