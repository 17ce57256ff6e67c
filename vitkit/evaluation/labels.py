"""Measures for several labels per image: average precision, precision and recall at thresholds, and those thresholds.

Every label is a question of its own: is it there? Its probability ranks the images, and its threshold answers.
Legend: N images, K labels, R resamples. A label without a single image has no average precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitkit.data.base import NO_LABEL, SEPARATOR
from vitkit.errors import InputError
from vitkit.evaluation.logits import Outputs
from vitkit.evaluation.measure import wilson
from vitkit.types import Array

RESAMPLES = 1_000  # of the bootstrap, and fewer for so much data that it would take longer than the model
WORK = 200_000_000  # numbers that the bootstrap looks at, about
FEWEST = 100  # resamples, at least


@dataclass(frozen=True)
class LabelScore:
    """The scores of one label; 0/0 counts as 0, as in scikit-learn.

    Args:
        name: the label.
        ap: average precision; None if no image has the label.
        ap_ci95: 95% interval of `ap`, see `_interval`.
        threshold: probability from which the label counts as present.
        precision: share of the images that get the label that have it.
        recall: share of the images that have the label that get it.
        f1: harmonic mean of the two.
        support: images that have the label.
        predicted: images that get it.
    """

    name: str
    ap: float | None
    ap_ci95: tuple[float, float] | None
    threshold: float
    precision: float
    recall: float
    f1: float
    support: int
    predicted: int


@dataclass(frozen=True)
class Mistake:
    """A label that an image should not have got, or should have.

    Args:
        image: the image.
        label: the label.
        present: whether the image has the label; then the model missed it.
        probability: the model's probability of the label.
        threshold: the label's threshold.
        truth: all labels of the image, `a|b`.
        predicted: all labels that it got.
    """

    image: str
    label: str
    present: bool
    probability: float
    threshold: float
    truth: str
    predicted: str


@dataclass(frozen=True)
class LabelMeasures:
    """All measures of one evaluation with several labels per image.

    Args:
        n: number of images.
        mean_ap: mAP, the mean of the labels' average precisions.
        ci95: 95% interval of `mean_ap`, see `_interval`.
        micro_f1: F1 over all labels of all images together.
        micro_f1_ci95: its 95% interval.
        macro_f1: mean F1 over the labels that have images.
        exact: share of the images that get exactly their labels.
        nll: mean over the images of the binary cross-entropy, summed over the labels.
        without: labels that no image has; they count in precision, but have no average precision.
        per_class: one row per label, in the order of the model's outputs.
        missed: (label, times missed, images that have it), most often first.
        invented: (label, times given to an image that does not have it, times given), most often first.
        worst: the mistakes that are farthest from their thresholds.
        resamples: R of the bootstrap.
    """

    n: int
    mean_ap: float
    ci95: tuple[float, float]
    micro_f1: float
    micro_f1_ci95: tuple[float, float]
    macro_f1: float
    exact: float
    nll: float
    without: tuple[str, ...]
    per_class: tuple[LabelScore, ...]
    missed: tuple[tuple[str, int, int], ...]
    invented: tuple[tuple[str, int, int], ...]
    worst: tuple[Mistake, ...]
    resamples: int

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values, and `several` to tell them from those of one class per image."""
        return {"several": True} | dataclasses.asdict(self)


