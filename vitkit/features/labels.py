"""Suspected wrong labels: how probable an image's label is for a classifier that was not fitted to the image.

Logistic regression is cross-validated on frozen features; the probability that it gives to the label of a held-out
image is the image's self-confidence (as in "Confident Learning", arXiv 1911.00068). The least confident come first.

Legend: n images, F values per feature, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vitkit.data.order import rng
from vitkit.errors import DataError
from vitkit.features import logistic
from vitkit.features.head import Standard
from vitkit.types import Array

FOLDS = 5
STRENGTHS = logistic.STRENGTHS[:-1]  # the weakest regularisation would fit wrong labels
JUDGES = 5_000  # maximum number of images that the strength is chosen with


@dataclass(frozen=True)
class Ranking:
    """Images by how doubtful their labels are.

    Args:
        order: [m] positions of the images that could be judged, the most doubtful first.
        confidence: [n] probability of each image's own label; NaN if its class has no other image.
        suggested: [n] the most probable class of each image.
        strength: C of the logistic regression, chosen by cross-validation.
    """

    order: Array
    confidence: Array
    suggested: Array
    strength: float

    def suspects(self, y: Array) -> Array:
        """Return the positions of images for which another class is more probable, the most doubtful first.

        Args:
            y: [n] classes.
        """
        return self.order[self.suggested[self.order] != y[self.order]]


def rank(X: Array, y: Array, seed: int = 0) -> Ranking:
    """Rank images by how doubtful their labels are.

    Args:
        X: [n, F] features.
        y: [n] classes; classes without images are allowed.
        seed: seed of the folds.

    Raises:
        DataError: fewer than two classes have two images.
    """
    if (np.bincount(y) > 1).sum() < 2:
        raise DataError("Expected at least two classes with two images each, to judge labels by cross-validation.")
    with logistic.few_threads(X):
        some = np.sort(rng(seed, "split", len(y)).permutation(len(y))[:JUDGES])
        losses = dict.fromkeys(STRENGTHS, 0.0)
        for C, held, p in _held_out(X[some], y[some], STRENGTHS, seed):
            own = p[np.arange(len(held)), y[some][held]]
            losses[C] -= float(np.log(np.maximum(own[np.isfinite(own)], 1e-12)).sum())
        best = min(losses, key=lambda C: losses[C])
        confidence, suggested = np.full(len(y), np.nan), y.astype(np.int64)
        for _, held, p in _held_out(X, y, (best,), seed):
            confidence[held] = p[np.arange(len(held)), y[held]]
            suggested[held] = np.nanargmax(p, axis=1)
    order = np.argsort(confidence, kind="stable")  # NaN last
    return Ranking(order[: np.isfinite(confidence).sum()], confidence, suggested, best)


def _held_out(X: Array, y: Array, strengths: tuple[float, ...], seed: int) -> Iterator[tuple[float, Array, Array]]:
    """Yield (strength, held-out positions, their probabilities [m, K]); NaN for a class that was not fitted."""
    fold = folds_of(X, y, seed)
    for k in range(FOLDS):
        inside, held = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        present, numbers = np.unique(y[inside], return_inverse=True)
        if not len(held) or len(present) < 2:
            continue
        scale, fit = Standard.of(X[inside]), None
        Z, Zt = scale(X[inside]), scale(X[held])
        for C in strengths:
            head, fit = logistic.logistic(Z, numbers, C, fit)
            p = np.full((len(held), int(y.max()) + 1), np.nan)
            p[:, present] = _softmax(head.logits(Zt))
            yield C, held, p


def folds_of(X: Array, y: Array, seed: int) -> Array:
    """Return the fold of each image, [n]: each class is spread over all folds, and copies of an image stay together.

    Args:
        X: [n, F] features; equal rows are copies.
        y: [n] classes.
        seed: seed of the shuffle.
    """
    fold, next_fold, of_image = np.zeros(len(y), np.int64), 0, dict[bytes, int]()
    for k in np.unique(y):
        for i in rng(seed, "split", int(k)).permutation(np.flatnonzero(y == k)):
            key = X[i].tobytes()
            if key not in of_image:
                of_image[key], next_fold = next_fold, (next_fold + 1) % FOLDS
            fold[i] = of_image[key]
    return fold


def _softmax(logits: Array) -> Array:
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)
