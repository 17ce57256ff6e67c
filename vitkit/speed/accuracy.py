"""What a faster form of a model costs: its logits compared with the plain model's on the same images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vitkit.errors import InputError
from vitkit.types import Array


@dataclass(frozen=True)
class Accuracy:
    """Comparison of a faster form with the plain model on the same images.

    Args:
        images: number of images.
        agreement: share of images for which both predict the same class, or exactly the same labels.
        difference: largest difference of a logit, relative to the plain model's largest logit.
        typical: root mean square of the difference, relative to the standard deviation of the plain model's logits.
        tolerance: promised upper bound of `difference`; None if nothing is promised.
        plain: top-1 accuracy of the plain model; None without labels.
        fast: top-1 accuracy of the faster form; None without labels.
    """

    images: int
    agreement: float
    difference: float
    typical: float
    tolerance: float | None = None
    plain: float | None = None
    fast: float | None = None

    @property
    def within(self) -> bool:
        """Whether `difference` is within the tolerance, if there is one."""
        return self.tolerance is None or self.difference <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {**asdict(self), "within": self.within}

    def sentences(self) -> list[str]:
        """Return the report as lines of text."""
        promised = (
            "not promised"
            if self.tolerance is None
            else f"promised {self.tolerance:.0e}: {'kept' if self.within else 'NOT KEPT'}"
        )
        lines = [
            f"agreement with the plain model: {self.agreement:.1%} of {self.images} images",
            f"largest difference of a logit: {self.difference:.2e} of the largest logit ({promised}), typically "
            f"{self.typical:.2e} of the logits' spread",
        ]
        if self.plain is not None and self.fast is not None:
            lines.append(
                f"top-1: {self.fast:.1%}, plain {self.plain:.1%} ({100 * (self.fast - self.plain):+.1f} points)"
            )
        return lines


def compare(
    plain: Array,
    fast: Array,
    labels: Array | None = None,
    tolerance: float | None = None,
    thresholds: Sequence[float] = (),
) -> Accuracy:
    """Compare the logits of a faster form with the plain model's.

    Args:
        plain: [N, K] of the plain model.
        fast: [N, K] of the faster form.
        labels: [N] correct outputs; None if unknown. Ignored with thresholds.
        tolerance: see Accuracy.
        thresholds: those of a model that gives an image any number of labels, see InputSpec (default: none).

    Raises:
        InputError: the shapes differ, or there are no images.
    """
    if plain.shape != fast.shape or plain.ndim != 2 or not plain.size:
        raise InputError(
            f"Expected logits [images, classes] of the same images; got {list(plain.shape)} and {list(fast.shape)}."
        )
    plain, fast = plain.astype(np.float64), fast.astype(np.float64)
    error, spread = plain - fast, plain - plain.mean(None if thresholds else 1, keepdims=True)
    first, second = plain.argmax(1), fast.argmax(1)
    same = first == second
    if thresholds:
        limits = np.clip(np.asarray(thresholds), 1e-300, 1 - 1e-16)
        limits, labels = np.log(limits) - np.log1p(-limits), None
        same = ((plain >= limits) == (fast >= limits)).all(1)
    return Accuracy(
        images=len(plain),
        agreement=float(same.mean()),
        difference=float(np.abs(error).max() / max(np.abs(plain).max(), 1e-12)),
        typical=float(np.sqrt((error**2).mean() / max((spread**2).mean(), 1e-24))),
        tolerance=tolerance,
        plain=None if labels is None else float((first == labels).mean()),
        fast=None if labels is None else float((second == labels).mean()),
    )
