"""k-nearest neighbours by cosine similarity with votes weighted by exp(similarity / T), as in "Unsupervised Feature
Learning via Non-Parametric Instance Discrimination" (arXiv 1805.01978) and DINO.

Legend: n images in the bank, m queries, F values per feature, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitkit.data.order import rng
from vitkit.features.head import Head
from vitkit.types import Array

KS = (10, 20, 100, 200)
T = 0.07
NUMBERS = 2**25  # similarities to hold at once
JUDGES = 5_000  # maximum number of images of the bank that k is chosen with


def unit(X: Array) -> Array:
    """Scale features [n, F] to length one."""
    return X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-12)


class Neighbours:
    """A bank of labelled features that vote on queries.

    Args:
        X: [n, F] features.
        y: [n] classes.
        K: number of classes.
    """

    def __init__(self, X: Array, y: Array, K: int) -> None:
        self.bank, self.y, self.K = unit(X), y, K

    def votes(self, X: Array, ks: Sequence[int] = KS, *, own: Array | None = None) -> dict[int, Array]:
        """Return for each k the share of the votes that each class gets, [m, K].

        Args:
            X: [m, F] queries.
            ks: numbers of neighbours; if the bank is smaller, all of it votes.
            own: [m] positions of the queries in the bank, so that none votes on itself.
        """
        shares = {k: np.zeros((len(X), self.K)) for k in ks}
        most = min(max(ks), len(self.bank) - (own is not None))
        rows = max(1, NUMBERS // len(self.bank))
        for start in range(0, len(X), rows):
            similarity = unit(X[start : start + rows]) @ self.bank.T  # [rows, n]
            at = np.arange(len(similarity))[:, None]
            if own is not None:
                similarity[at[:, 0], own[start : start + rows]] = -np.inf
            near = np.argpartition(-similarity, most - 1, axis=1)[:, :most]
            near = near[at, np.argsort(-similarity[at, near], axis=1, kind="stable")]  # [rows, most], nearest first
            weight = np.exp((similarity[at, near].astype(np.float64) - 1) / T)
            for k, share in shares.items():
                part = share[start : start + rows]
                np.add.at(part, (at, self.y[near[:, :k]]), weight[:, :k])
                part /= part.sum(1, keepdims=True)
        return shares

    def best_k(self, ks: Sequence[int] = KS, seed: int = 0) -> int:
        """Return the k with the highest leave-one-out accuracy on the bank; ties go to the smallest.

        Args:
            ks: candidates.
            seed: selects JUDGES images of a larger bank.
        """
        own = np.sort(rng(seed, "split", len(self.y)).permutation(len(self.y))[:JUDGES])
        found = self.votes(self.bank[own], ks, own=own)
        return max(ks, key=lambda k: ((found[k].argmax(1) == self.y[own]).mean(), -k))


def class_means(X: Array, y: Array, K: int) -> Head:
    """Return the nearest-class-mean classifier by cosine similarity, which replaces k-NN in a checkpoint.

    The queries are not normalised: the length of a query scales all its logits alike and changes no answer.

    Args:
        X: [n, F] features.
        y: [n] classes.
        K: number of classes.
    """
    means = unit(np.stack([unit(X[y == k].astype(np.float64)).mean(0) for k in range(K)]))
    return Head(means / (T * np.linalg.norm(X, axis=1).mean(dtype=np.float64)), np.zeros(K))
