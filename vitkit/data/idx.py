"""IDX, the format of MNIST: *train*images-idx3-ubyte and *train*labels-idx1-ubyte, and t10k or test; or gzipped."""

from __future__ import annotations

import gzip
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np

from vitkit.data.base import Numbered, Pixels, Splits
from vitkit.errors import DataError
from vitkit.types import Array

# Class names of well-known data sets, by the CRC-32 of their labels. The classes of all others are called 0, 1, ...
KNOWN_NAMES: dict[int, tuple[str, ...]] = dict.fromkeys(
    (785835114, 606848831),  # Fashion-MNIST, training and test
    ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
PARTS = {"train": ("train",), "test": ("t10k", "test")}


def splits(place: str) -> Splits:
    """Return the splits of a folder of IDX files.

    Args:
        place: the folder.
    """
    root = Path(place).expanduser()
    found = {}
    for split, words in PARTS.items():
        images, labels = _find(root, words, "images-idx"), _find(root, words, "labels-idx")
        if images and labels:
            found[split] = partial(_read, images, labels, split)
    if not found:
        raise DataError(
            f"Expected pairs of IDX files such as train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz; "
            f"there are none in {place!r}."
        )
    return found


def _find(root: Path, words: tuple[str, ...], kind: str) -> Path | None:
    files = sorted(root.iterdir()) if root.is_dir() else []
    return next((f for f in files if kind in f.name and any(word in f.name for word in words)), None)


def _read(images: Path, labels: Path, split: str) -> Pixels:
    y = read_idx(labels)
    names = KNOWN_NAMES.get(zlib.crc32(y.tobytes()), tuple(str(i) for i in range(int(y.max()) + 1)))
    return Pixels(read_idx(images), y, names, Numbered(len(y), f"{split} image"))


def read_idx(path: Path) -> Array:
    """Read an IDX file of unsigned bytes.

    Args:
        path: the file; `.gz` is decompressed.

    Raises:
        DataError: the file is damaged or of another type.
    """
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        zero, kind, rank = struct.unpack(">HBB", data[:4])
        shape = struct.unpack(f">{rank}I", data[4 : 4 + 4 * rank])
    except (OSError, EOFError, struct.error, zlib.error) as error:
        raise DataError(f"Expected a complete IDX file at {path}: {error}.") from error
    if zero or kind != 8 or not rank:
        raise DataError(f"{path}: expected an IDX file of unsigned bytes (type 8); got type {kind}.")
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * rank)
    if len(values) != np.prod(shape, dtype=np.int64):
        raise DataError(f"{path}: expected {np.prod(shape, dtype=np.int64)} bytes of data; got {len(values)}.")
    return values.reshape(shape)
