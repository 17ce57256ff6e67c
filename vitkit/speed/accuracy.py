"""What a faster form of a model costs: its logits beside the plain model's, on the same images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vitkit.errors import InputError
from vitkit.types import Array


@dataclass(frozen=True)
class Accuracy:
    """Two predictors on the same images.

    Args:
        images: how many.
        agreement: share of images on which both name the same class.
        difference: largest difference of a logit, relative to the plain model's largest.
        typical: root of the mean squared difference, relative to that of the plain model's logits around their mean.
        tolerance: what `difference` may be; None where it is not promised.
        plain: top-1 of the plain model, where labels are known.
        fast: top-1 of the other.
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
        """Whether the promise, if there is one, was kept."""
        return self.tolerance is None or self.difference <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {**asdict(self), "within": self.within}

    def sentences(self) -> list[str]:
        """The report for people, a line each."""
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


def compare(plain: Array, fast: Array, labels: Array | None = None, tolerance: float | None = None) -> Accuracy:
    """Compare two predictors' logits.

    Args:
        plain: [N, K] of the plain model.
        fast: [N, K] of the other.
        labels: [N] right outputs, where they are known.
        tolerance: see Accuracy.

    Raises:
        InputError: they are not of the same images and classes.
    """
    if plain.shape != fast.shape or plain.ndim != 2 or not plain.size:
        raise InputError(
            f"Expected logits [images, classes] of the same images; got {list(plain.shape)} and {list(fast.shape)}."
        )
    plain, fast = plain.astype(np.float64), fast.astype(np.float64)
    error, spread = plain - fast, plain - plain.mean(1, keepdims=True)
    first, second = plain.argmax(1), fast.argmax(1)
    return Accuracy(
        images=len(plain),
        agreement=float((first == second).mean()),
        difference=float(np.abs(error).max() / max(np.abs(plain).max(), 1e-12)),
        typical=float(np.sqrt((error**2).mean() / max((spread**2).mean(), 1e-24))),
        tolerance=tolerance,
        plain=None if labels is None else float((first == labels).mean()),
        fast=None if labels is None else float((second == labels).mean()),
    )
