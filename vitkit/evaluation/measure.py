"""Measures of logits: accuracy with its uncertainty, scores per class, confusion, calibration, and the worst errors.

Legend: N images, K classes. Everything is a function of (logits, labels).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitkit.errors import InputError
from vitkit.evaluation.logits import Outputs
from vitkit.types import Array

BINS = 15  # of the reliability diagram, as in "On Calibration of Modern Neural Networks", arXiv 1706.04599
Z95 = 1.959964  # standard deviations on either side of the mean that hold 95% of a normal distribution
ROWS = 4_096  # processed at once, so that memory stays close to that of the logits
MOST_CLASSES = 2_000  # for which the whole confusion matrix is kept


@dataclass(frozen=True)
class ClassScore:
    """The scores of one class; 0/0 counts as 0, as in scikit-learn."""

    name: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class Bin:
    """The images with a confidence in (low, high]: their mean confidence, and the share that is right."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Wrong:
    """A wrong prediction, with the probabilities of the predicted and of the true class."""

    image: str
    truth: str
    predicted: str
    confidence: float
    truth_probability: float


@dataclass(frozen=True)
class Measures:
    """All measures of one evaluation.

    Args:
        n: number of images.
        top1: share of images whose largest logit is that of the true class.
        top5: share of images whose true class is among the five largest logits (1 for five classes or fewer).
        ci95: 95% interval of top1, see `wilson`.
        top5_ci95: 95% interval of top5.
        nll: mean negative log-probability of the true class.
        ece: expected calibration error, in BINS bins of equal width.
        macro_f1: mean F1 over the classes that have images.
        per_class: one row per class, in the order of the model's outputs.
        confusion: [K, K] counts, true class by predicted class; None for more than MOST_CLASSES classes.
        confused: (true class, predicted class, count), most frequent first.
        reliability: the non-empty bins of the reliability diagram.
        worst: the wrong predictions with the highest confidence.
    """

    n: int
    top1: float
    top5: float
    ci95: tuple[float, float]
    top5_ci95: tuple[float, float]
    nll: float
    ece: float
    macro_f1: float
    per_class: tuple[ClassScore, ...]
    confusion: Array | None
    confused: tuple[tuple[str, str, int], ...]
    reliability: tuple[Bin, ...]
    worst: tuple[Wrong, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        fields = dataclasses.asdict(dataclasses.replace(self, confusion=None))
        return fields | {"confusion": None if self.confusion is None else self.confusion.tolist()}


def measure(outputs: Outputs, class_names: Sequence[str] | None = None, *, worst: int = 20) -> Measures:
    """Measure a model's outputs against the labels.

    Args:
        outputs: logits and labels; a label is the index of an output (see `match_classes`).
        class_names: names of the outputs (default: their indices).
        worst: number of wrong predictions to keep, highest confidence first.
    """
    labels, (N, K) = outputs.labels, outputs.logits.shape
    names = list(class_names) if class_names else [str(k) for k in range(K)]
    if len(names) != K:
        raise InputError(f"Expected one class name for each of the {K} outputs; got {len(names)}.")
    if N == 0 or labels.min() < 0 or labels.max() >= K:
        raise InputError(
            f"Expected at least one image and labels between 0 and {K - 1}; got {N} images"
            + (f" and labels from {labels.min()} to {labels.max()}." if N else ".")
        )
    predicted, rank, confidence, truth = answers(outputs.logits, labels)
    bins = reliability(confidence, rank == 0)
    scores, matrix, pairs = by_class(labels, predicted, names)
    wrong = np.flatnonzero(rank > 0)
    wrong = wrong[np.argsort(-confidence[wrong], kind="stable")][:worst]
    top1, top5 = float((rank == 0).mean()), float((rank < 5).mean())
    return Measures(
        n=N,
        top1=top1,
        top5=top5,
        ci95=wilson(top1, N),
        top5_ci95=wilson(top5, N) if K > 5 else (1.0, 1.0),  # right by definition, on other images too
        nll=float(-truth.mean()),
        ece=sum(b.count * abs(b.accuracy - b.confidence) for b in bins) / N,
        macro_f1=float(np.mean([score.f1 for score in scores if score.support])),
        per_class=scores,
        confusion=matrix,
        confused=pairs,
        reliability=bins,
        worst=tuple(
            Wrong(
                outputs.names[i], names[labels[i]], names[predicted[i]], float(confidence[i]), float(np.exp(truth[i]))
            )
            for i in wrong
        ),
    )


def answers(logits: Array, labels: Array) -> tuple[Array, Array, Array, Array]:
    """Return the predicted class, the rank of the true class, the predicted class's probability and the log of the
    true class's probability for each image; 4 x [N].

    Args:
        logits: [N, K].
        labels: [N].
    """
    parts = []
    for start in range(0, len(labels), ROWS):
        part, label = logits[start : start + ROWS].astype(np.float64), labels[start : start + ROWS]
        said, at = part.argmax(1), np.arange(len(part))
        log_p = part - part.max(1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))  # [ROWS, K]
        parts.append((said, ranks(part, label), np.exp(log_p[at, said]), log_p[at, label]))
    predicted, rank, confidence, truth = (np.concatenate(column) for column in zip(*parts))
    return predicted, rank, confidence, truth


