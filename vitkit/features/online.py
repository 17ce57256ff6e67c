"""Ridge regression that keeps up with a person: photos come and go, and every answer is exact at once.

It is the classifier of `ridge.py`. Its inverse is updated (Woodbury) instead of being computed again, and also gives
what the classifier would say about each photo if it had not been fitted to it.

Legend: n photos, F values per feature, K classes, k photos added or removed at once, G a group of photos.
    A [n, F + 1]   standardised features and the constant of the bias
    P = (A'A + l2 I)^-1    B = A P    W = P A'Y = B'Y    H = A P A' = B A'
    Z [k, F + 1] added:    P - U (I + Z U)^-1 U'    with U = P Z'    (removed: both signs change)
    G left out:            Y_G - (I - H_GG)^-1 (Y - A W)_G
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vitkit.features.head import Head, Standard
from vitkit.features.ridge import BIAS, L2
from vitkit.types import Array

STRENGTHS = tuple(2.0**e for e in (8, 10, 12, 14, 16))  # candidates for l2; fewer than 256 fits wrong labels
FACTORS = np.logspace(-1, 2, 46)  # candidates for the scale of the scores, which are not log-probabilities
FACTOR = 5.0  # until there are enough photos to choose
ROWS = 256  # of a large product at a time, so that what it makes stays in the cache
ENOUGH = 4  # photos of every class that a choice needs


@dataclass(frozen=True)
class Choices:
    """What is fixed while photos come and go, and is chosen anew in the background.

    Args:
        scale: mean and standard deviation of the features.
        l2: strength of the regularisation.
        factor: multiplies the scores, so that their softmax is calibrated.
    """

    scale: Standard
    l2: float = L2
    factor: float = FACTOR


@dataclass(frozen=True)
class Taught:
    """A classifier with the photos that it was fitted to, ready to be saved.

    Args:
        names: names of the classes, in the order of their folders.
        head: the classifier, over raw features; its rows are `names`.
        images: path of each photo below the folder of photos.
        labels: [n] their classes.
        logits: [n, K] of each photo from a classifier that was fitted without it.
        chosen: settings of the classifier.
        seconds: time for choosing the settings and fitting.
    """

    names: tuple[str, ...]
    head: Head
    images: tuple[str, ...]
    labels: Array
    logits: Array
    chosen: dict[str, float]
    seconds: float


class OnlineRidge:
    """The photos and the inverse that belongs to them.

    Args:
        choices: scale and strength.
        keys: the name of each photo.
        X: [n, F] features.
    """

    def __init__(self, choices: Choices, keys: Sequence[str], X: Array) -> None:
        self.choices, self.keys = choices, list(keys)
        self._A = np.zeros((_room(len(keys)), X.shape[1] + 1))  # with room for more photos
        self._B = np.zeros_like(self._A)
        self.A[:] = _columns(choices.scale, X)
        self._rebuild()

    @property
    def A(self) -> Array:
        """[n, F + 1] standardised features and the bias."""
        return self._A[: len(self.keys)]

    @property
    def B(self) -> Array:
        """[n, F + 1] A P."""
        return self._B[: len(self.keys)]

    def _rebuild(self) -> None:
        self.P = np.linalg.inv(self.A.T @ self.A + self.choices.l2 * np.eye(self.A.shape[1]))
        np.matmul(self.A, self.P, out=self.B)

    def add(self, keys: Sequence[str], X: Array) -> None:
        """Add photos at the end.

        Args:
            keys: the name of each.
            X: [k, F] features.
        """
        Z, old = _columns(self.choices.scale, X), len(self.keys)
        self.keys += keys
        if len(self.keys) > len(self._A):
            room = np.zeros((_room(len(self.keys)) - old, Z.shape[1]))
            self._A, self._B = (np.concatenate([full[:old], room]) for full in (self._A, self._B))
        self.A[old:], self.B[old:] = Z, Z @ self.P
        self._update(Z, 1.0)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove photos; others take their places, so that nothing else moves.

        Args:
            keys: the name of each.
        """
        gone = {self.keys.index(key) for key in keys}
        Z, left = self.A[sorted(gone)], len(self.keys) - len(gone)
        holes, fill = sorted(i for i in gone if i < left), [i for i in range(left, len(self.keys)) if i not in gone]
        self._A[holes], self._B[holes] = self._A[fill], self._B[fill]
        for hole, i in zip(holes, fill, strict=True):
            self.keys[hole] = self.keys[i]
        del self.keys[left:]
        self._update(Z, -1.0)

    def _update(self, Z: Array, sign: float) -> None:
        if len(Z) > Z.shape[1] // 4:  # the inverse itself is less work
            self._rebuild()
            return
        U = self.P @ Z.T  # [F + 1, k]
        D = np.linalg.solve(sign * np.eye(len(Z)) + Z @ U, U.T)  # [k, F + 1]
        self.P -= U @ D
        for start in range(0, len(self.keys), ROWS):
            part = slice(start, start + ROWS)
            self.B[part] -= (self.A[part] @ U) @ D

    def answers(self, y: Array, K: int, groups: Array) -> tuple[Head, Array]:
        """Return the head over raw features, and the logits [n, K] of each photo with its group left out.

        Args:
            y: [n] classes, in the order of `keys`.
            K: number of classes.
            groups: [n] photos with the same number are left out together.
        """
        Y = targets(y, K)
        W = self.B.T @ Y  # [F + 1, K]
        head = Head(W[:-1].T, BIAS * W[-1]).over(self.choices.scale).times(self.choices.factor)
        return head, self.choices.factor * _left_out(self.A, self.B, Y, self.A @ W, groups)


