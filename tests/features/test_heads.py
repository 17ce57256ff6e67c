"""Heads against direct solves, scikit-learn, and the model that they become part of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from tests.features.samples import tiny
from vitkit import load, save
from vitkit.errors import ConfigError, DataError, UnknownName
from vitkit.features import Head, Options, attach, choose, fit
from vitkit.features.head import Standard
from vitkit.features.knn import KS, Neighbours, T, class_means, unit
from vitkit.features.probe import METHODS, several
from vitkit.features.ridge import BIAS, L2, draw, few_shot, ridge


def clusters(n: int, F: int, K: int, seed: int = 0, spread: float = 1.0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % K
    centres = np.random.default_rng(99).normal(size=(K, F)) * 2 + 3
    X = centres[y] * 0.5 + rng.normal(size=(n, F)) * spread * np.linspace(0.1, 4, F)
    return X.astype(np.float32), y


@settings(deadline=None, max_examples=20)
@given(st.integers(4, 40), st.integers(2, 30), st.integers(2, 4), st.sampled_from([1.0, L2]), st.integers(0, 999))
def test_ridge_is_the_direct_solve(n, F, K, l2, seed) -> None:
    X, y = clusters(n, F, K, seed)
    head = ridge(X, y, K, l2)
    x = X.astype(np.float64)
    A = np.c_[(x - x.mean(0)) / (x.std(0) + 1e-5), np.full(n, 100.0)]
    W = np.linalg.solve(A.T @ A + l2 * np.eye(F + 1), A.T @ (2.0 * np.eye(K)[y] - 1))
    assert BIAS == 100
    assert np.allclose(head.logits(x), A @ W, rtol=1e-9, atol=1e-9)


def test_few_shot_protocol() -> None:
    X, y = clusters(120, 20, 4)
    Xt, yt = clusters(80, 20, 4, seed=1)
    rows = few_shot(X, y, Xt, yt, 4)
    assert [row.shots for row in rows] == [1, 5, 10, 25]  # three seeds of each
    assert all(len(row.accuracies) == 3 for row in rows)
    assert np.mean(rows[-1].accuracies) > np.mean(rows[0].accuracies)
    chosen = draw(y, 4, 5, seed=0)
    assert np.bincount(y[chosen]).tolist() == [5] * 4
    assert len(set(chosen)) == 20
    assert not np.array_equal(chosen, draw(y, 4, 5, seed=1))
    assert [row.shots for row in few_shot(X[:24], y[:24], Xt, yt, 4)] == [1, 5]


@pytest.mark.parametrize("k", [1, 5, 20, 500])
def test_neighbours_are_those_of_scikit_learn(k, monkeypatch) -> None:
    X, y = clusters(300, 24, 5, spread=2)
    Xt, _ = clusters(90, 24, 5, seed=1, spread=2)
    theirs = KNeighborsClassifier(
        min(k, 300), metric="cosine", algorithm="brute", weights=lambda d: np.exp(-d / T)
    ).fit(X.astype(float), y)
    monkeypatch.setattr("vitkit.features.knn.NUMBERS", 300 * 7)  # seven queries at once
    mine = Neighbours(X.astype(float), y, 5).votes(Xt.astype(float), (k,))[k]
    assert np.allclose(mine, theirs.predict_proba(Xt.astype(float)), atol=1e-9)
    single = Neighbours(X, y, 5).votes(Xt, (3, k))[k]  # float32, as features come
    assert np.allclose(single, mine, atol=1e-4)
    assert (single.argmax(1) == theirs.predict(Xt.astype(float))).all()


def test_no_image_votes_on_itself() -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 8)), rng.integers(0, 2, 60)  # labels that mean nothing
    bank, own = Neighbours(X, y, 2), np.arange(60)
    assert (bank.votes(X, (1,))[1].argmax(1) == y).all()
    assert (bank.votes(X, (1,), own=own)[1].argmax(1) == y).mean() < 0.8
    some = np.array([7, 3, 40])
    assert np.allclose(bank.votes(X[some], (5,), own=some)[5], bank.votes(X, (5,), own=own)[5][some])
    assert bank.best_k() in KS


def test_class_means_answer_as_by_cosine() -> None:
    X, y = clusters(100, 12, 4)
    means = np.stack([unit(X[y == k].astype(float)).mean(0) for k in range(4)])
    assert (class_means(X, y, 4).logits(X).argmax(1) == (unit(X) @ unit(means).T).argmax(1)).all()


@pytest.mark.parametrize("K", [2, 3])
def test_logistic_is_scikit_learn_on_standardised_features(K) -> None:
    X, y = clusters(90, 10, K, spread=2)
    found = fit("logistic", X, y, "abc"[:K], Options(strength=0.5))
    scaler = StandardScaler().fit(X.astype(float))
    theirs = LogisticRegression(C=0.5, max_iter=1000).fit(scaler.transform(X.astype(float)), y)
    logits = found.head.logits(X.astype(float))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert np.allclose(p, theirs.predict_proba(scaler.transform(X.astype(float))), atol=1e-4)
    assert np.allclose(found.scores(X.astype(float)), logits)


def test_strength_is_chosen_by_held_out_loss_on_train() -> None:
    X, y = clusters(60, 40, 3, spread=4)
    found = fit("logistic", X, y, "abc")
    losses = found.chosen["held_out_nll"]
    assert found.chosen["folds"] == 5
    assert f"{found.chosen['C']:g}" == min(losses, key=losses.get)
    assert found.chosen["C"] < 100  # noise asks for regularisation
    assert fit("logistic", X, y, "abc").chosen == found.chosen  # and for nothing random


def test_sgd_comes_close_to_the_solver() -> None:
    X, y = clusters(400, 16, 4, spread=1.5)
    Xt, yt = clusters(200, 16, 4, seed=1, spread=1.5)
    solver, descent = fit("logistic", X, y, "abcd"), fit("sgd", X, y, "abcd")
    accuracy = [(f.scores(Xt).argmax(1) == yt).mean() for f in (solver, descent)]
    assert abs(accuracy[0] - accuracy[1]) <= 0.03
    assert accuracy[1] > 0.8
    assert np.allclose(fit("sgd", X, y, "abcd").head.W, descent.head.W)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 30), st.integers(2, 6), st.integers(0, 999))
def test_standardisation_is_folded_exactly(F, K, seed) -> None:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(25, F)) * rng.uniform(0.01, 50, F) + rng.normal(size=F) * 20
    scale, head = Standard.of(X), Head(rng.normal(size=(K, F)), rng.normal(size=K))
    assert np.allclose(head.over(scale).logits(X), head.logits(scale(X)), rtol=1e-9, atol=1e-8)
    assert np.allclose(head.times(3).logits(X), 3 * head.logits(X))


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({}, "cls"),
        ({}, "mean"),
        ({"pre_logits": True}, "cls"),
        ({"pre_logits": True}, "pre-logits"),
        ({"pool": "mean"}, "cls"),
        ({"pool": "mean", "norm_after_pool": True}, "mean"),
        ({"pool": "mean", "norm_after_pool": True, "class_token": False}, None),
        ({"num_register_tokens": 2, "layer_scale": 0.1}, "mean"),
    ],
)
@torch.no_grad()
def test_a_head_becomes_part_of_an_ordinary_model(changes, feature, tmp_path) -> None:
    model = tiny(**changes)
    choice, x = choose(feature, model.config), torch.randn(4, 3, 32, 32)
    rng = np.random.default_rng(0)
    head = Head(rng.normal(size=(3, 32)), rng.normal(size=3))
    before = model(x)
    new = attach(model, head, ["a", "b", "c"], choice)
    expected = head.logits(choice.of(model, x).double().numpy())
    assert np.allclose(new(x).numpy(), expected, atol=1e-4)
    assert torch.equal(model(x), before)  # the backbone's own head is as it was
    save(new, tmp_path / "new.safetensors")
    again = load(tmp_path / "new.safetensors")
    assert torch.equal(again(x), new(x))
    assert again.input_spec.class_names == ("a", "b", "c")
    assert again.config == dataclasses.replace(new.config)


def test_layers_have_no_place_in_a_checkpoint() -> None:
    model = tiny()
    with pytest.raises(ConfigError, match="has no place"):
        attach(model, Head(np.zeros((2, 64)), np.zeros(2)), "ab", choose("layers:0,1", model.config))


@pytest.mark.parametrize("method", METHODS)
def test_one_class_and_empty_classes_are_one_sentence(method) -> None:
    X, _ = clusters(6, 4, 2)
    with pytest.raises(DataError, match="at least two classes; all 6 training images are 'a'"):
        fit(method, X, np.zeros(6, int), "ab")
    with pytest.raises(DataError, match="'b' has no training images"):
        fit(method, X, np.array([0, 0, 0, 2, 2, 2]), "abc")


def test_fewer_images_than_folds() -> None:
    X, y = clusters(6, 4, 2)
    found = fit("logistic", X, y, "ab")
    assert found.chosen["folds"] == 3
    assert found.notes == ("3 folds instead of 5: 'a' has only 3 images.",)
    with pytest.raises(DataError, match=r"'b' has 1.*--strength"):
        fit("logistic", X[:4], np.array([0, 0, 0, 1]), "ab")
    assert fit("logistic", X[:4], np.array([0, 0, 0, 1]), "ab", Options(strength=1.0)).chosen == {"C": 1.0}
    assert fit("ridge", X[:2], np.array([0, 1]), "ab").chosen["factor"] == 1  # one shot
    assert fit("knn", X[:2], np.array([0, 1]), "ab").scores(X[:2]).shape == (2, 2)
    with pytest.raises(DataError, match="--method logistic"):
        fit("sgd", X[:4], np.array([0, 0, 0, 1]), "ab")


def test_ridge_is_as_sure_as_it_is_right() -> None:
    X, y = clusters(200, 16, 4, spread=1.5)
    Xt, _ = clusters(200, 16, 4, seed=1, spread=1.5)
    found, plain = fit("ridge", X, y, "abcd"), ridge(X, y, 4)
    assert found.chosen["factor"] > 1
    assert np.allclose(found.head.logits(Xt), plain.logits(Xt) * found.chosen["factor"])


def test_lists_of_methods() -> None:
    assert several("knn, logistic,knn") == ["knn", "logistic"]
    with pytest.raises(UnknownName, match="did you mean 'ridge'"):
        several("rige")
    with pytest.raises(ConfigError, match="one or more"):
        several(",")
    with pytest.raises(ConfigError, match="folds"):
        Options(folds=1)
    with pytest.raises(ConfigError, match="strength"):
        Options(strength=0)
