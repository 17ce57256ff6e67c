"""scikit-learn's 1,797 handwritten digits, 8 x 8 pixels: real data that comes with every installation.

`digit-pairs` puts up to two of them side by side: the smallest data set with several labels per image.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from vitkit.data.base import Numbered, Pixels, Splits
from vitkit.errors import DataError

TRAIN_DIGITS = 1400  # the others are shown in test images only
PAIRS = {"train": 2000, "test": 500}  # images of each split
SHOWN = (0, 1, 1, 2, 2, 2, 2, 2, 2, 2)  # digits in the first image, the second, ..., the tenth, and so on


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


def splits_pairs(place: str) -> Splits:
    """Return images of 16 x 16 pixels that show two digits, one or none, labelled with the digits that they show.

    Args:
        place: must be empty.
    """
    if place:
        raise DataError(f"Expected 'digit-pairs' alone, because they are made of digits; got 'digit-pairs:{place}'.")
    return {split: partial(_pairs, split) for split in PAIRS}


def _pairs(split: str) -> Pixels:
    digits, rng = _read(), np.random.default_rng(list(PAIRS).index(split))
    order = np.random.default_rng(0).permutation(len(digits))
    pool = order[:TRAIN_DIGITS] if split == "train" else order[TRAIN_DIGITS:]
    images, labels = np.zeros((PAIRS[split], 16, 16), np.uint8), np.zeros((PAIRS[split], 10), np.uint8)
    for n in range(len(images)):
        for side, i in enumerate(rng.choice(pool, 2, replace=False)[: SHOWN[n % len(SHOWN)]]):
            images[n, 4:12, 8 * side : 8 * side + 8] = digits.raw(int(i))[:, :, 0]
            labels[n, digits.labels[i]] = 1
    source = Pixels(images, labels, digits.class_names, Numbered(len(images), f"{split} pair"))
    source.layout = "the digits that an image shows"
    return source
