"""What can be fitted to frozen features: METHODS. Each gives a linear head, and says what it chose and why.

Legend: n images, F numbers of a feature, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitkit.errors import ConfigError, DataError, pick
from vitkit.features import knn, logistic, ridge, sgd
from vitkit.features.head import Head, Standard
from vitkit.model import checks
from vitkit.types import Array

FACTORS = np.logspace(-1, 3, 81)  # by which scores that are no log-probabilities may be multiplied


@dataclass(frozen=True)
class Options:
    """How to fit.

    Args:
        folds: of the cross-validation; fewer where a class has fewer images.
        strength: C of logistic regression; None chooses it by cross-validation.
        seed: of folds, orders and held-out parts.
    """

    folds: int = 5
    strength: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        checks.whole("folds", self.folds, 2)
        checks.whole("seed", self.seed, 0)
        if self.strength is not None:
            checks.number("strength", self.strength, 0, open_low=True)


@dataclass(frozen=True)
class Fitted:
    """What a method made of the training features.

    Args:
        method: a row of METHODS.
        head: linear, over features as they come: what a checkpoint holds.
        scores: features [n, F] -> [n, K] what the method itself answers; the head's logits unless it says otherwise.
        chosen: what was chosen on the training images, as JSON can hold it.
        notes: sentences for the user.
    """

    method: str
    head: Head
    scores: Callable[[Array], Array]
    chosen: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def fit(method: str, X: Array, y: Array, class_names: Sequence[str], options: Options | None = None) -> Fitted:
    """Fit one method to training features.

    Args:
        method: a row of METHODS.
        X: [n, F] features.
        y: [n] classes.
        class_names: of the K classes.
        options: how.

    Raises:
        DataError: one class only, a class without images, or too few of one for what the method must choose.
    """
    row = pick(METHODS, method, "method")
    trainable(y, class_names)
    with logistic.few_threads(X):
        return row(X, y, class_names, options or Options())


def trainable(y: Array, class_names: Sequence[str]) -> None:
    """Refuse what nothing can be learnt from.

    Args:
        y: [n] classes of the training images.
        class_names: of the K classes.
    """
    counts = np.bincount(y, minlength=len(class_names))
    if (counts > 0).sum() < 2:
        what = f"all {len(y)} training images are {class_names[int(counts.argmax())]!r}" if len(y) else "got no images"
        raise DataError(f"A classifier needs images of at least two classes; {what}.")
    if len(empty := np.flatnonzero(counts == 0)):
        raise DataError(
            f"The class {class_names[int(empty[0])]!r} has no training images; add some, or remove the "
            f"class (also from the test part)."
        )


def _folds(y: Array, class_names: Sequence[str], options: Options) -> tuple[int, tuple[str, ...]]:
    counts = np.bincount(y, minlength=len(class_names))
    least = int(counts.argmin())
    if counts[least] < 2:
        raise DataError(
            f"Cross-validation needs at least 2 images of each class; {class_names[least]!r} has 1. Add "
            f"images, or give the strength yourself with --strength (1 is usual)."
        )
    count = min(options.folds, int(counts[least]))
    note = f"{count} folds instead of {options.folds}: {class_names[least]!r} has only {counts[least]} images."
    return count, () if count == options.folds else (note,)


def _logistic(X: Array, y: Array, class_names: Sequence[str], options: Options) -> Fitted:
    notes: tuple[str, ...] = ()
    chosen: dict[str, Any] = {"C": options.strength}
    if options.strength is None:
        count, notes = _folds(y, class_names, options)
        found = logistic.losses(X, y, len(class_names), count, options.seed)
        chosen = {
            "C": min(found, key=lambda C: found[C]),
            "folds": count,
            "held_out_nll": {f"{C:g}": loss for C, loss in found.items()},
        }
    scale = Standard.of(X)
    head = logistic.logistic(scale(X), y, chosen["C"])[0].over(scale)
    return Fitted("logistic", head, head.logits, chosen, notes)


def _sgd(X: Array, y: Array, class_names: Sequence[str], options: Options) -> Fitted:
    if np.bincount(y).min() < 2:
        raise DataError(
            f"--method sgd holds out a tenth to choose its learning rate and needs at least 2 images of "
            f"each class; {class_names[int(np.bincount(y).argmin())]!r} has 1. Use --method logistic."
        )
    head, losses = sgd.sgd(X, y, len(class_names), options.seed)
    chosen = {
        "rate": min(losses, key=lambda rate: losses[rate]),
        "held_out_nll": {f"{rate:g}": loss for rate, loss in losses.items()},
    }
    return Fitted("sgd", head, head.logits, chosen)


def _ridge(X: Array, y: Array, class_names: Sequence[str], options: Options) -> Fitted:
    K, head, factor = len(class_names), ridge.ridge(X, y, len(class_names)), 1.0
    if np.bincount(y).min() >= 2:  # regression values are no log-probabilities: make them as sure as they may be
        count, _ = _folds(y, class_names, options)
        parts = [(ridge.ridge(X[a], y[a], K).logits(X[b]), y[b]) for a, b in logistic.folds(y, count, options.seed)]
        scores, truth = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
        factor = float(min(FACTORS, key=lambda f: logistic.nll(scores * f, truth)))
    head = head.times(factor)
    return Fitted("ridge", head, head.logits, {"l2": ridge.L2, "factor": factor})


def _knn(X: Array, y: Array, class_names: Sequence[str], options: Options) -> Fitted:
    K = len(class_names)
    bank = knn.Neighbours(X, y, K)
    k = bank.best_k(seed=options.seed)
    head = knn.class_means(X, y, K)
    return Fitted(
        "knn",
        head,
        lambda Q: np.log(bank.votes(Q, (k,))[k] + 1e-12),
        {"k": k, "T": knn.T},
        (
            "k-NN keeps images instead of weights, so that no checkpoint can hold it: the one that is saved has "
            "the nearest class mean as its head, and its accuracy stands beside k-NN's.",
        ),
    )


METHODS: dict[str, Callable[[Array, Array, Sequence[str], Options], Fitted]] = {
    "logistic": _logistic,
    "sgd": _sgd,
    "ridge": _ridge,
    "knn": _knn,
}


def several(text: str) -> list[str]:
    """The methods of a list such as `logistic,knn`, each checked.

    Args:
        text: names of METHODS with commas between them.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        pick(METHODS, name, "method")
    if not names:
        raise ConfigError(f"Expected one or more methods ({', '.join(METHODS)}); got {text!r}.")
    return names


def tables(method: str, X: Array, y: Array, Xt: Array, yt: Array, K: int) -> dict[str, Any]:
    """What the method's protocol reports on held-out images beyond one number, as JSON can hold it.

    Args:
        method: a row of METHODS.
        X: [n, F] training features.
        y: [n] their classes.
        Xt: held-out features.
        yt: their classes.
        K: number of classes.
    """
    if method == "ridge":
        return {
            "few_shot": [
                {"shots": row.shots, "accuracies": list(row.accuracies), "mean": float(np.mean(row.accuracies))}
                for row in ridge.few_shot(X, y, Xt, yt, K)
            ]
        }
    if method == "knn":
        found = knn.Neighbours(X, y, K).votes(Xt)
        return {"neighbours": [{"k": k, "top1": float((votes.argmax(1) == yt).mean())} for k, votes in found.items()]}
    return {}
