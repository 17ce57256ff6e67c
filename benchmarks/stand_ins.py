"""What `benchmarks.tasks` needs of scikit-learn and threadpoolctl, for a machine that has neither.

Logistic regression has one solution, so a solver of our own finds what scikit-learn's does, up to its tolerance;
tests/test_tasks.py compares them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from vitkit.types import Array


class LogisticRegression:
    """Multinomial logistic regression: minimises C sum_i w_i loss_i + |W|^2 / 2 by L-BFGS in float64.

    Args:
        C: the strength; the larger, the less regularised.
        max_iter: largest number of steps.
        warm_start: whether `fit` starts from the last solution.
        class_weight: `balanced` or None.
    """

    def __init__(
        self, C: float = 1.0, max_iter: int = 100, warm_start: bool = False, class_weight: str | None = None
    ) -> None:
        self.C, self.max_iter, self.warm_start, self.class_weight = C, max_iter, warm_start, class_weight

    def set_params(self, **given: Any) -> LogisticRegression:
        """Set some of the arguments."""
        vars(self).update(given)
        return self

    def fit(self, X: Array, y: Array) -> LogisticRegression:
        """Fit to features [n, F] and classes [n]."""
        import torch

        self.classes_, number = np.unique(y, return_inverse=True)
        n, K = len(y), len(self.classes_)
        if K == 2:
            raise NotImplementedError("The stand-in has more than two classes.")
        weight = n / (K * np.bincount(number))[number] if self.class_weight == "balanced" else np.ones(n)
        Z = torch.cat([torch.from_numpy(np.asarray(X, np.float64)), torch.ones(n, 1, dtype=torch.float64)], 1)
        t, w = torch.from_numpy(number), torch.from_numpy(weight)
        W = torch.zeros(K, Z.shape[1], dtype=torch.float64)
        if self.warm_start and hasattr(self, "coef_"):
            W = torch.from_numpy(np.concatenate([self.coef_, self.intercept_[:, None]], 1))
        W = W.clone().requires_grad_(True)
        solver = torch.optim.LBFGS(
            [W], max_iter=self.max_iter, tolerance_grad=1e-5, tolerance_change=1e-10, line_search_fn="strong_wolfe"
        )

        def loss() -> Any:
            solver.zero_grad()
            each = torch.nn.functional.cross_entropy(Z @ W.T, t, reduction="none")
            total = (w * each).sum() / n + (W[:, :-1] ** 2).sum() / (2 * self.C * n)
            total.backward()
            return total

        solver.step(loss)
        found = W.detach().numpy()
        self.coef_, self.intercept_ = found[:, :-1].copy(), found[:, -1].copy()
        return self

    def predict_proba(self, X: Array) -> Array:
        """Return the probabilities of the classes, [n, K]."""
        z = X @ self.coef_.T + self.intercept_
        e = np.exp(z - z.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    def predict(self, X: Array) -> Array:
        """Return the classes, [n]."""
        return self.classes_[(X @ self.coef_.T + self.intercept_).argmax(1)]


class StratifiedKFold:
    """Folds with the same share of every class, shuffled.

    Args:
        n_splits: number of folds.
        shuffle: must be True.
        random_state: the seed.
    """

    def __init__(self, n_splits: int = 5, shuffle: bool = True, random_state: int = 0) -> None:
        self.n_splits, self.random_state = n_splits, random_state

    def split(self, X: Array, y: Array) -> Iterator[tuple[Array, Array]]:
        """Yield (fit, held-out) positions."""
        rng, fold, start = np.random.default_rng(self.random_state), np.empty(len(y), np.int64), 0
        for k in np.unique(y):
            of_class = rng.permutation(np.flatnonzero(y == k))
            fold[of_class] = (start + np.arange(len(of_class))) % self.n_splits
            start += len(of_class)
        for k in range(self.n_splits):
            yield np.flatnonzero(fold != k), np.flatnonzero(fold == k)


def install() -> list[str]:
    """Put the stand-ins in the place of libraries that are missing; return the names of these."""
    missing = []
    if importlib.util.find_spec("sklearn") is None:
        missing.append("sklearn")
        package, linear, selection = (
            ModuleType(name) for name in ("sklearn", "sklearn.linear_model", "sklearn.model_selection")
        )
        linear.LogisticRegression = LogisticRegression  # type: ignore[attr-defined]
        selection.StratifiedKFold = StratifiedKFold  # type: ignore[attr-defined]
        package.linear_model, package.model_selection = linear, selection  # type: ignore[attr-defined]
        package.__path__ = []  # type: ignore[attr-defined]
        sys.modules |= {module.__name__: module for module in (package, linear, selection)}
    if importlib.util.find_spec("threadpoolctl") is None:
        missing.append("threadpoolctl")
        control = ModuleType("threadpoolctl")
        control.threadpool_limits = lambda limits=None: nullcontext()  # type: ignore[attr-defined]
        sys.modules["threadpoolctl"] = control
    return missing
