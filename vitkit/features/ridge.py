"""Few-shot evaluation as in the paper (section 4.1): regularised least squares from frozen features to {-1, +1}^K, in
closed form. The details are those of the authors' code: standardise, append a large constant as bias, l2 = 2^10.

Legend: n images, F values per feature, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitkit.data.order import rng
from vitkit.features.head import Head, Standard
from vitkit.types import Array

BIAS = 100.0  # the constant feature; it is so large that the bias is hardly regularised
L2 = 2.0**10
SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)


def ridge(X: Array, y: Array, K: int, l2: float = L2) -> Head:
    """Return the head over raw features that minimises |X W - Y|^2 + l2 |W|^2, where X is standardised.

    Args:
        X: [n, F] features.
        y: [n] classes.
        K: number of classes.
        l2: strength of the regularisation.
    """
    scale = Standard.of(X)
    A = np.concatenate([scale(X), np.full((len(X), 1), BIAS)], 1)  # [n, F + 1]
    Y = 2.0 * (y[:, None] == np.arange(K)) - 1.0  # [n, K]
    if A.shape[0] >= A.shape[1]:  # the smaller of A'A and AA': both give the same W
        W = solve(A.T @ A, A.T @ Y, l2)
    else:
        W = A.T @ solve(A @ A.T, Y, l2)
    return Head(W[:-1].T, BIAS * W[-1]).over(scale)


def solve(S: Array, B: Array, l2: float) -> Array:
    """Return (S + l2 I)^-1 B for a symmetric S, by its eigendecomposition.

    Args:
        S: [m, m].
        B: [m, K].
        l2: added to the diagonal.
    """
    e, Q = np.linalg.eigh(S)
    return Q @ ((Q.T @ B) / (e[:, None] + l2))


@dataclass(frozen=True)
class FewShot:
    """The accuracies for one number of images per class, one for each seed."""

    shots: int
    accuracies: tuple[float, ...]


def few_shot(
    X: Array, y: Array, Xt: Array, yt: Array, K: int, shots: Sequence[int] = SHOTS, seeds: Sequence[int] = SEEDS
) -> list[FewShot]:
    """Fit to a few images per class and measure the accuracy on held-out images.

    Args:
        X: [n, F] training features.
        y: [n] their classes.
        Xt: held-out features.
        yt: their classes.
        K: number of classes.
        shots: numbers of images per class; those that some class cannot supply are left out.
        seeds: each selects different images.
    """
    rows = []
    for count in shots:
        if np.bincount(y, minlength=K).min() >= count:
            heads = [ridge(X[chosen], y[chosen], K) for chosen in (draw(y, K, count, seed) for seed in seeds)]
            rows.append(FewShot(count, tuple(float((h.logits(Xt).argmax(1) == yt).mean()) for h in heads)))
    return rows


def draw(y: Array, K: int, count: int, seed: int) -> Array:
    """Select `count` images of each class and return their positions.

    Args:
        y: [n] classes.
        K: number of classes.
        count: images per class.
        seed: seed of the selection.
    """
    return np.concatenate([rng(seed, "split", k, count).permutation(np.flatnonzero(y == k))[:count] for k in range(K)])
