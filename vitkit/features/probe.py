"""METHODS: the classifiers that can be fitted to frozen features. Each returns a linear head and what it chose.

Legend: n images, F values per feature, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitkit.errors import ConfigError, DataError, pick
from vitkit.features import knn, logistic, one_vs_rest, ridge, sgd
from vitkit.features.head import Head, Standard
from vitkit.model import checks
from vitkit.types import Array

FACTORS = np.logspace(-1, 3, 81)  # candidates for the scale of ridge's scores, which are not log-probabilities


@dataclass(frozen=True)
class Options:
    """How to fit.

    Args:
        folds: folds of the cross-validation; fewer if a class has fewer images.
        strength: C of logistic regression; None chooses it by cross-validation.
        seed: seed of the folds, the order of images and the held-out images.
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
    """A method fitted to training features.

    Args:
        method: a row of METHODS.
        head: linear head over raw features, to be saved in a checkpoint.
        scores: maps features [n, F] to the method's own scores [n, K]; these are the head's logits except for k-NN.
        chosen: what was chosen on the training images, as JSON values.
        notes: messages for the user.
        thresholds: for several labels per image, the probability from which each counts as present, chosen on the
            training images by cross-validation; empty for classes.
    """

    method: str
    head: Head
    scores: Callable[[Array], Array]
    chosen: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    thresholds: tuple[float, ...] = ()


def fit(method: str, X: Array, y: Array, class_names: Sequence[str], options: Options | None = None) -> Fitted:
    """Fit one method to training features.

    Args:
        method: a row of METHODS.
        X: [n, F] features.
        y: [n] classes; or, for several labels per image, [n, K] zeros and ones, which only `logistic` fits.
        class_names: names of the K classes.
        options: how to fit.

    Raises:
        DataError: fewer than two classes, or a class without enough images.
        ConfigError: the method cannot fit several labels per image.
    """
    row = pick(METHODS, method, "method")
    check_trainable(y, class_names)
    if y.ndim == 2:
        check_labels(method)
        row = _one_vs_rest
    with logistic.few_threads(X):
        return row(X, y, class_names, options or Options())


def check_trainable(y: Array, class_names: Sequence[str]) -> None:
    """Raise DataError unless there are at least two classes and each has training images.

    Args:
        y: [n] classes of the training images; with several labels per image, [n, K], and each label needs two images.
        class_names: names of the K classes.
    """
    if y.ndim == 2:
        found = y.sum(0, dtype=int)
        if found.min(initial=2) < 2:
            raise DataError(
                f"Expected at least 2 training images with each label; {class_names[int(found.argmin())]!r} has "
                f"{found.min()}. Add images, or remove the label."
            )
        return
    counts = np.bincount(y, minlength=len(class_names))
    if (counts > 0).sum() < 2:
        what = f"all {len(y)} are {class_names[int(counts.argmax())]!r}" if len(y) else "got no images"
        raise DataError(f"Expected training images of at least two classes; {what}.")
    if len(empty := np.flatnonzero(counts == 0)):
        raise DataError(
            f"Expected training images of every class; {class_names[int(empty[0])]!r} has none. Add some, or remove "
            f"the class (also from the test part)."
        )


def check_labels(method: str) -> None:
    """Raise ConfigError if a method cannot fit several labels per image."""
    if method != "logistic":
        raise ConfigError(
            f"The method {method} names one class per image, and this data has several labels per image; use --method "
            f"logistic."
        )


def _one_vs_rest(X: Array, y: Array, class_names: Sequence[str], options: Options) -> Fitted:
    strengths = logistic.STRENGTHS if options.strength is None else (options.strength,)
    count = min(options.folds, len(y))
    losses, C, thresholds = one_vs_rest.choose(X, y, count, options.seed, strengths)
    chosen = {"C": C, "folds": count, "held_out_nll": {f"{one:g}": loss for one, loss in losses.items()}}
    scale = Standard.of(X)
    head = one_vs_rest.one_vs_rest(scale(X), y, C)[0].over(scale)
    return Fitted("logistic", head, head.logits, chosen, (), thresholds)


def _folds(y: Array, class_names: Sequence[str], options: Options) -> tuple[int, tuple[str, ...]]:
    counts = np.bincount(y, minlength=len(class_names))
    least = int(counts.argmin())
    if counts[least] < 2:
        raise DataError(
            f"Expected at least 2 images of each class for cross-validation; {class_names[least]!r} has 1. Add "
            f"images, or set the strength with --strength (1 is common)."
        )
    count = min(options.folds, int(counts[least]))
    note = f"Using {count} folds instead of {options.folds}: {class_names[least]!r} has only {counts[least]} images."
    return count, () if count == options.folds else (note,)


def _logistic(X: Array, y: Array, class_names: Sequence[str], options: Options) -> Fitted:
    notes: tuple[str, ...] = ()
    chosen: dict[str, Any] = {"C": options.strength}
    if options.strength is None:
        count, notes = _folds(y, class_names, options)
        found = logistic.losses(X, y, count, options.seed)
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
            f"Expected at least 2 images of each class, because --method sgd holds some out to choose its learning "
            f"rate; {class_names[int(np.bincount(y).argmin())]!r} has 1. Use --method logistic."
        )
    head, losses = sgd.sgd(X, y, len(class_names), options.seed)
    chosen = {
        "rate": min(losses, key=lambda rate: losses[rate]),
        "held_out_nll": {f"{rate:g}": loss for rate, loss in losses.items()},
    }
    return Fitted("sgd", head, head.logits, chosen)


def _ridge(X: Array, y: Array, class_names: Sequence[str], options: Options) -> Fitted:
    K, head, factor = len(class_names), ridge.ridge(X, y, len(class_names)), 1.0
    if np.bincount(y).min() >= 2:  # scale the scores so that their softmax is calibrated on held-out folds
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
    return Fitted("knn", head, lambda Q: np.log(bank.votes(Q, (k,))[k] + 1e-12), {"k": k, "T": knn.T})


METHODS: dict[str, Callable[[Array, Array, Sequence[str], Options], Fitted]] = {
    "logistic": _logistic,
    "sgd": _sgd,
    "ridge": _ridge,
    "knn": _knn,
}


def parse_methods(text: str) -> list[str]:
    """Parse a list of methods such as `logistic,knn`.

    Args:
        text: rows of METHODS, separated by commas.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        pick(METHODS, name, "method")
    if not names:
        raise ConfigError(f"Expected one or more methods ({', '.join(METHODS)}); got {text!r}.")
    return names


def tables(method: str, X: Array, y: Array, Xt: Array, yt: Array, K: int) -> dict[str, Any]:
    """Return what the method's protocol reports besides one accuracy, as JSON values.

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
