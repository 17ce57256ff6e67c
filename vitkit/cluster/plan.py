"""What a cluster has to do: a list of shards, a function of the images' names and of the batch size alone.

Nothing here needs Ray, torch or a network. The same data gives the same list on every machine and on every start, so
a job that was killed resumes by doing what its manifest lacks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

SHARD_BYTES = 64 * 2**20  # decoded pixels of one shard, at most: it travels from one machine to another as a whole
SHARD_IMAGES = 1024  # images of one shard, at most: what is lost when a machine dies
FEWEST = 64  # shards that even a small data set is cut into, so that every machine has something to do


@dataclass(frozen=True)
class Shard:
    """Consecutive images of one part of the data, whose results are one file.

    Args:
        part: the part of the data.
        number: the shard's number within the part.
        start: position of its first image in the part.
        stop: position after its last image.
    """

    part: str
    number: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{quote(self.part, safe='')}-{self.number:05d}.parquet"


def shard_images(images: int, batch_size: int, image_bytes: int) -> int:
    """Return the number of images per shard: whole batches, so that batches are the same as on one machine.

    Args:
        images: number of all images.
        batch_size: images per batch.
        image_bytes: size of one decoded image in bytes.
    """
    most = min(SHARD_IMAGES, SHARD_BYTES // max(image_bytes, 1), images // FEWEST)
    return max(most // batch_size, 1) * batch_size


def shards(parts: Mapping[str, int], images: int) -> list[Shard]:
    """Return all shards, in order.

    Args:
        parts: {part of the data: its number of images}.
        images: images per shard.
    """
    return [
        Shard(part, number, start, min(start + images, count))
        for part, count in parts.items()
        for number, start in enumerate(range(0, count, images))
    ]


def names_hash(names: Iterable[str], labels: bytes, class_names: Sequence[str]) -> str:
    """Hash the names, labels and classes of one part: other images, or another order, give another hash.

    Args:
        names: the images.
        labels: their labels, as bytes.
        class_names: the classes.
    """
    h = hashlib.sha256(repr(tuple(class_names)).encode("utf-8", "surrogateescape"))
    h.update(hashlib.sha256(labels).digest())
    for name in names:
        text = name.encode("utf-8", "surrogateescape")
        h.update(len(text).to_bytes(4, "little") + text)
    return h.hexdigest()


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Say how two jobs differ (`batch_size: 64 there, 32 here`), or return an empty string if they do not.

    Args:
        old: the description of the job that a folder holds.
        new: the description of this one.
    """
    for key in dict.fromkeys((*new, *old)):
        there, here = old.get(key), new.get(key)
        if there != here:
            if isinstance(here, dict) and isinstance(there, dict):
                return f"{key}, {difference(there, here)}"
            return f"{key}: {there} there, {here} here"
    return ""
