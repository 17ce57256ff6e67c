"""Logistic regression for several labels per image: one question per label, on standardised features.

Cross-validation on the training images chooses one strength for all labels; the same held-out answers choose each
label's threshold, so no image that judges the result has been used.
Legend: n images, F values per feature, K labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitkit.data.base import folds
from vitkit.evaluation.labels import best_thresholds, cross_entropy, sigmoid
from vitkit.features.head import Head, Standard
from vitkit.features.logistic import STEPS, STRENGTHS
from vitkit.types import Array


def one_vs_rest(X: Array, y: Array, C: float, begin: list[Any] | None = None) -> tuple[Head, list[Any]]:
    """Fit a head at one strength. Return it with scikit-learn's models, which can start the next fit.

    A label that all images have, or none, gets the log-odds of its frequency.

    Args:
        X: [n, F] standardised features.
        y: [n, K] whether each image has each label.
        C: the strength.
        begin: scikit-learn's models from a fit at another strength to start from.
    """
    from sklearn import linear_model

    sklearn: Any = linear_model  # scikit-learn has no type annotations
    n, K = y.shape
    W, b = np.zeros((K, X.shape[1])), np.zeros(K)
    fits = begin or [sklearn.LogisticRegression(max_iter=STEPS, warm_start=True) for _ in range(K)]
    for k, fit in enumerate(fits):
        count = int(y[:, k].sum())
        if 0 < count < n:
            fit.set_params(C=C).fit(X, y[:, k])
            W[k], b[k] = fit.coef_[0], fit.intercept_[0]
        else:
            b[k] = np.log((count + 0.5) / (n - count + 0.5))
    return Head(W, b), fits


def choose(
    X: Array, y: Array, count: int, seed: int, strengths: Sequence[float] = STRENGTHS
) -> tuple[dict[float, float], float, tuple[float, ...]]:
    """Return the held-out cross-entropy of each strength, the best strength, and its thresholds with the highest F1.

    Args:
        X: [n, F] features.
        y: [n, K] whether each image has each label.
        count: number of folds.
        seed: seed of the folds.
        strengths: candidates in increasing order; each fit starts from the one before.
    """
    fold = folds(y, count, seed)
    logits = {C: np.zeros(y.shape) for C in strengths}
    for held in range(count):
        inside, outside, fits = fold != held, fold == held, None
        if not outside.any():
            continue
        scale = Standard.of(X[inside])
        Z, Zt = scale(X[inside]), scale(X[outside])
        for C in strengths:
            head, fits = one_vs_rest(Z, y[inside], C, fits)
            logits[C][outside] = head.logits(Zt)
    losses = {C: cross_entropy(found, y) for C, found in logits.items()}
    best = min(losses, key=lambda C: losses[C])
    return losses, best, best_thresholds(sigmoid(logits[best]), y)