def sigmoid(logits: Array) -> Array:
    """Return the probability of each label, float64."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -logits.astype(np.float64))))


def average_precision(p: Array, y: Array) -> float | None:
    """Return the area under the steps of the precision-recall curve, the sum of (R_n - R_{n-1}) P_n.

    It is None if no image has the label. Images with the same probability come at once, so their order plays no part.
    This is scikit-learn's definition.

    Args:
        p: [N] probabilities.
        y: [N] whether each image has the label.
    """
    order, ends = _cuts(p)
    right, seen = np.cumsum(y[order] > 0)[ends], ends + 1
    if not right[-1]:
        return None
    return float((np.diff(right, prepend=0) * right / seen).sum() / right[-1])


def _cuts(p: Array) -> tuple[Array, Array]:
    """Return the images in order of falling probability, and the last position of each run of equal ones."""
    order = np.argsort(-p, kind="stable")
    return order, np.flatnonzero(np.append(np.diff(p[order]) != 0, True))


def mean_average_precision(p: Array, y: Array) -> float:
    """Return mAP, the mean of the average precisions of the labels that have images; NaN if there is none.

    Args:
        p: [N, K] probabilities.
        y: [N, K] whether each image has each label.
    """
    found = [ap for k in range(y.shape[1]) if (ap := average_precision(p[:, k], y[:, k])) is not None]
    return float(np.mean(found)) if found else float("nan")


def best_threshold(p: Array, y: Array) -> float:
    """Return the threshold with the highest F1; 1/2 if all images have the label or none has.

    It lies halfway between the last probability that it accepts and the next. Of several that are equally good, it is
    the one nearest to 1/2.

    Args:
        p: [N] probabilities on images that the model was not fitted to.
        y: [N] whether each image has the label.
    """
    if not len(y) or not 0 < (y > 0).sum() < len(y):
        return 0.5
    order, ends = _cuts(p)
    right, seen = np.cumsum(y[order] > 0)[ends], ends + 1
    f1 = 2 * right / (seen + right[-1])
    accepted = p[order][ends]
    between = (accepted + np.append(accepted[1:], 0.0)) / 2
    best = np.flatnonzero(f1 == f1.max())
    return float(between[best[np.argmin(np.abs(between[best] - 0.5))]])


def best_thresholds(p: Array, y: Array) -> tuple[float, ...]:
    """Return `best_threshold` of every label; p and y are [N, K]."""
    return tuple(best_threshold(p[:, k], y[:, k]) for k in range(y.shape[1]))


def cross_entropy(logits: Array, y: Array) -> float:
    """Return the binary cross-entropy, summed over the labels and averaged over the images.

    Args:
        logits: [N, K].
        y: [N, K] whether each image has each label.
    """
    z = logits.astype(np.float64)
    return float((np.logaddexp(0.0, z) - y * z).sum(1).mean())


def measure_labels(
    outputs: Outputs, names: Sequence[str], thresholds: Sequence[float], *, worst: int = 20, seed: int = 0
) -> LabelMeasures:
    """Measure the outputs of a model that gives an image any number of labels.

    Args:
        outputs: logits [N, K] and labels [N, K] of zeros and ones.
        names: the K labels.
        thresholds: probability from which each counts as present.
        worst: number of mistakes to keep.
        seed: seed of the bootstrap.
    """
    y, K = outputs.labels > 0, len(names)
    if outputs.logits.shape != y.shape or len(thresholds) != K or y.shape[1] != K or not len(y):
        raise InputError(
            f"Expected at least one image, and one name, one threshold and one column of labels for each of "
            f"{outputs.logits.shape[1]} outputs; got {K} names, {len(thresholds)} thresholds and labels of shape "
            f"{list(y.shape)}."
        )
    if not y.any():
        raise InputError(f"Expected at least one image with a label; none of these {len(y):,} images has one.")
    p, t = sigmoid(outputs.logits), np.asarray(thresholds)
    said = p >= t
    support, given, right = y.sum(0), said.sum(0), (y & said).sum(0)
    R = int(np.clip(WORK // y.size, FEWEST, RESAMPLES))
    ap = [average_precision(p[:, k], y[:, k]) for k in range(K)]
    aps, micro = _bootstrap(p, y, said, R, seed)
    has = ~np.isnan(aps)
    means = np.divide(np.where(has, aps, 0).sum(0), has.sum(0), out=np.full(R, np.nan), where=has.any(0))
    scores = tuple(
        LabelScore(
            name=name,
            ap=ap[k],
            ap_ci95=_interval(aps[k], int(support[k])) if ap[k] is not None else None,
            threshold=float(t[k]),
            precision=_share(right[k], given[k]),
            recall=_share(right[k], support[k]),
            f1=_share(2 * right[k], given[k] + support[k]),
            support=int(support[k]),
            predicted=int(given[k]),
        )
        for k, name in enumerate(names)
    )
    return LabelMeasures(
        n=len(y),
        mean_ap=mean_average_precision(p, y),
        ci95=_interval(means, len(y)),
        micro_f1=_share(2 * right.sum(), given.sum() + support.sum()),
        micro_f1_ci95=_interval(micro, len(y)),
        macro_f1=float(np.mean([score.f1 for score in scores if score.support] or [0.0])),
        exact=float((y == said).all(1).mean()),
        nll=cross_entropy(outputs.logits, y),
        without=tuple(name for k, name in enumerate(names) if not support[k]),
        per_class=scores,
        missed=_most(names, support - right, support),
        invented=_most(names, given - right, given),
        worst=tuple(_mistakes(outputs, p, y, said, t, names, worst)),
        resamples=R,
    )


def _most(names: Sequence[str], counts: Array, of: Array) -> tuple[tuple[str, int, int], ...]:
    """Return (label, count, of how many), the highest counts first, without zeros."""
    return tuple((names[k], int(counts[k]), int(of[k])) for k in np.argsort(-counts, kind="stable") if counts[k])


def _mistakes(
    outputs: Outputs, p: Array, y: Array, said: Array, t: Array, names: Sequence[str], count: int
) -> Iterator[Mistake]:
    """Yield the mistakes farthest from their thresholds: 1 is the farthest that each side of a threshold allows."""
    room = np.where(said, np.maximum(1 - t, 1e-12), np.maximum(t, 1e-12))
    far = np.where(y != said, np.abs(p - t) / room, -1.0)
    for cell in np.argsort(-far, axis=None, kind="stable")[:count]:
        i, k = divmod(int(cell), len(names))
        if y[i, k] == said[i, k]:
            return
        yield Mistake(
            image=outputs.names[i],
            label=names[k],
            present=bool(y[i, k]),
            probability=float(p[i, k]),
            threshold=float(t[k]),
            truth=joined(names, y[i]),
            predicted=joined(names, said[i]),
        )


def joined(names: Sequence[str], present: Array) -> str:
    """Return the labels that are present, as `a|b`, or `no label`."""
    return SEPARATOR.join(name for name, there in zip(names, present, strict=True) if there) or NO_LABEL


def _bootstrap(p: Array, y: Array, said: Array, R: int, seed: int) -> tuple[Array, Array]:
    """Return the average precision [K, R] of every label and the micro F1 [R] on resampled images.

    A resample is the number of times that each image was drawn, so nothing is sorted twice. A label that a resample
    lacks is NaN there.
    """
    N, K = y.shape
    drawn = np.random.default_rng(seed).multinomial(N, np.full(N, 1 / N), R).astype(np.float32)  # [R, N]
    aps = np.full((K, R), np.nan)
    for k in range(K):
        order, ends = _cuts(p[:, k])
        times = drawn[:, order]
        seen = np.cumsum(times, 1)[:, ends]
        right = np.cumsum(times * y[order, k], 1)[:, ends]
        steps = np.diff(right, prepend=0.0) * right / np.maximum(seen, 1)
        np.divide(steps.sum(1), right[:, -1], out=aps[k], where=right[:, -1] > 0)
    right, both = drawn @ (y & said).sum(1), drawn @ (y.sum(1) + said.sum(1))
    return aps, np.divide(2 * right, both, out=np.zeros(R), where=both > 0)


def _interval(values: Array, n: int) -> tuple[float, float]:
    """Return the interval that holds 95% of the values of the bootstrap.

    Without a single mistake, or without anything right, all resamples are alike and say nothing of other images. The
    interval is then Wilson's, of as many images that are all right or all wrong.

    Args:
        values: [R] the measure on each resample; NaN where it has none.
        n: images that the measure is a mean over.
    """
    found = values[~np.isnan(values)]
    low, high = np.quantile(found, (0.025, 0.975))
    if low == high and low in (0, 1):
        return wilson(float(low), n)
    return float(low), float(high)


def _share(part: int, whole: int) -> float:
    return float(part / whole) if whole else 0.0
