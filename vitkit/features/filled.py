"""The features of a data set: in the cache (`Filled`), or in memory (`Embedded`).

Legend: N images, F values per feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitkit.data.base import Source
from vitkit.data.gpu import Decode
from vitkit.errors import InputError
from vitkit.features.cache import FeatureCache, Space
from vitkit.features.choice import Choice
from vitkit.types import Array

CHUNK = 4096  # rows of the cache to read at once


@dataclass(frozen=True)
class Embedded:
    """The features of a data set in the order of its images, without those that could not be read.

    Args:
        features: [n, F] float32.
        labels: [n] classes.
        index: [n] position of each image in the source.
        names: name of each image.
        class_names: names of the classes.
        choice: the feature.
    """

    features: Array
    labels: Array
    index: Array
    names: tuple[str, ...]
    class_names: tuple[str, ...]
    choice: Choice


@dataclass(frozen=True)
class Filled:
    """A data set whose features are all in the cache.

    Args:
        cache: the cache.
        source: the images.
        choice: the feature.
        space: the cache's key for model, preprocessing and feature.
        digests: [N, 32] uint8, the keys of the images.
        readable: [N] whether each image could be read.
        skipped: (name, reason) of each image that could not.
        computed: number of images whose features were computed now.
        reused: number of images whose features were in the cache already.
        seconds: time taken, including hashing.
        precision: how the features were computed: a precision, and the engine if it was not the plain model.
        decode: where images were decoded.
    """

    cache: FeatureCache
    source: Source
    choice: Choice
    space: Space
    digests: Array
    readable: Array
    skipped: tuple[tuple[str, str], ...]
    computed: int
    reused: int
    seconds: float
    precision: str = "fp32"
    decode: Decode = "cpu"

    def rows(self, index: Sequence[int] | Array) -> Array:
        """Return the features [n, F] of some images.

        Args:
            index: positions of the images in the source.

        Raises:
            InputError: the cache has been damaged or emptied since.
        """
        rows, found = self.cache.read(self.space, self.digests[np.asarray(index)], self.choice.width)
        if not found.all():
            raise InputError(
                f"Expected {len(found)} features in {self.cache.path}; {int((~found).sum())} have disappeared. Run "
                f"the command again."
            )
        return rows

    def read(self) -> Embedded:
        """Read all features into memory."""
        index = np.flatnonzero(self.readable)
        features = np.empty((len(index), self.choice.width), np.float32)
        for start in range(0, len(index), CHUNK):
            features[start : start + CHUNK] = self.rows(index[start : start + CHUNK])
        return Embedded(
            features,
            self.source.labels[index].astype(np.int64),
            index,
            tuple(self.source.names[int(i)] for i in index),
            self.source.class_names,
            self.choice,
        )
