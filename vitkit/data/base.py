"""`Source`, the interface of every data set; the classes that sources share; and the stratified split."""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image

from vitkit.data.decode import Raw, decode
from vitkit.data.order import rng
from vitkit.data.string_table import StringTable
from vitkit.errors import BadImage, ConfigError, DataError
from vitkit.model.config import InputSpec
from vitkit.types import Array

EXCERPT = 4096  # bytes that a fingerprint reads of each image, in four parts
READERS, PIECE = 16, 256  # threads that read them (they wait for the disk, not for a core), and images per task
Splits = Mapping[str, Callable[[], "Source"]]  # a data set's own splits; calling one opens it
SEPARATOR, NO_LABEL = "|", "no label"  # how several labels of one image are written, and none


class Source(ABC):
    """Labelled images, in an order that does not depend on the file system.

    Args:
        labels: the class of each image, an index into `class_names`; or, if an image can have any number of labels,
            [N, K] with 1 for each label that it has and 0 for the others.
        class_names: names of the classes, or of the K labels.
        names: name of each image, for errors, lists of skipped files and the fingerprint (default: `row 0`, ...).
    """

    in_memory = False  # whether reading is free, so that worker processes would only slow it down
    ready_for: InputSpec | None = None  # the InputSpec that `raw` is already preprocessed for; see cache.py
    layout = ""  # where several labels per image come from, for people

    def __init__(
        self, labels: Sequence[int] | Array, class_names: Sequence[str], names: Sequence[str] | None = None
    ) -> None:
        values = np.array(labels)
        values = values.astype(np.uint8 if values.ndim == 2 else np.int32)
        self._labels = torch.from_numpy(values)  # a tensor: shared with workers
        self.class_names = tuple(class_names)
        self.names: Sequence[str] = names if names is not None else Numbered(len(self._labels))

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def labels(self) -> Array:
        """The class of each image, [N] int32; with several labels per image, [N, K] uint8 of zeros and ones."""
        return self._labels.numpy()

    @property
    def several(self) -> bool:
        """Whether an image can have any number of labels, and not exactly one class."""
        return self._labels.ndim == 2

    def said(self, i: int) -> str:
        """Return the class of image `i` by name, or all of its labels: `cat|dog`, or `no label`."""
        if not self.several:
            return self.class_names[int(self._labels[i])]
        return SEPARATOR.join(self.class_names[k] for k in np.flatnonzero(self.labels[i])) or NO_LABEL

    def spoken(self) -> str:
        """Say what kind of labels the images have, in a few words."""
        if not self.several:
            return f"one of {len(self.class_names)} classes per image"
        return (
            f"any number of {len(self.class_names)} labels per image"
            + (f" ({self.layout})" if self.layout else "")
            + f": {self.labels.sum() / max(len(self), 1):.2f} on average, {int((~self.labels.any(1)).sum()):,} images "
            f"without any"
        )

    @abstractmethod
    def raw(self, i: int) -> Raw:
        """Return the encoded bytes of image `i`, or its pixels if the source holds pixels."""

    def read(self, i: int) -> tuple[Image.Image, Any]:
        """Return image `i`, decoded, upright and in 8 bits, and its label: a number, or with several labels per image
        a tuple of them.

        Raises:
            BadImage: the image cannot be read; the message names it.
        """
        label = tuple(np.flatnonzero(self.labels[i]).tolist()) if self.several else int(self._labels[i])
        return decode(self.raw(i), self.names[i]), label

    def array(self) -> Array | None:
        """Return the pixels of all images, [N, H, W, C] uint8, if the source holds them in one size; otherwise None."""
        return None

    def place(self, i: int) -> Path | None:
        """Return the file that holds image `i` alone, or None if there is no such file."""
        return None

    def excerpt(self, i: int, whole: bool) -> tuple[int, bytes]:
        """Return the size in bytes of image `i`, and all of it or four parts of it; (-1, b"") if it is unreadable."""
        try:
            raw = self.raw(i)
        except BadImage:
            return -1, b""
        data = raw if isinstance(raw, bytes) else np.asarray(raw).tobytes()
        return len(data), excerpt(io.BytesIO(data), 0, len(data), whole)

    def fingerprint(self, *, whole: bool = False) -> str:
        """Return a hash of the class names, image names, labels and content; file times play no part.

        Args:
            whole: hash every byte of every image (default: the size and four parts of each).
        """
        h = hashlib.sha256(repr(self.class_names).encode())
        names = self.names if isinstance(self.names, StringTable) else StringTable(self.names)
        for part in (*names.buffers(), self.labels):
            h.update(np.ascontiguousarray(part).data)

        def digest(rows: range) -> bytes:
            some = hashlib.sha256()
            for i in rows:
                size, content = self.excerpt(i, whole)
                some.update(size.to_bytes(8, "little", signed=True) + content)
            return some.digest()

        pieces = [range(i, min(i + PIECE, len(self))) for i in range(0, len(self), PIECE)]
        with ThreadPoolExecutor(1 if self.in_memory else READERS) as readers:
            for found in readers.map(digest, pieces):
                h.update(found)
        return h.hexdigest()

    def counts(self) -> dict[str, int]:
        """Return the number of images in each class, or with each label."""
        return counts_of(self.labels, self.class_names)


