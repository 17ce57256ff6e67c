"""Weighted k-nearest neighbours over cosine similarity: votes of exp(similarity / T), as in "Unsupervised Feature
Learning via Non-Parametric Instance Discrimination" (arXiv 1805.01978) and DINO.

Legend: n images of the bank, m queries, F numbers of a feature, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitkit.features.head import Array, Head

KS = (10, 20, 100, 200)
T = 0.07
CHUNK = 1024        # queries at once: memory is that of [CHUNK, n]


def unit(X: Array) -> Array:
    """Features [n, F] of length one."""
    return X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-12)


class Neighbours:
    """A bank of features that votes.

    Args:
        X: [n, F] features.
        y: [n] classes.
        K: their number.
    """

    def __init__(self, X: Array, y: Array, K: int) -> None:
        self.bank, self.y, self.K = unit(X.astype(np.float64)), y, K

    def votes(self, X: Array, ks: Sequence[int] = KS, *, leave_out: bool = False) -> dict[int, Array]:
        """For each k, each query's share of the votes, [m, K].

        Args:
            X: [m, F] queries.
            ks: numbers of neighbours; more than there are means all.
            leave_out: whether the queries are the bank itself, and no image may vote on itself.
        """
        shares = {k: np.zeros((len(X), self.K)) for k in ks}
        most = min(max(ks), len(self.bank) - leave_out)
        for start in range(0, len(X), CHUNK):
            similarity = unit(X[start:start + CHUNK].astype(np.float64)) @ self.bank.T    # [CHUNK, n]
            if leave_out:
                at = np.arange(len(similarity))
                similarity[at, start + at] = -np.inf
            near = np.argsort(-similarity, axis=1, kind="stable")[:, :most]               # [CHUNK, k]
            weight = np.exp((np.take_along_axis(similarity, near, 1) - 1) / T)
            for k, share in shares.items():
                rows = share[start:start + CHUNK]
                at = np.broadcast_to(np.arange(len(rows))[:, None], near[:, :k].shape)
                np.add.at(rows, (at, self.y[near[:, :k]]), weight[:, :k])
                rows /= rows.sum(1, keepdims=True)
        return shares

    def best_k(self, ks: Sequence[int] = KS) -> int:
        """The k that answers best on the bank itself, each image by the others; the smallest of equal ones."""
        found = self.votes(self.bank, ks, leave_out=True)
        return max(ks, key=lambda k: ((found[k].argmax(1) == self.y).mean(), -k))


def class_means(X: Array, y: Array, K: int) -> Head:
    """The nearest class mean by cosine similarity, as a linear head: what stands in for k-NN in a checkpoint.

    The length of a query scales all its logits alike, so that leaving it out changes no answer.

    Args:
        X: [n, F] features.
        y: [n] classes.
        K: their number.
    """
    means = unit(np.stack([unit(X[y == k].astype(np.float64)).mean(0) for k in range(K)]))
    return Head(means / (T * np.linalg.norm(X, axis=1).mean(dtype=np.float64)), np.zeros(K))