def ranks(logits: Array, labels: Array) -> Array:
    """Return the rank [N] of the true class: 0 if its logit is the largest. Ties go to the lower index.

    Args:
        logits: [N, K].
        labels: [N].
    """
    own = np.take_along_axis(logits, labels[:, None], 1)  # [N, 1]
    before = np.arange(logits.shape[1]) < labels[:, None]
    return ((logits > own) | ((logits == own) & before)).sum(1)


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return the 95% interval of a share of n images (Wilson, 1927).

    Unlike a bootstrap's, it has a width if all n answers are right or all are wrong.

    Args:
        share: the share, from 0 to 1.
        n: number of images.
    """
    z2 = Z95 * Z95 / n
    middle, half = share + z2 / 2, math.sqrt(share * (1 - share) * z2 + z2 * z2 / 4)
    # Rounding must not leave the share itself outside.
    return max(min((middle - half) / (1 + z2), share), 0.0), min(max((middle + half) / (1 + z2), share), 1.0)


def reliability(confidence: Array, right: Array) -> tuple[Bin, ...]:
    """Return the non-empty bins of the reliability diagram.

    Args:
        confidence: [N] probability of the predicted class.
        right: [N] whether the prediction is right.
    """
    place = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    return tuple(
        Bin(
            low=b / BINS,
            high=(b + 1) / BINS,
            count=int(here.sum()),
            confidence=float(confidence[here].mean()),
            accuracy=float(right[here].mean()),
        )
        for b in range(BINS)
        if (here := place == b).any()
    )


def by_class(
    labels: Array,
    predicted: Array,
    names: Sequence[str],
) -> tuple[tuple[ClassScore, ...], Array | None, tuple[tuple[str, str, int], ...]]:
    """Return the scores of each class, the confusion matrix, and its largest off-diagonal entries.

    Args:
        labels: [N] true classes.
        predicted: [N] predicted classes.
        names: names of the K classes.
    """
    K = len(names)
    support, said = np.bincount(labels, minlength=K), np.bincount(predicted, minlength=K)
    right = np.bincount(labels[labels == predicted], minlength=K)
    cells, counts = np.unique(labels.astype(np.int64) * K + predicted, return_counts=True)
    off = cells // K != cells % K
    most = np.argsort(-counts[off], kind="stable")[:50]
    confused = tuple(
        (names[cell // K], names[cell % K], int(count)) for cell, count in zip(cells[off][most], counts[off][most])
    )
    matrix = np.zeros((K, K) if K <= MOST_CLASSES else (0, 0), np.int64)
    if matrix.size:
        matrix.flat[cells] = counts
    scores = tuple(
        ClassScore(
            name=name,
            precision=_share(right[k], said[k]),
            recall=_share(right[k], support[k]),
            f1=_share(2 * right[k], said[k] + support[k]),
            support=int(support[k]),
        )
        for k, name in enumerate(names)
    )
    return scores, matrix if matrix.size else None, confused


def _share(part: int, whole: int) -> float:
    return float(part / whole) if whole else 0.0
