"""Numbers against scikit-learn and against arithmetic done by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    log_loss,
    precision_recall_fscore_support,
    top_k_accuracy_score,
)

from vitkit.errors import InputError
from vitkit.evaluation.logits import Outputs
from vitkit.evaluation.measure import measure, ranks, reliability, wilson


def outputs(logits, labels) -> Outputs:
    labels = np.asarray(labels)
    return Outputs(
        np.asarray(logits, np.float32), labels, np.arange(len(labels)), tuple(f"{i}.jpg" for i in range(len(labels)))
    )


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 60), st.integers(2, 12), st.integers(0, 10**6))
def test_against_scikit_learn(n, K, seed) -> None:
    rng = np.random.default_rng(seed)
    logits, labels = rng.normal(size=(n, K)).astype(np.float32), rng.integers(0, K, n)
    m = measure(outputs(logits, labels))
    every = np.arange(K)
    assert m.n == n
    assert m.top1 == accuracy_score(labels, logits.argmax(1))
    if K > 5:
        assert m.top5 == top_k_accuracy_score(labels, logits, k=5, labels=every)
    else:
        assert m.top5 == 1
    p, r, f, s = precision_recall_fscore_support(labels, logits.argmax(1), labels=every, zero_division=0)
    for mine, theirs in zip(("precision", "recall", "f1", "support"), (p, r, f, s)):
        assert np.allclose([getattr(row, mine) for row in m.per_class], theirs)
    assert (m.confusion == confusion_matrix(labels, logits.argmax(1), labels=every)).all()
    q = np.exp(logits.astype(float))
    assert m.nll == pytest.approx(log_loss(labels, q / q.sum(1, keepdims=True), labels=every))
    assert sum(count for *_, count in m.confused) <= n * (1 - m.top1) + 1e-9
    assert m.ci95[0] <= m.top1 <= m.ci95[1]
    json.loads(json.dumps(m.to_dict(), allow_nan=False))


def test_top5_is_five() -> None:
    """Truths at ranks 0 to 6 of seven classes: five of seven are in the top five."""
    m = measure(outputs([np.arange(7.0, 0, -1)] * 7, np.arange(7)))
    assert (m.top1, m.top5) == (1 / 7, 5 / 7)
    assert m.top5_ci95 == wilson(5 / 7, 7)
    assert m.ci95 == wilson(1 / 7, 7)


def test_rank_of_equal_logits_is_that_of_the_first() -> None:
    assert ranks(np.array([[1.0, 2, 2], [1, 2, 2], [3, 3, 3]]), np.array([1, 2, 0])).tolist() == [0, 1, 0]
    m = measure(outputs([[0.0, 0], [0, 0]], [0, 1]))
    assert (m.top1, m.confusion.tolist()) == (0.5, [[1, 0], [1, 0]])


def test_calibration_by_hand() -> None:
    confidence, right = np.array([0.95, 0.95, 0.95, 0.95, 0.5, 0.5]), np.array([True, True, True, False, True, False])
    bins = reliability(confidence, right)
    assert [(b.count, round(b.confidence, 6), b.accuracy) for b in bins] == [(2, 0.5, 0.5), (4, 0.95, 0.75)]
    assert all(b.low < b.confidence <= b.high and b.high - b.low == pytest.approx(1 / 15) for b in bins)
    logit = np.log(0.95 / 0.05)
    m = measure(outputs([[logit, 0]] * 4, [0, 0, 0, 1]))
    assert m.ece == pytest.approx(0.2, abs=1e-6)
    assert measure(outputs([[50.0, 0]] * 3, [0, 0, 0])).ece == pytest.approx(0)  # confidence 1 has a bin


def test_the_interval_is_wilson_s() -> None:
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)  # a textbook's example
    for right, n in ((60, 75), (73, 75), (0, 12), (7, 7), (8_000, 10_000), (1, 1)):
        theirs = binomtest(right, n).proportion_ci(method="wilson")
        assert wilson(right / n, n) == pytest.approx((theirs.low, theirs.high), abs=1e-6)


@pytest.mark.parametrize("n", [1, 5, 10, 75, 10_000])
def test_answers_that_are_all_right_or_all_wrong_leave_an_interval(n) -> None:
    """Ten of ten right does not mean that all other images will be."""
    right, wrong = (measure(outputs(np.tile(np.eye(7)[k], (n, 1)), np.zeros(n, int))) for k in (0, 1))
    (low, high), (lowest, highest) = right.ci95, wrong.ci95
    assert (right.top1, high, wrong.top1, lowest) == (1, 1, 0, 0)
    assert low == pytest.approx(n / (n + 1.96**2), abs=1e-4)  # Wilson's, by hand
    assert highest == pytest.approx(1 - low)
    assert right.top5_ci95 == right.ci95
    assert measure(outputs(np.eye(3), [0, 1, 2])).top5_ci95 == (1, 1)  # of three classes it cannot be wrong


def test_worst_errors_come_most_confident_first() -> None:
    m = measure(outputs([[9.0, 0], [1, 0], [0, 3], [5, 0]], [1, 1, 1, 0]), ["cat", "dog"], worst=1)
    assert [(w.image, w.truth, w.predicted) for w in m.worst] == [("0.jpg", "dog", "cat")]
    assert m.worst[0].confidence + m.worst[0].truth_probability == pytest.approx(1)
    assert m.confused == (("dog", "cat", 2),)
    many = measure(outputs(np.tile([1.0, 0], (60, 1)), [1] * 60))
    assert len(many.worst) == 20  # unless told otherwise
    classes = np.roll(np.eye(60), 1, axis=1)  # 60 confusions, of which the 50 largest are listed
    assert len(measure(outputs(classes, np.arange(60))).confused) == 50


def test_many_classes_have_no_matrix_written_out() -> None:
    assert measure(outputs(np.eye(3, 2000), [0, 1, 5])).confusion is not None
    m = measure(outputs(np.eye(3, 2001), [0, 1, 5]))
    assert m.confusion is None
    assert m.to_dict()["confusion"] is None
    assert m.confused == (("5", "2", 1),)
    assert m.macro_f1 == pytest.approx(2 / 3)  # of the classes that have images


@pytest.mark.parametrize(
    ("logits", "labels", "names", "words"),
    [
        ([[0.0, 1]], [2], None, "between 0 and 1"),
        ([[0.0, 1]], [-1], None, "between 0 and 1"),
        ([[0.0, 1]], [0], ["one"], "2 outputs; got 1"),
        (np.zeros((0, 2)), np.zeros(0, int), None, "at least one image"),
    ],
)
def test_what_cannot_be_measured(logits, labels, names, words) -> None:
    with pytest.raises(InputError, match=words):
        measure(outputs(logits, labels), names)
