"""IDX, the format of MNIST: *train*images-idx3-ubyte and *train*labels-idx1-ubyte, and t10k or test; or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from functools import partial
from io import BufferedReader
from pathlib import Path

import numpy as np

from vitkit.data.base import Numbered, Pixels, Splits
from vitkit.data.files import irregular
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
    y, x = read_idx(labels), read_idx(images)
    if y.ndim != 1 or not len(y):
        raise DataError(f"Expected one label per image in {labels}; its shape is {y.shape}.")
    if x.ndim not in (3, 4) or not x.size or x.shape[3:] not in ((), (1,), (3,)):
        raise DataError(
            f"Expected images, (number, height, width) or with 1 or 3 channels, in {images}; got {x.shape}."
        )
    names = KNOWN_NAMES.get(zlib.crc32(y.tobytes()), tuple(str(i) for i in range(int(y.max()) + 1)))
    return Pixels(x, y, names, Numbered(len(y), f"{split} image"))


def read_idx(path: Path) -> Array:
    """Read an IDX file of unsigned bytes.

    Args:
        path: the file; `.gz` is decompressed, as far as the header says that there is data.

    Raises:
        DataError: the file is damaged or of another type.
    """
    try:
        if what := irregular(path):
            raise DataError(f"Expected an IDX file at {path}; it is {what}.")
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            zero, kind, rank = struct.unpack(">HBB", file.read(4))
            shape = struct.unpack(f">{rank}I", file.read(4 * rank))
            expected = math.prod(shape)
            data = b"" if zero or kind != 8 else _up_to(file, expected + 1)
    except (OSError, EOFError, struct.error, zlib.error) as error:
        raise DataError(f"Expected a complete IDX file at {path}: {error}.") from error
    if zero or kind != 8 or not 1 <= rank <= 4:
        raise DataError(
            f"{path}: expected an IDX file of unsigned bytes (type 8), 1 to 4 dimensions; got type {kind}, {rank} "
            f"dimensions."
        )
    if len(data) != expected:
        got = "more" if len(data) > expected else f"{len(data):,}"
        raise DataError(f"{path}: expected {expected:,} bytes of data, as its header says; got {got}.")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _up_to(file: gzip.GzipFile | BufferedReader, size: int) -> bytes:
    """Return at most `size` bytes of a file; memory grows with the bytes that are there, whatever the header says."""
    parts = []
    while size > 0 and (part := file.read(min(size, 2**24))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
