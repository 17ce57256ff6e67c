"""Search by features: the images of a data set that are most similar to a query, exactly, without an index library.

The unit vectors of a data set lie in one memory-mapped file next to the feature cache, because reading a million rows
from SQLite takes much longer than multiplying them. The file's name is a hash of the space and of the images' digests,
so other weights, other preprocessing or other images never find it; a file that was cut short is written again.

Legend: N images, m queries, F values per feature.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitkit.errors import OutputError
from vitkit.features.filled import CHUNK, Filled
from vitkit.features.knn import unit
from vitkit.types import Array

BLOCK = 16_384  # rows of the file to multiply at once


@dataclass(frozen=True)
class Vectors:
    """The unit vectors of a data set, in a file.

    Args:
        path: the file.
        index: [n] position of each row in the source; unreadable images have none.
        width: F.
    """

    path: Path
    index: Array
    width: int

    def rows(self) -> Array:
        """Return the vectors [n, F] without reading them into memory."""
        return np.memmap(self.path, np.float32, "r", shape=(len(self.index), self.width))

    def search(self, queries: Array, count: int) -> tuple[Array, Array]:
        """Find the most similar images of each query.

        Args:
            queries: [m, F] features.
            count: number of images per query.

        Returns:
            Positions in the source and cosine similarities, [m, count] each, the most similar first; equal ones in the
            order of the source.
        """
        rows, Q = self.rows(), unit(queries.astype(np.float32))
        count = min(count, len(rows))
        best, places = np.zeros((len(Q), 0), np.float32), np.zeros((len(Q), 0), np.int64)
        for start in range(0, len(rows), BLOCK):
            similarity = Q @ np.asarray(rows[start : start + BLOCK]).T  # [m, BLOCK]
            here = np.broadcast_to(np.arange(start, start + similarity.shape[1]), similarity.shape)
            best, places = np.concatenate([best, similarity], 1), np.concatenate([places, here], 1)
            keep = np.argsort(-best, axis=1, kind="stable")[:, :count]
            best, places = np.take_along_axis(best, keep, 1), np.take_along_axis(places, keep, 1)
        return self.index[places], best


def vectors(filled: Filled) -> Vectors:
    """Return the unit vectors of a data set, writing their file if it is not there yet.

    Args:
        filled: a data set whose features are in the cache.
    """
    index = np.flatnonzero(filled.readable)
    key = hashlib.sha256(filled.space.key.encode() + filled.digests[index].tobytes()).hexdigest()[:32]
    path = filled.cache.path.with_name(f"vectors-{key}.f32")
    found = Vectors(path, index, filled.choice.width)
    if not path.is_file() or path.stat().st_size != 4 * len(index) * found.width:
        beside = path.with_name(f"{path.name}.{os.getpid()}")  # several processes may write at once
        try:
            with open(beside, "wb") as file:
                for start in range(0, len(index), CHUNK):
                    file.write(unit(filled.rows(index[start : start + CHUNK])).astype("<f4").tobytes())
            os.replace(beside, path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise OutputError(f"The vectors could not be written to {path.parent} ({error.strerror}).") from error
    return found
