"""Average precision against scikit-learn, thresholds and the bootstrap against arithmetic done by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, log_loss, precision_recall_fscore_support

from vitkit.errors import InputError
from vitkit.evaluation.labels import (
    average_precision,
    best_threshold,
    best_thresholds,
    cross_entropy,
    mean_average_precision,
    measure_labels,
    sigmoid,
)
from vitkit.evaluation.logits import Outputs
from vitkit.evaluation.measure import wilson


def outputs(logits, labels) -> Outputs:
    labels = np.asarray(labels)
    names = tuple(f"{i}.jpg" for i in range(len(labels)))
    return Outputs(np.asarray(logits, np.float32), labels, np.arange(len(labels)), names)


def drawn(n: int, K: int, seed: int, ties: bool):
    rng = np.random.default_rng(seed)
    labels = (rng.random((n, K)) < 0.4).astype(np.int64)
    labels[rng.integers(n), :] = 1
    logits = rng.normal(size=(n, K)) + labels
    return (np.round(logits) if ties else logits).astype(np.float32), labels


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 60), st.integers(2, 8), st.integers(0, 10**6), st.booleans())
def test_against_scikit_learn(n, K, seed, ties) -> None:
    logits, labels = drawn(n, K, seed, ties)
    p = sigmoid(logits)
    for k in range(K):
        assert average_precision(p[:, k], labels[:, k]) == pytest.approx(average_precision_score(labels[:, k], p[:, k]))
    thresholds = best_thresholds(p, labels)
    m = measure_labels(outputs(logits, labels), [str(k) for k in range(K)], thresholds)
    assert m.mean_ap == pytest.approx(average_precision_score(labels, p, average="macro"))
    said = (p >= np.array(thresholds)).astype(int)
    theirs = precision_recall_fscore_support(labels, said, labels=np.arange(K), average=None, zero_division=0)
    for mine, column in zip(("precision", "recall", "f1", "support"), theirs, strict=True):
        assert np.allclose([getattr(row, mine) for row in m.per_class], column)
    assert m.micro_f1 == pytest.approx(f1_score(labels, said, average="micro", zero_division=0))
    assert m.macro_f1 == pytest.approx(f1_score(labels, said, average="macro", zero_division=0))
    assert m.exact == (labels == said).all(1).mean()
    assert m.nll == pytest.approx(sum(log_loss(labels[:, k], p[:, k], labels=[0, 1]) for k in range(K)), rel=1e-6)
    assert m.ci95[0] <= m.ci95[1]
    json.loads(json.dumps(m.to_dict(), allow_nan=False))


def test_ties_do_not_depend_on_the_order() -> None:
    """All probabilities equal: precision is the share of positives, whatever comes first."""
    for y in ([1, 0, 0, 0], [0, 0, 0, 1]):
        assert average_precision(np.full(4, 0.3), np.array(y)) == 0.25
    assert average_precision(np.array([0.9, 0.5, 0.5]), np.array([0, 1, 0])) == pytest.approx(1 / 3)


def test_a_label_without_images_has_no_average_precision() -> None:
    assert average_precision(np.array([0.1, 0.9]), np.zeros(2)) is None
    labels = np.array([[1, 0], [0, 0]])
    m = measure_labels(outputs([[3, 3], [-3, -3]], labels), ["a", "b"], (0.5, 0.5))
    assert m.without == ("b",)
    assert m.per_class[1].ap is None
    assert m.mean_ap == 1.0
    assert m.invented == (("b", 1, 1),)
    with pytest.raises(InputError, match="none of these 2 images has one"):
        measure_labels(outputs([[3, 3], [-3, -3]], np.zeros((2, 2), int)), ["a", "b"], (0.5, 0.5))


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 40), st.integers(0, 10**6), st.booleans())
def test_no_threshold_has_a_higher_f1(n, seed, ties) -> None:
    logits, labels = drawn(n, 1, seed, ties)
    p, y = sigmoid(logits)[:, 0], labels[:, 0]
    chosen = best_threshold(p, y)
    if 0 < y.sum() < n:
        every = [f1_score(y, p >= t, zero_division=0) for t in (*np.unique(p), 2.0)]
        assert f1_score(y, p >= chosen) == pytest.approx(max(every))
        assert chosen not in p
    else:
        assert chosen == 0.5


def test_the_threshold_lies_halfway_and_near_one_half() -> None:
    assert best_threshold(np.array([0.9, 0.7, 0.2]), np.array([1, 1, 0])) == pytest.approx(0.45)
    # Accepting one or all three images of these has the same F1, 2/3: the cut between 0.95 and 0.35 is nearer to 1/2.
    p, y = np.array([0.95, 0.35, 0.30, 0.25]), np.array([1, 0, 0, 1])
    assert best_threshold(p, y) == pytest.approx(0.65)


def test_the_bootstrap_is_that_of_resampled_images() -> None:
    """The interval of mAP against scikit-learn on images drawn with replacement."""
    logits, labels = drawn(80, 3, 5, True)
    m = measure_labels(outputs(logits, labels), "abc", (0.5,) * 3)
    rng, found = np.random.default_rng(1), []
    for _ in range(400):
        rows = rng.integers(0, 80, 80)
        found.append(average_precision_score(labels[rows], sigmoid(logits[rows]), average="macro"))
    assert np.allclose(m.ci95, np.quantile(found, (0.025, 0.975)), atol=0.02)
    assert m.ci95 == measure_labels(outputs(logits, labels), "abc", (0.5,) * 3).ci95


def test_no_mistake_leaves_an_interval() -> None:
    """All resamples of images without a mistake are alike, but other images need not be."""
    labels = np.array([[1, 0], [1, 1], [0, 1], [0, 0], [1, 1]] * 4)
    m = measure_labels(outputs(8 * labels - 4, labels), "ab", (0.5, 0.5))
    assert (m.mean_ap, m.micro_f1, m.per_class[0].ap, m.per_class[0].support) == (1, 1, 1, 12)
    assert m.ci95 == m.micro_f1_ci95 == wilson(1, 20)
    assert m.per_class[0].ap_ci95 == wilson(1, 12)
    m = measure_labels(outputs(4 - 8 * labels, labels), "ab", (0.5, 0.5))
    assert (m.micro_f1, m.micro_f1_ci95) == (0, wilson(0, 20))


def test_the_worst_mistakes_are_farthest_from_their_thresholds() -> None:
    logits = np.array([[4.0, -4.0], [-4.0, -0.1], [0.5, 3.0]])
    labels = np.array([[0, 1], [1, 0], [1, 1]])
    m = measure_labels(outputs(logits, labels), ["cat", "dog"], (0.5, 0.5), worst=2)
    first = m.worst[0]
    assert (first.image, first.label, first.present) == ("0.jpg", "cat", False)
    assert (first.truth, first.predicted) == ("dog", "cat")
    assert [one.label for one in m.worst] == ["cat", "dog"]
    assert m.missed == (("cat", 1, 2), ("dog", 1, 2))
    everything = measure_labels(outputs(logits, labels), ["cat", "dog"], (0.5, 0.5)).worst
    assert len(everything) == 3
    assert everything[2].predicted == "no label"


def test_huge_logits_stay_finite() -> None:
    logits, labels = np.array([[1000.0], [-1000.0]], np.float32), np.array([[1], [0]])
    assert sigmoid(logits).tolist() == [[1.0], [0.0]]
    assert cross_entropy(logits, labels) == 0
    assert cross_entropy(-logits, labels) == 1000
    assert mean_average_precision(sigmoid(logits), labels) == 1