def counts_of(labels: Array, names: Sequence[str]) -> dict[str, int]:
    """Return the number of images in each class, or with each label.

    Args:
        labels: [N] int64, or [N, K] for any number of labels per image.
        names: of the K classes.
    """
    found = labels.sum(0, dtype=int) if labels.ndim == 2 else np.bincount(labels, minlength=len(names))
    return {name: int(n) for name, n in zip(names, found)}


def need_one_class(source: Source, what: str) -> None:
    """Raise DataError if images can have several labels and something needs one class per image.

    Args:
        source: the images.
        what: what needs it, as the subject of a sentence.
    """
    if source.several:
        raise DataError(f"{what} needs one class per image; this data has any number of labels per image.")


class Numbered(Sequence[str]):
    """Names for images without names: `row 0`, `row 1`, ..."""

    def __init__(self, length: int, word: str = "row") -> None:
        self.length, self.word = length, word

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(self.length))]
        if not 0 <= i < self.length:
            raise IndexError(i)
        return f"{self.word} {i}"


class Pixels(Source):
    """Images in memory.

    Args:
        images: [N, H, W] or [N, H, W, C], whole numbers from 0 to 255.
        labels: see Source.
        class_names: see Source.
        names: see Source.

    Raises:
        DataError: an image has other values, such as NaN, or fractions from 0 to 1; the message names it.
    """

    in_memory = True

    def __init__(
        self,
        images: Array,
        labels: Sequence[int] | Array,
        class_names: Sequence[str],
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(labels, class_names, names)
        if len(images) != len(self):
            raise DataError(f"Expected one label per image; got {len(images)} images and {len(self)} labels.")
        with np.errstate(invalid="ignore"):
            pixels = np.asarray(images).astype(np.uint8)
        for i in range(len(self)) if np.asarray(images).dtype != np.uint8 else ():
            if not np.array_equal(pixels[i], images[i]):
                raise DataError(
                    f"Expected whole numbers from 0 to 255; {self.names[i]} has other values (its least is "
                    f"{np.min(images[i]):g}, its largest {np.max(images[i]):g}). Scale and round the array first."
                )
        self._images = torch.from_numpy(pixels)

    def raw(self, i: int) -> Array:
        """Return the pixels of image `i`, [H, W, C] uint8."""
        image: Array = self._images.numpy()[i]
        return image if image.ndim == 3 else image[:, :, None]

    def array(self) -> Array:
        """See Source."""
        images: Array = self._images.numpy()
        return images if images.ndim == 4 else images[..., None]

    def excerpt(self, i: int, whole: bool) -> tuple[int, bytes]:
        """See Source; always all of it."""
        data = self._images.numpy()[i].tobytes()
        return len(data), data


class Subset(Source):
    """Some images of another source, in a given order.

    Args:
        source: the other source.
        indices: positions of the images in it.
    """

    def __init__(self, source: Source, indices: Sequence[int] | Array) -> None:
        self.indices = torch.from_numpy(np.array(indices, dtype=np.int64))
        super().__init__(source.labels[self.indices.numpy()], source.class_names, _Chosen(source.names, self.indices))
        self.source, self.in_memory, self.ready_for = source, source.in_memory, source.ready_for
        self.layout = source.layout

    def raw(self, i: int) -> Raw:
        """See Source."""
        return self.source.raw(int(self.indices[i]))

    def array(self) -> Array | None:
        """See Source."""
        images = self.source.array()
        return None if images is None else images[self.indices.numpy()]

    def place(self, i: int) -> Path | None:
        """See Source."""
        return self.source.place(int(self.indices[i]))

    def excerpt(self, i: int, whole: bool) -> tuple[int, bytes]:
        """See Source."""
        return self.source.excerpt(int(self.indices[i]), whole)


class Unlabelled(Subset):
    """Some images of another source, without their classes.

    Args:
        source: the other source.
        indices: positions of the images in it (default: all of them).
    """

    def __init__(self, source: Source, indices: Sequence[int] | Array | None = None) -> None:
        super().__init__(source, np.arange(len(source)) if indices is None else indices)
        self.class_names = ()
        self._labels = torch.zeros(len(self), dtype=torch.int32)


class _Chosen(Sequence[str]):
    def __init__(self, names: Sequence[str], indices: torch.Tensor) -> None:
        self.names, self.indices = names, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self.names[int(j)] for j in self.indices[i]]
        return self.names[int(self.indices[i])]


