"""scikit-learn's 1,797 handwritten digits, 8 x 8 pixels: real data that every installation has."""

from __future__ import annotations

import numpy as np

from vitkit.data.base import Numbered, Pixels, Splits
from vitkit.errors import DataError


def splits(place: str) -> Splits:
    """The splits of the digits: none of their own.

    Args:
        place: nothing.
    """
    if place:
        raise DataError(f"The digits are embedded and take no place; got {place!r}. Use 'digits'.")
    return {"all": _read}


def _read() -> Pixels:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)  # its levels are 0 to 16
    return Pixels(images, found.target, [str(d) for d in range(10)], Numbered(len(images), "digit"))
