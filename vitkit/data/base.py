"""What a data set is: `Source`, the classes that sources are made of, and the stratified split."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitkit.data.decode import Raw, decode
from vitkit.data.order import rng
from vitkit.data.string_table import StringTable
from vitkit.errors import ConfigError, DataError
from vitkit.model.config import InputSpec
from vitkit.types import Array

Splits = Mapping[str, Callable[[], "Source"]]  # the splits a data set has by itself, each opened when called


class Source(ABC):
    """Images with labels, in an order that no file system decides.

    Args:
        labels: the class of each image, a number that indexes `class_names`.
        class_names: names of the classes in the order of their numbers.
        names: what each image is called: in errors, in lists of skipped files, in the fingerprint.
    """

    in_memory = False  # whether reading costs nothing, so that worker processes would only be in the way
    ready_for: InputSpec | None = None  # what `raw` was preprocessed for already, see cache.py

    def __init__(
        self, labels: Sequence[int] | Array, class_names: Sequence[str], names: Sequence[str] | None = None
    ) -> None:
        self._labels = torch.from_numpy(np.array(labels, dtype=np.int32))  # a tensor: shared with workers
        self.class_names = tuple(class_names)
        self.names: Sequence[str] = names if names is not None else Numbered(len(self._labels))

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def labels(self) -> Array:
        """The class of each image, [N] int32."""
        return self._labels.numpy()

    @abstractmethod
    def raw(self, i: int) -> Raw:
        """The encoded bytes of image `i`, or its pixels where the source holds pixels."""

    def read(self, i: int) -> tuple[Image.Image, int]:
        """Image `i`, decoded, upright and in 8 bits, and its label.

        Raises:
            BadImage: names the image.
        """
        return decode(self.raw(i), self.names[i]), int(self._labels[i])

    def sizes(self) -> Array | None:
        """Bytes of each image's file, or None where that is unknown without reading."""
        return None

    def place(self, i: int) -> Path | None:
        """The file that holds image `i` and nothing else, or None."""
        return None

    def fingerprint(self) -> str:
        """A hash of what the data set is: class names, image names, labels, sizes of files."""
        h = hashlib.sha256(repr(self.class_names).encode())
        names = self.names if isinstance(self.names, StringTable) else StringTable(self.names)
        sizes = self.sizes()
        for part in (*names.buffers(), self.labels, *([] if sizes is None else [sizes.astype(np.int64)])):
            h.update(np.ascontiguousarray(part).data)
        return h.hexdigest()

    def counts(self) -> dict[str, int]:
        """Images of each class."""
        found = np.bincount(self.labels, minlength=len(self.class_names)) if len(self) else np.zeros(0, int)
        return {name: int(n) for name, n in zip(self.class_names, found)}


class Numbered(Sequence[str]):
    """Names of images that have none: `row 0`, `row 1`, ..."""

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
    """Images that lie in memory.

    Args:
        images: [N, H, W] or [N, H, W, C] uint8.
        labels: see Source.
        class_names: see Source.
        names: see Source.
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
            raise DataError(f"Expected one label for each image; got {len(images)} images and {len(self)} labels.")
        self._images = torch.from_numpy(np.array(images, dtype=np.uint8))

    def raw(self, i: int) -> Array:
        """The pixels of image `i`, [H, W, C] uint8."""
        image: Array = self._images.numpy()[i]
        return image if image.ndim == 3 else image[:, :, None]

    def fingerprint(self) -> str:
        """A hash of the class names, the labels and every pixel."""
        return hashlib.sha256((super().fingerprint()).encode() + self._images.numpy().tobytes()).hexdigest()


class Subset(Source):
    """Some images of another source, in a given order.

    Args:
        source: the whole.
        indices: which of its images.
    """

    def __init__(self, source: Source, indices: Sequence[int] | Array) -> None:
        self.indices = torch.from_numpy(np.array(indices, dtype=np.int64))
        super().__init__(source.labels[self.indices.numpy()], source.class_names, _Chosen(source.names, self.indices))
        self.source, self.in_memory, self.ready_for = source, source.in_memory, source.ready_for

    def raw(self, i: int) -> Raw:
        """See Source."""
        return self.source.raw(int(self.indices[i]))

    def sizes(self) -> Array | None:
        """See Source."""
        sizes = self.source.sizes()
        return None if sizes is None else sizes[self.indices.numpy()]

    def place(self, i: int) -> Path | None:
        """See Source."""
        return self.source.place(int(self.indices[i]))


class _Chosen(Sequence[str]):
    def __init__(self, names: Sequence[str], indices: torch.Tensor) -> None:
        self.names, self.indices = names, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self.names[int(j)] for j in self.indices[i]]
        return self.names[int(self.indices[i])]


def stratified(labels: Array, held_share: float, seed: int) -> tuple[Array, Array]:
    """Split indices into (kept, held out), class by class, so that both sides have every class.

    Args:
        labels: the class of each image.
        held_share: part that is held out, over 0 and under 1; of a class with two images or more, at least one is.
        seed: another seed is another split.
    """
    if not 0 < held_share < 1:
        raise ConfigError(f"The held-out share must lie between 0 and 1; got {held_share!r}.")
    held = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        count = min(max(round(held_share * len(of_class)), 1), len(of_class) - 1)
        held[rng(seed, "split", int(label)).permutation(of_class)[:count]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)
