"""Logistic regression on standardised features, with a strength chosen by cross-validation on the training images.

Legend: n images, F values per feature, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from vitkit.features.head import Head, Standard
from vitkit.types import Array

STRENGTHS = tuple(10.0**e for e in range(-4, 3))  # scikit-learn's C: the larger, the less regularised
STEPS = 1000
SMALL = 4_000_000  # matrices with fewer elements are faster with one thread than with several


def folds(y: Array, count: int, seed: int) -> Iterator[tuple[Array, Array]]:
    """Yield (fit, held-out) positions of a stratified cross-validation.

    Args:
        y: [n] classes.
        count: number of folds.
        seed: seed of the shuffle.
    """
    from sklearn import model_selection

    sklearn: Any = model_selection  # scikit-learn has no type annotations
    yield from sklearn.StratifiedKFold(count, shuffle=True, random_state=seed).split(np.zeros(len(y)), y)


def logistic(X: Array, y: Array, C: float, begin: Any = None, *, balanced: bool = False) -> tuple[Head, Any]:
    """Fit a head at one strength. Return it with scikit-learn's model, which can start the next fit.

    Args:
        X: [n, F] standardised features.
        y: [n] classes; every class must occur.
        C: the strength.
        begin: scikit-learn's model from a fit at another strength to start from.
        balanced: whether every class counts the same, however many images it has.
    """
    from sklearn import linear_model

    sklearn: Any = linear_model
    fit = begin if begin is not None else sklearn.LogisticRegression(max_iter=STEPS, warm_start=True)
    fit.set_params(C=C, class_weight="balanced" if balanced else None).fit(X, y)
    W, b = fit.coef_, fit.intercept_
    if len(W) == 1:  # for two classes scikit-learn has one row, the log-odds of the second
        W, b = np.concatenate([-W, W]) / 2, np.concatenate([-b, b]) / 2
    return Head(W.astype(np.float64), b.astype(np.float64)), fit


def few_threads(X: Array) -> AbstractContextManager[Any]:
    """Limit BLAS to one thread while fitting to a small matrix, on which several threads mostly wait for each other.

    Args:
        X: [n, F] features.
    """
    import threadpoolctl  # type: ignore[import-untyped]

    limits: AbstractContextManager[Any] = threadpoolctl.threadpool_limits(1 if X.size < SMALL else None)
    return limits


def losses(
    X: Array,
    y: Array,
    count: int,
    seed: int,
    strengths: Sequence[float] = STRENGTHS,
) -> dict[float, float]:
    """Return the mean negative log-likelihood on held-out folds for each strength.

    Args:
        X: [n, F] features.
        y: [n] classes.
        count: number of folds.
        seed: seed of the folds.
        strengths: candidates in increasing order; each fit starts from the one before.
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
    """Return the mean negative log-probability of the true classes.

    Args:
        logits: [n, K].
        y: [n].
    """
    top = logits.max(1, keepdims=True)
    return float((np.log(np.exp(logits - top).sum(1)) + top[:, 0] - logits[np.arange(len(y)), y]).mean())