def excerpt(file: BinaryIO, start: int, size: int, whole: bool) -> bytes:
    """Read all of `size` bytes from `start` on, or, if there are many, four parts: both ends and two in between."""
    if whole or size <= EXCERPT:
        file.seek(start)
        return file.read(size)
    parts, length = [], EXCERPT // 4
    for k in range(4):
        file.seek(start + (size - length) * k // 3)
        parts.append(file.read(length))
    return b"".join(parts)


def stratified(labels: Array, held_share: float, seed: int) -> tuple[Array, Array]:
    """Split indices into (kept, held out), class by class.

    With several labels per image, the labels take turns, the rarest first, as in Sechidis et al., "On the
    Stratification of Multi-Label Data" (2011); images without a label come last.

    Args:
        labels: the class of each image, [N], or the labels of each image, [N, K].
        held_share: share of each class to hold out, between 0 and 1; at least one image of a class that has two.
        seed: chooses which images.
    """
    if not 0 < held_share < 1:
        raise ConfigError(f"The held-out share must be between 0 and 1; got {held_share!r}.")
    held = np.zeros(len(labels), bool)
    if labels.ndim == 2:
        for label, of_label, free in by_rarity(labels):
            count = min(max(round(held_share * len(of_label)), 1), len(of_label) - 1) - int(held[of_label].sum())
            held[rng(seed, "split", label).permutation(free)[: max(count, 0)]] = True
        return np.flatnonzero(~held), np.flatnonzero(held)
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        count = min(max(round(held_share * len(of_class)), 1), len(of_class) - 1)
        held[rng(seed, "split", int(label)).permutation(of_class)[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def by_rarity(labels: Array) -> Iterator[tuple[int, Array, Array]]:
    """Yield (label, its images, those that no earlier label had), the rarest label first; at last the images without a
    label, as label K. Every image is among the third of exactly one.

    Args:
        labels: [N, K].
    """
    taken, K = np.zeros(len(labels), bool), labels.shape[1]
    for label in (*np.argsort(labels.sum(0, dtype=int), kind="stable").tolist(), K):
        has = labels[:, label] > 0 if label < K else ~labels.any(1)
        if has.any():
            yield label, np.flatnonzero(has), np.flatnonzero(has & ~taken)
        taken |= has


def folds(labels: Array, count: int, seed: int) -> Array:
    """Return the fold [N] of each image with several labels: every label's images spread evenly over the folds.

    Args:
        labels: [N, K].
        count: number of folds.
        seed: chooses which images.
    """
    fold = np.full(len(labels), -1)
    sizes = np.zeros(count, int)
    for label, of_label, free in by_rarity(labels):
        has = np.bincount(fold[of_label][fold[of_label] >= 0], minlength=count)
        for i in rng(seed, "folds", label).permutation(free):
            fold[i] = np.lexsort((sizes, has))[0]
            has[fold[i]] += 1
            sizes[fold[i]] += 1
    return fold


def subset(labels: Array, wanted: float, seed: int) -> Array:
    """Choose some images: the same share of every class, and at least one image of each. Returns their indices.

    With the same labels and seed, a larger choice contains every smaller one. With several labels per image, the share
    of each label is only about the same.

    Args:
        labels: the class of each image, [N], or the labels of each image, [N, K].
        wanted: number of images, or, below 1, a share of them; each class's part is rounded.
        seed: chooses which images.

    Raises:
        ConfigError: there are fewer images, or fewer wanted than classes.
    """
    share = wanted / len(labels) if wanted >= 1 else wanted
    if labels.ndim == 2:
        classes, counts = np.flatnonzero(labels.any(0)), np.empty(0, int)
    else:
        classes, counts = np.unique(labels, return_counts=True)
    if not 0 < share <= 1 or share * len(labels) < len(classes):
        raise ConfigError(
            f"Expected at most {len(labels)} training images, and at least one for each of the {len(classes)} classes; "
            f"got images={wanted:g}."
        )
    if labels.ndim == 2:  # the first image of each label, then the others
        order = rng(seed, "subset").permutation(len(labels))
        first = dict.fromkeys(int(order[np.argmax(labels[order, k] > 0)]) for k in classes)
        rest = [i for i in order.tolist() if i not in first]
        return np.sort(np.array([*first, *rest][: max(int(share * len(labels) + 0.5), len(first))], dtype=np.int64))
    chosen = [
        rng(seed, "subset", int(label)).permutation(np.flatnonzero(labels == label))[: max(int(share * count + 0.5), 1)]
        for label, count in zip(classes, counts, strict=True)
    ]
    return np.sort(np.concatenate(chosen))
