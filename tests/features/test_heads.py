"""Heads against direct solves, scikit-learn, and the model that they become part of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tests.features.samples import tiny
from vitkit import load, save
from vitkit.data.base import stratified
from vitkit.data.order import Order
from vitkit.errors import ConfigError, DataError, UnknownName
from vitkit.features import Head, Options, attach, choose, fit
from vitkit.features.head import Standard
from vitkit.features.knn import KS, Neighbours, class_means, unit
from vitkit.features.probe import METHODS, parse_methods
from vitkit.features.ridge import SEEDS, draw, few_shot, ridge
from vitkit.features.sgd import descend


def clusters(n: int, F: int, K: int, seed: int = 0, spread: float = 1.0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % K
    centres = np.random.default_rng(99).normal(size=(K, F)) * 2 + 3
    X = centres[y] * 0.5 + rng.normal(size=(n, F)) * spread * np.linspace(0.1, 4, F)
    return X.astype(np.float32), y


@settings(deadline=None, max_examples=20)
@given(st.integers(4, 40), st.integers(2, 30), st.integers(2, 4), st.sampled_from([1.0, None]), st.integers(0, 999))
def test_ridge_is_the_direct_solve(n, F, K, l2, seed) -> None:
    """With the authors' constants: std + 1e-5, a constant feature of 100, and l2 = 2^10 unless told otherwise."""
    X, y = clusters(n, F, K, seed)
    head = ridge(X, y, K) if l2 is None else ridge(X, y, K, l2)
    l2, x = l2 or 1024.0, X.astype(np.float64)
    A = np.c_[(x - x.mean(0)) / (x.std(0) + 1e-5), np.full(n, 100.0)]
    W = np.linalg.solve(A.T @ A + l2 * np.eye(F + 1), A.T @ (2.0 * np.eye(K)[y] - 1))
    assert np.allclose(head.logits(x), A @ W, rtol=1e-9, atol=1e-9)


def test_few_shot_protocol() -> None:
    X, y = clusters(120, 20, 4)
    Xt, yt = clusters(80, 20, 4, seed=1)
    rows = few_shot(X, y, Xt, yt, 4)
    assert [row.shots for row in rows] == [1, 5, 10, 25]  # three seeds of each
    assert SEEDS == (0, 1, 2)
    for row in rows:
        heads = [ridge(X[some], y[some], 4) for some in (draw(y, 4, row.shots, seed) for seed in (0, 1, 2))]
        assert row.accuracies == tuple((head.logits(Xt).argmax(1) == yt).mean() for head in heads)
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
        min(k, 300), metric="cosine", algorithm="brute", weights=lambda d: np.exp(-d / 0.07)
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


def test_k_is_chosen_by_leave_one_out_accuracy() -> None:
    assert KS == (10, 20, 100, 200)
    X, y = clusters(130, 8, 3, spread=3)
    bank = Neighbours(X, y, 3)
    x = unit(X.astype(float))
    near = np.argsort(-(x @ x.T) + np.diag(np.full(130, np.inf)), axis=1)[:, :-1]  # without itself

    def accuracy(k: int) -> float:
        rows = np.arange(130)[:, None]
        weight = np.exp((x[:, None] * x[near[:, :k]]).sum(2) / 0.07)
        votes = np.zeros((130, 3))
        np.add.at(votes, (rows, y[near[:, :k]]), weight)
        return float((votes.argmax(1) == y).mean())

    found = {k: accuracy(k) for k in (10, 20, 100, 200)}
    assert bank.best_k() == max(found, key=lambda k: (found[k], -k))
    assert fit("knn", X, y, "abc").chosen == {"k": bank.best_k(), "T": 0.07}


def test_class_means_are_cosines_over_the_temperature() -> None:
    X, y = clusters(100, 12, 4)
    means = np.stack([unit(X[y == k].astype(float)).mean(0) for k in range(4)])
    logits = class_means(X, y, 4).logits(X)
    assert (logits.argmax(1) == (unit(X) @ unit(means).T).argmax(1)).all()
    length = np.linalg.norm(X, axis=1)
    assert np.allclose(logits * (length.mean() / length)[:, None], unit(X) @ unit(means).T / 0.07, rtol=1e-4)


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
    assert list(losses) == ["0.0001", "0.001", "0.01", "0.1", "1", "10", "100"]
    assert found.chosen["folds"] == 5
    p = cross_val_predict(
        make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000)),
        X.astype(float),
        y,
        cv=StratifiedKFold(5, shuffle=True, random_state=0),
        method="predict_proba",
    )
    assert losses["0.01"] == pytest.approx(log_loss(y, p), rel=1e-3)
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
    losses = descent.chosen["held_out_nll"]
    assert list(losses) == ["0.1", "0.3", "1", "3", "10"]
    assert f"{descent.chosen['rate']:g}" == min(losses, key=losses.get)
    kept, out = stratified(y, 0.1, 0)  # judged on a tenth
    judged = descend(X[kept], y[kept], 4, [0.1, 0.3, 1.0, 3.0, 10.0], seed=0)[2].logits(X[out])
    assert losses["1"] == pytest.approx(log_loss(y[out], softmax(judged, axis=1)), rel=1e-3)


