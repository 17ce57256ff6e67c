"""What to label next: photos that the model is unsure about, and that differ from each other.

Uncertain photos alone are often many views of one thing. So the photos are grouped by k-means, each weighted by its
uncertainty (one minus the margin between its two most probable classes), and of each group the photo closest to its
centre is taken, among those that are at least as uncertain as the group (after arXiv 1901.05954).

Legend: n images, F values per feature, K classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vitkit.errors import ConfigError
from vitkit.features.knn import unit
from vitkit.features.logistic import few_threads
from vitkit.types import Array

POOL = 40  # candidates per photo to choose: the most uncertain ones


def margins(logits: Array) -> Array:
    """Return the difference between the two highest probabilities of each image, [n].

    Args:
        logits: [n, K].
    """
    e = np.exp(logits - logits.max(1, keepdims=True))
    p = np.sort(e / e.sum(1, keepdims=True), axis=1)
    return p[:, -1] - p[:, -2] if p.shape[1] > 1 else np.ones(len(p))


def suggest(X: Array, logits: Array, count: int) -> Array:
    """Return the positions of the photos to label next, the most useful first.

    Args:
        X: [n, F] features.
        logits: [n, K] of the model so far.
        count: number of photos; all of them if there are fewer.

    Raises:
        ConfigError: `count` is less than 1.
    """
    if count < 1:
        raise ConfigError(f"count must be at least 1; got {count}.")
    from sklearn import cluster

    sklearn: Any = cluster  # scikit-learn has no type annotations
    unsure = 1 - margins(logits)
    pool = np.argsort(-unsure, kind="stable")[: POOL * count]
    _, first = np.unique(unit(X[pool].astype(np.float32)), axis=0, return_index=True)  # of copies, the most uncertain
    pool = np.concatenate([pool[np.sort(first)], np.delete(pool, first)])
    groups, U = min(count, len(first)), unit(X[pool[: len(first)]].astype(np.float64))
    weight = unsure[pool[: len(first)]] + 1e-6
    with few_threads(U):
        found = sklearn.KMeans(groups, n_init=1, random_state=0).fit(U, sample_weight=weight)
    off = np.square(U - found.cluster_centers_[found.labels_]).sum(1)
    chosen = []
    for group in range(groups):
        members = np.flatnonzero(found.labels_ == group)
        least = np.average(weight[members], weights=weight[members]) * (1 - 1e-9)
        members = members[weight[members] >= least]
        chosen.append(int(members[off[members].argmin()]))
    chosen.sort(key=lambda i: -weight[i])
    rest = [i for i in range(len(pool)) if i not in set(chosen)]  # copies, if there are not enough others
    return pool[[*chosen, *rest][:count]]