def use_one_thread() -> None:
    """Give numpy's linear algebra one thread for the rest of this process.

    With several, each of its steps waits for all of them, and next to a busy model one of them always comes late.
    torch has threads of its own.
    """
    import threadpoolctl  # type: ignore[import-untyped]

    threadpoolctl.threadpool_limits(1, user_api="blas")


def choose(X: Array, y: Array, K: int, groups: Array) -> Choices:
    """Choose scale, strength and factor by the exact leave-one-out; the defaults where a class has too few photos.

    Args:
        X: [n, F] features.
        y: [n] classes.
        K: number of classes, all of which occur.
        groups: [n] photos with the same number are left out together.
    """
    scale = Standard.of(X)
    if np.bincount(y, minlength=K).min() < ENOUGH:
        return Choices(scale)
    A, Y = _columns(scale, X), targets(y, K)
    if len(A) < A.shape[1]:  # V e V' = A A', from the smaller of the two products
        e, V = np.linalg.eigh(A @ A.T)
    else:
        e, Q = np.linalg.eigh(A.T @ A)
        V = A @ Q / np.sqrt(np.maximum(e, 1e-9))
    T, VY = _smoothed(y, K), V.T @ Y
    found = []
    for l2 in STRENGTHS:
        shrink = np.maximum(e, 0) / (np.maximum(e, 0) + l2)
        scores = _left_out(V, V * shrink, Y, V @ (shrink[:, None] * VY), groups)
        found.append(min((_cross_entropy(factor * scores, T), l2, factor) for factor in FACTORS))
    _, l2, factor = min(found, key=lambda row: (row[0], -row[1]))
    return Choices(scale, l2, float(factor))


def targets(y: Array, K: int) -> Array:
    """Return the targets of the regression: 1 for a photo's class and -1 for the others, [n, K]."""
    return 2.0 * (y[:, None] == np.arange(K)) - 1.0


def softmax(logits: Array) -> Array:
    """Return the probabilities [n, K] of logits [n, K]."""
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def _room(n: int) -> int:
    return n + n // 2 + 64


def _columns(scale: Standard, X: Array) -> Array:
    return np.concatenate([scale(X), np.full((len(X), 1), BIAS)], 1)


def _left_out(A: Array, B: Array, Y: Array, f: Array, groups: Array) -> Array:
    """Scores with each group left out, where H = B A' and f are the scores with all photos."""
    out = Y - (Y - f) / (1 - np.einsum("nf,nf->n", A, B))[:, None]
    for G in _together(groups):
        out[G] = Y[G] - np.linalg.solve(np.eye(len(G)) - B[G] @ A[G].T, Y[G] - f[G])
    return out


def _together(groups: Array) -> Iterable[Array]:
    """The positions of each group of two or more photos."""
    numbers, counts = np.unique(groups, return_counts=True)
    return (np.flatnonzero(groups == number) for number in numbers[counts > 1])


def _smoothed(y: Array, K: int) -> Array:
    """Target probabilities [n, K], as Platt's: a few photos without an error do not justify probabilities of 1."""
    doubt = 1 / (np.bincount(y, minlength=K)[y] + 2)
    T = np.repeat((doubt / (K - 1))[:, None], K, axis=1)
    T[np.arange(len(y)), y] = 1 - doubt
    return T


def _cross_entropy(logits: Array, T: Array) -> float:
    top = logits.max(1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    return float(-(T * log_p).sum(1).mean())
