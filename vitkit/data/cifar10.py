"""CIFAR-10 in its published binary files: data_batch_1.bin to data_batch_5.bin, and test_batch.bin.

A record is one byte of label, then 1,024 bytes each of red, green and blue, row by row (32 x 32 pixels).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from vitkit.data.base import Numbered, Pixels, Splits
from vitkit.data.files import irregular
from vitkit.errors import DataError

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE
FILES = {"train": "data_batch_*.bin", "test": "test_batch.bin"}


def splits(place: str) -> Splits:
    """Return the splits of a folder of binary files.

    Args:
        place: the folder, or the one above it (`cifar-10-batches-bin`).
    """
    above = Path(place).expanduser()
    inside = above / "cifar-10-batches-bin"
    root = inside if inside.is_dir() else above
    found = {split: partial(_read, files, split) for split, name in FILES.items() if (files := sorted(root.glob(name)))}
    if not found:
        raise DataError(
            f"Expected CIFAR-10's binary files, data_batch_1.bin to data_batch_5.bin and test_batch.bin; there are "
            f"none in {place!r}."
        )
    return found


def _read(files: list[Path], split: str) -> Pixels:
    parts = []
    for path in files:
        try:
            if what := irregular(path):
                raise DataError(f"Expected a file of CIFAR-10 at {path}; it is {what}.")
            values = np.fromfile(path, np.uint8)
        except OSError as error:
            raise DataError(f"Could not read {path}: {error.strerror}.") from error
        if not len(values) or len(values) % RECORD:
            raise DataError(f"{path}: expected records of {RECORD:,} bytes; got {len(values):,} bytes.")
        parts.append(values.reshape(-1, RECORD))
    records = np.concatenate(parts)
    if len(odd := np.flatnonzero(records[:, 0] >= len(NAMES))):
        raise DataError(
            f"Expected labels from 0 to 9 in {files[0].parent}; record {odd[0]:,} of {split} has label "
            f"{records[odd[0], 0]}. Is it CIFAR-100?"
        )
    images = records[:, 1:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return Pixels(images, records[:, 0], NAMES, Numbered(len(records), f"{split} image"))
