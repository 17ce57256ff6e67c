"""Fit what a classifier knows to training features, and choose the limit by cross-validation (see model/known.py).

Legend: n images, F values per feature, K classes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import DataError
from vitkit.features.head import Standard
from vitkit.features.labels import FOLDS, folds_of
from vitkit.model import checks
from vitkit.model.config import InputSpec
from vitkit.model.known import Known
from vitkit.types import Array

AXES = 32  # directions whose variance is kept
SHRINK = 0.5  # weight of the mean variance in every variance: few images say little about 32 directions


def fit(X: Array, y: Array, spec: InputSpec, accept: float = 0.95, seed: int = 0) -> Known:
    """Fit the known classes, with a limit that accepts a share of known images.

    Args:
        X: [n, F] features.
        y: [n] classes, all of which occur.
        spec: the preprocessing that the features were computed with.
        accept: share of known images to accept, between 0 and 1.
        seed: seed of the folds.

    Raises:
        DataError: too few images to hold any out.
    """
    checks.number("accept", accept, 0, 1, open_low=True)
    fold, held = folds_of(X, y, seed), list[Array]()
    for k in range(FOLDS):
        inside = fold != k
        outside = (fold == k) & np.isin(y, np.unique(y[inside]))
        if inside.sum() > 1 and outside.any():
            held.append(distances(_gaussians(X[inside], y[inside], spec), X[outside]))
    if not held:
        raise DataError("Expected at least two images of a class, to choose what is accepted by cross-validation.")
    limit = float(np.quantile(np.concatenate(held), accept, method="higher"))
    return _gaussians(X, y, spec, max(limit, 1e-6), accept)


def distances(known: Known, X: Array) -> Array:
    """Return the squared distance of features [n, F] to the nearest class, [n]."""
    parts = np.array_split(X.astype(np.float32), max(1, -(-len(X) * len(known.means) // 65536)))
    return np.concatenate([known.distance(torch.from_numpy(part)).numpy() for part in parts])


def _gaussians(X: Array, y: Array, spec: InputSpec, limit: float = 1.0, accept: float = 1.0) -> Known:
    scale = Standard.of(X)
    Z = scale(X)
    present, numbers = np.unique(y, return_inverse=True)
    means = np.stack([Z[y == k].mean(0) for k in present])
    within = Z - means[numbers]
    F, total = X.shape[1], np.square(within).sum() / len(X)  # total variance within the classes
    _, singular, axes = np.linalg.svd(within, full_matrices=False)
    r = min(AXES, len(singular), F - 1)
    variance = np.square(singular[:r]) / len(X)
    usual = max(total / F, 1e-6)
    rest = (1 - SHRINK) * max(total - variance.sum(), 0.0) / (F - r) + SHRINK * usual

    def tensor(values: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.float32))

    return Known(
        centre=tensor(scale.m),
        scale=tensor(scale.s),
        means=tensor(means),
        axes=tensor(axes[:r]),
        spread=tensor((1 - SHRINK) * variance + SHRINK * usual),
        rest=float(rest),
        limit=limit,
        accept=accept,
        preprocessing=spec.preprocessing,
    )