def test_sgd_is_momentum_with_weight_decay_and_a_cosine() -> None:
    """Against torch's SGD on one batch of all images: 500 steps, momentum 0.9, decay 1e-4 of the weights alone."""
    X, y = clusters(40, 6, 3)
    x = torch.from_numpy(X.astype(float))
    z = (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-5) / 6**0.5
    W, b = torch.zeros(3, 6, dtype=torch.float64, requires_grad=True), torch.zeros(3).double().requires_grad_()
    optimizer = torch.optim.SGD([{"params": [W], "weight_decay": 1e-4}, {"params": [b]}], lr=3.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + np.cos(np.pi * step / 500)) / 2)
    for _ in range(500):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(z @ W.T + b, torch.from_numpy(y)).backward()
        optimizer.step()
        schedule.step()
    (head,) = descend(X, y, 3, [3.0], seed=0)
    assert np.allclose(head.logits(X), (z @ W.T + b).detach().numpy(), atol=1e-3)


def test_sgd_sees_every_image_ten_times(monkeypatch) -> None:
    X, y = clusters(3000, 2, 2)
    steps: list[int] = []
    monkeypatch.setattr("vitkit.features.sgd.Order", lambda n, size, seed: Recorder(Order(n, size, seed=seed), steps))
    monkeypatch.setattr("vitkit.features.sgd.STEPS", 3)
    descend(X, y, 2, [1.0], seed=0)
    assert steps == list(range(30))  # ten epochs of three batches: 1024 images, and never more than 1024


class Recorder:
    def __init__(self, order: Order, steps: list[int]) -> None:
        self.order, self.steps_taken = order, steps
        self.steps = order.steps

    def rows(self, step: int):
        self.steps_taken.append(step)
        rows = list(self.order.rows(step))
        assert len(rows) == 1024
        return rows


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
    with pytest.raises(ConfigError, match=r"cls, mean or pre-logits; got layers:0,1"):
        attach(model, Head(np.zeros((2, 64)), np.zeros(2)), "ab", choose("layers:0,1", model.config))


@pytest.mark.parametrize("method", METHODS)
def test_one_class_and_empty_classes_are_one_sentence(method) -> None:
    X, _ = clusters(6, 4, 2)
    with pytest.raises(DataError, match="at least two classes; all 6 are 'a'"):
        fit(method, X, np.zeros(6, int), "ab")
    with pytest.raises(DataError, match="every class; 'b' has none"):
        fit(method, X, np.array([0, 0, 0, 2, 2, 2]), "abc")


def test_fewer_images_than_folds() -> None:
    X, y = clusters(6, 4, 2)
    found = fit("logistic", X, y, "ab")
    assert found.chosen["folds"] == 3
    assert found.notes == ("Using 3 folds instead of 5: 'a' has only 3 images.",)
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
    assert found.chosen["l2"] == 1024
    scores, truth = np.zeros((200, 4)), y
    for inside, outside in StratifiedKFold(5, shuffle=True, random_state=0).split(X, y):
        scores[outside] = ridge(X[inside], y[inside], 4).logits(X[outside])
    factors = 10 ** np.arange(-1, 3.025, 0.05)  # a tenth to a thousand, twenty steps to a power of ten
    best = min(factors, key=lambda factor: log_loss(truth, softmax(scores * factor, axis=1)))
    assert found.chosen["factor"] == pytest.approx(best)
    assert np.allclose(found.head.logits(Xt), plain.logits(Xt) * found.chosen["factor"])


def test_lists_of_methods() -> None:
    assert parse_methods("knn, logistic,knn") == ["knn", "logistic"]
    with pytest.raises(UnknownName, match="did you mean 'ridge'"):
        parse_methods("rige")
    with pytest.raises(ConfigError, match="one or more"):
        parse_methods(",")
    with pytest.raises(ConfigError, match="folds"):
        Options(folds=1)
    with pytest.raises(ConfigError, match="strength"):
        Options(strength=0)
