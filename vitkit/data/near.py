"""Near-duplicates: the same photo after resizing, recompression, or a change of brightness or contrast.

Without weights, a perceptual hash decides: the signs of the 8 x 8 lowest frequencies of the image at 32 x 32 pixels,
without its mean. Photos at most DISTANCE bits apart count as the same (docs/log.md says how often that is right). With
features, photos count as the same if their cosine similarity is high, and much higher than is usual in this data:
photos of parts on a conveyor belt are all alike.

Legend: n images, F values per feature.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from PIL import Image

from vitkit.types import Array

GRID, LOW = 32, 8  # pixels per side that are looked at, and frequencies kept per side
DISTANCE = 10  # bits that may differ
COSINE = 0.92  # features must be at least this similar,
CLOSER = 4.0  # and this many times closer than most images are to their nearest neighbour
SAMPLE = 2048  # images that say how close neighbours usually are
FLAT = 4.0  # an image whose gray values vary less than this has no structure to compare
BLOCK = 2048  # rows compared at once
_frequency, _pixel = np.arange(1, LOW + 1)[:, None], np.arange(GRID)[None]
COSINES = np.cos(np.pi * (2 * _pixel + 1) * _frequency / (2 * GRID))  # [LOW, GRID], of the discrete cosine transform


def perceptual_hash(image: Image.Image) -> int | None:
    """Return 64 bits that survive resizing and recompression; None if the image is too small or too plain.

    Args:
        image: a decoded image.
    """
    if min(image.size) < GRID:
        return None
    small = image.convert("L").resize((GRID, GRID), Image.Resampling.BOX, reducing_gap=2.0)
    gray = np.asarray(small, np.float64)
    if gray.std() < FLAT:
        return None
    return int(np.packbits(COSINES @ gray @ COSINES.T > 0).view(np.uint64)[0])


def close_hashes(hashes: Array) -> Iterator[tuple[int, int]]:
    """Yield every pair i < j of hashes [n] uint64 that are at most DISTANCE bits apart."""
    for start in range(0, len(hashes), BLOCK):
        rows = hashes[start : start + BLOCK, None]
        for at in range(start, len(hashes), BLOCK):
            i, j = np.nonzero(np.bitwise_count(rows ^ hashes[None, at : at + BLOCK]) <= DISTANCE)
            yield from ((int(a) + start, int(b) + at) for a, b in zip(i, j) if a + start < b + at)


def close_features(features: Array, least: float | None = None) -> Iterator[tuple[int, int]]:
    """Yield every pair i < j of similar features.

    Args:
        features: [n, F].
        least: smallest cosine similarity (default: COSINE, and much higher than is usual between neighbours).
    """
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    if len(unit) < 2:
        return
    least = _unusual(unit) if least is None else least
    for start in range(0, len(unit), BLOCK):
        for at in range(start, len(unit), BLOCK):
            i, j = np.nonzero(unit[start : start + BLOCK] @ unit[at : at + BLOCK].T >= least)
            yield from ((int(a) + start, int(b) + at) for a, b in zip(i, j) if a + start < b + at)


def _unusual(unit: Array) -> float:
    """Return a similarity that unit vectors [n, F] rarely have with their nearest neighbour."""
    some = np.linspace(0, len(unit) - 1, min(len(unit), SAMPLE)).astype(np.int64)
    nearest = np.full(len(some), -1.0)
    for at in range(0, len(unit), BLOCK):
        similarity = unit[some] @ unit[at : at + BLOCK].T
        similarity[some[:, None] == np.arange(at, min(at + BLOCK, len(unit)))] = -1.0  # not to itself
        nearest = np.maximum(nearest, similarity.max(1))
    return max(COSINE, 1 - (1 - float(np.median(nearest))) / CLOSER)


def groups(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Join pairs that share an image into groups, in the order of their first images."""
    leader: dict[int, int] = {}

    def find(i: int) -> int:
        while (above := leader.setdefault(i, i)) != i:
            leader[i] = i = leader.setdefault(above, above)
        return i

    for i, j in pairs:
        a, b = sorted((find(i), find(j)))
        leader[b] = a
    joined: dict[int, list[int]] = {}
    for i in sorted(leader):
        joined.setdefault(find(i), []).append(i)
    return list(joined.values())
