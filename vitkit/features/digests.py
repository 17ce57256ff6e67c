"""Images by their content: the SHA-256 of what they are decoded from is their key in the cache."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vitkit.data.base import READERS, Source
from vitkit.data.batch import BadImages
from vitkit.data.decode import Raw, digest
from vitkit.data.order import share
from vitkit.errors import BadImage, VitkitError
from vitkit.runtime import Runtime
from vitkit.types import Array

PIECE = 64  # images that a thread hashes at once


class Hashed(Source):
    """A source that refuses images whose content has changed since they were hashed.

    Args:
        source: the images.
        digests: [N, 32] uint8, of each image.
    """

    def __init__(self, source: Source, digests: Array) -> None:
        super().__init__(source.labels, source.class_names, source.names)
        self.source, self.digests, self.in_memory = source, digests, source.in_memory

    def raw(self, i: int) -> Raw:
        """Return what image i is decoded from."""
        raw = self.source.raw(i)
        if not np.array_equal(digest(raw), self.digests[i]):
            raise BadImage(f"{self.names[i]}: was changed while features were computed. Run the command again.")
        return raw


def hashes(source: Source, runtime: Runtime | None, bad_images: BadImages) -> tuple[Array, dict[str, str]]:
    """Hash all images, each process its share: digests [N, 32], zeros for unreadable images, and {name: reason}.

    Args:
        source: the images.
        runtime: the processes; None for this one alone.
        bad_images: `fail` raises BadImage for an unreadable image.
    """
    mine = range(len(source))[share(len(source), *((runtime.rank, runtime.ranks) if runtime else (0, 1)))]
    digests, skipped = np.zeros((len(mine), 32), np.uint8), dict[str, str]()

    def work(rows: range) -> list[tuple[int, BadImage]]:
        """Hash some of the images in a thread; reading and hashing release Python's lock."""
        bad: list[tuple[int, BadImage]] = []
        for row in rows:
            try:
                digests[row] = digest(source.raw(mine[row]))
            except BadImage as error:
                bad.append((row, error))
                if bad_images == "fail":
                    break
        return bad

    pieces = [range(i, min(i + PIECE, len(mine))) for i in range(0, len(mine), PIECE)]
    with ThreadPoolExecutor(1 if source.in_memory else READERS) as readers:
        for row, error in itertools.chain.from_iterable(readers.map(work, pieces)):
            if bad_images == "fail":
                readers.shutdown(cancel_futures=True)
                return join(runtime, digests, skipped, error)
            skipped[source.names[mine[row]]] = str(error)
    return join(runtime, digests, skipped, None)


def join(
    runtime: Runtime | None,
    digests: Array,
    skipped: dict[str, str],
    error: VitkitError | None,
) -> tuple[Array, dict[str, str]]:
    """Join the parts of all processes; an error in one of them is raised in all.

    Args:
        runtime: the processes; None for this one alone.
        digests: [n, 32], this process's part.
        skipped: {name: reason} of its unreadable images.
        error: what ended its part early, if anything did.
    """
    mine = (digests, skipped, error)
    parts = runtime.gather(mine) if runtime else [mine]
    if failed := next((failed for *_, failed in parts if failed is not None), None):
        raise failed
    return np.concatenate([part for part, *_ in parts]), {n: why for _, part, _ in parts for n, why in part.items()}


def unseen(digests: Array, seen: set[bytes]) -> Array:
    """Return the rows whose content is not among `seen`, and add it there."""
    found: list[int] = []
    for row, image in enumerate(digests):
        if (key := image.tobytes()) not in seen:
            seen.add(key)
            found.append(row)
    return np.array(found, np.int64)
