"""scikit-learn's 1,797 handwritten digits, 8 x 8 pixels: real data that comes with every installation."""

from __future__ import annotations

import numpy as np

from vitkit.data.base import Numbered, Pixels, Splits
from vitkit.errors import DataError


def splits(place: str) -> Splits:
    """Return the digits as one split, `all`.

    Args:
        place: must be empty.
    """
    if place:
        raise DataError(f"Expected 'digits' alone, because they come with scikit-learn; got 'digits:{place}'.")
    return {"all": _read}


def _read() -> Pixels:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)  # scikit-learn's levels are 0 to 16
    return Pixels(images, found.target, [str(d) for d in range(10)], Numbered(len(images), "digit"))
