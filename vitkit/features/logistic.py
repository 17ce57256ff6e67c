"""Logistic regression on standardised features, its strength chosen by cross-validation on the training images.

Legend: n images, F numbers of a feature, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from vitkit.features.head import Head, Standard
from vitkit.types import Array

STRENGTHS = tuple(10.0**e for e in range(-4, 3))  # C of scikit-learn: the larger, the less regularised
STEPS = 1000
SMALL = 4_000_000  # numbers of a matrix that one thread handles faster than several


def folds(y: Array, count: int, seed: int) -> Iterator[tuple[Array, Array]]:
    """(fit, held out) places of a stratified cross-validation.

    Args:
        y: [n] classes.
        count: folds.
        seed: of the shuffle.
    """
    from sklearn import model_selection

    sklearn: Any = model_selection  # it has no types
    yield from sklearn.StratifiedKFold(count, shuffle=True, random_state=seed).split(np.zeros(len(y)), y)


def logistic(X: Array, y: Array, C: float, begin: Any = None) -> tuple[Head, Any]:
    """Fit to features [n, F] at one strength; every class must be there.

    Args:
        X: [n, F] standardised features.
        y: [n] classes.
        C: the strength.
        begin: a fit at another strength to go on from; given back as the second result.
    """
    from sklearn import linear_model

    sklearn: Any = linear_model
    fit = begin if begin is not None else sklearn.LogisticRegression(max_iter=STEPS, warm_start=True)
    fit.set_params(C=C).fit(X, y)
    W, b = fit.coef_, fit.intercept_
    if len(W) == 1:  # two classes share one row: log-odds of the second
        W, b = np.concatenate([-W, W]) / 2, np.concatenate([-b, b]) / 2
    return Head(W.astype(np.float64), b.astype(np.float64)), fit


def few_threads(X: Array) -> AbstractContextManager[Any]:
    """Inside, small matrices are multiplied by one thread: several spend their time waiting for each other.

    Args:
        X: [n, F] features.
    """
    import threadpoolctl  # type: ignore[import-untyped]

    limits: AbstractContextManager[Any] = threadpoolctl.threadpool_limits(1 if X.size < SMALL else None)
    return limits


def losses(
    X: Array,
    y: Array,
    K: int,
    count: int,
    seed: int,
    strengths: Sequence[float] = STRENGTHS,
) -> dict[float, float]:
    """Mean -log probability of the truth on held-out folds, for each strength.

    Args:
        X: [n, F] features.
        y: [n] classes.
        K: their number.
        count: folds.
        seed: of the folds.
        strengths: in rising order; each fit begins at the one before.
    """
    total = dict.fromkeys(strengths, 0.0)
    for inside, outside in folds(y, count, seed):
        scale, fit = Standard.of(X[inside]), None
        Z, Zt = scale(X[inside]), scale(X[outside])
        for C in strengths:
            head, fit = logistic(Z, y[inside], C, fit)
            total[C] += nll(head.logits(Zt), y[outside]) * len(outside) / len(y)
    return total


def nll(logits: Array, y: Array) -> float:
    """Mean -log probability of the truth.

    Args:
        logits: [n, K].
        y: [n].
    """
    top = logits.max(1, keepdims=True)
    return float((np.log(np.exp(logits - top).sum(1)) + top[:, 0] - logits[np.arange(len(y)), y]).mean())
