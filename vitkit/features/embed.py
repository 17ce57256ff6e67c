"""A frozen backbone over a data set: what is in the cache is not computed again, what is not goes into it.

Legend: N images, F numbers of a feature. Only `Filled.read` holds all features in memory; `fill` holds one batch, so
that its memory is the same for a thousand images and for a million.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitkit.data.base import Source, Subset
from vitkit.data.decode import Raw
from vitkit.data.loader import BadImages, EvalLoader
from vitkit.data.order import share
from vitkit.errors import BadImage, DataError, InputError, VitkitError
from vitkit.features.cache import FeatureCache, Space, space_of
from vitkit.features.choice import Choice, choose
from vitkit.model.classifier import device_of, evaluating
from vitkit.model.vit import ViT
from vitkit.runtime import Runtime
from vitkit.types import Array, Tick

CHUNK = 4096  # rows of the cache that are looked at together
FEW = 16  # images that go through the model at once on a CPU: so few stay in its cache


@dataclass(frozen=True)
class Embedded:
    """Features of a data set, in the order of its images; those that could not be read are missing.

    Args:
        features: [n, F] float32.
        labels: [n] classes.
        index: [n] place of each image in the source.
        names: what each image is called.
        class_names: names of the classes.
        choice: which vector it is.
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
        cache: where they are.
        source: the images.
        choice: which vector.
        space: the cache's key for model, preprocessing and choice.
        digests: [N, 32] uint8, the images' keys.
        readable: [N] whether an image could be read.
        skipped: (name, sentence) of those that could not.
        computed: images that went through the model now.
        reused: images whose features were there already.
        seconds: that this took, hashing included.
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

    def rows(self, index: Sequence[int] | Array) -> Array:
        """Features [n, F] of some images.

        Args:
            index: their places in the source.

        Raises:
            InputError: the cache was damaged or emptied since it was filled.
        """
        rows, found = self.cache.read(self.space, self.digests[np.asarray(index)], self.choice.width)
        if not found.all():
            raise InputError(f"{int((~found).sum())} features have gone from {self.cache.path}; embed again.")
        return rows

    def read(self) -> Embedded:
        """All features in memory."""
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


def fill(
    model: ViT,
    source: Source,
    cache: FeatureCache,
    *,
    features: str | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    runtime: Runtime | None = None,
    progress: Tick | None = None,
    bad_images: BadImages = "fail",
) -> Filled:
    """See to it that the features of every image are in the cache.

    Args:
        model: the backbone, on its device.
        source: the images.
        cache: where features are kept; several processes may fill it at once.
        features: which vector, see `choose`.
        batch_size: images at once in each process.
        workers: processes that decode; None for one a core.
        runtime: several processes, an accelerator, mixed precision; all processes call this.
        progress: called with the number of images done since the last call, over all processes.
        bad_images: `fail` raises BadImage; `skip` leaves the image out and names it.
    """
    start = time.perf_counter()
    choice, report = choose(features, model.config), progress or (lambda count: None)
    space = cache.space(space_of(model, choice, runtime.precision if runtime else "fp32"))
    digests, skipped = _hash(source, runtime, bad_images)
    missing = (runtime.on_main if runtime else _call)(lambda: _missing(cache, space, digests, choice.width))
    report(len(source) - len(missing))
    cache.close()  # before workers are forked
    if len(missing):
        loader = EvalLoader(
            Subset(_Hashed(source, digests), missing),
            model.input_spec,
            batch_size=batch_size,
            workers=workers,
            rank=runtime.rank if runtime else 0,
            ranks=runtime.ranks if runtime else 1,
            device=runtime.device if runtime else device_of(model),
            bad_images=bad_images,
        )
        error: VitkitError | None = None
        try:
            for batch in loader:
                with evaluating(model), runtime.autocast() if runtime else nullcontext():
                    parts = batch.pixels.split(FEW if loader.device.type == "cpu" else len(batch))
                    rows = torch.cat([choice.of(model, x).float().cpu() for x in parts]).numpy()
                places = missing[batch.index.cpu().numpy()]
                if len(broken := np.flatnonzero(~np.isfinite(rows).all(1))):
                    raise InputError(
                        f"Expected finite features; {source.names[int(places[broken[0]])]} gave NaN or "
                        f"infinity. Use --precision fp32, or other weights."
                    )
                cache.write(space, digests[places], rows)
                report(len(places) * loader.ranks)
        except VitkitError as found:
            error = found
        skipped |= _join(runtime, digests[:0], loader.skipped, error)[1]
    readable: Array = np.asarray(digests.any(1))
    if skipped:  # whatever has the bytes of an image that could not be decoded cannot be either
        why = {digests[i].tobytes(): skipped[name] for i in missing if (name := source.names[int(i)]) in skipped}
        for place in np.flatnonzero(readable):
            if (reason := why.get(digests[place].tobytes())) is not None:
                readable[place] = False
                skipped.setdefault(source.names[int(place)], reason)
    if not readable.any():
        raise DataError(f"No image of the data set can be read: {next(iter(skipped.values()))}")
    computed = int(readable[missing].sum())
    return Filled(
        cache,
        source,
        choice,
        space,
        digests,
        readable,
        tuple(skipped.items()),
        computed,
        int(readable.sum()) - computed,
        time.perf_counter() - start,
    )


def embed(model: ViT, source: Source, cache: FeatureCache, **how: Any) -> Embedded:
    """Features of a data set, from the cache as far as it has them. The arguments are those of `fill`."""
    return fill(model, source, cache, **how).read()


def digest(raw: Raw) -> Array:
    """The sha256 of what an image is: a file's bytes, or pixels with their shape; [32] uint8.

    Args:
        raw: as `Source.raw` gives it.
    """
    if isinstance(raw, bytes):
        h = hashlib.sha256(raw)
    elif isinstance(raw, Image.Image):
        h = hashlib.sha256(f"{raw.mode} {raw.size} ".encode() + raw.tobytes())
    else:
        h = hashlib.sha256(f"{raw.dtype} {raw.shape} ".encode() + raw.tobytes())
    return np.frombuffer(h.digest(), np.uint8)


class _Hashed(Source):
    """A source whose images must still be those that were hashed: what was swapped meanwhile is not embedded."""

    def __init__(self, source: Source, digests: Array) -> None:
        super().__init__(source.labels, source.class_names, source.names)
        self.source, self.digests, self.in_memory = source, digests, source.in_memory

    def raw(self, i: int) -> Raw:
        raw = self.source.raw(i)
        if not np.array_equal(digest(raw), self.digests[i]):
            raise BadImage(f"{self.names[i]}: was changed while features were computed. Embed again.")
        return raw


def _hash(source: Source, runtime: Runtime | None, bad_images: BadImages) -> tuple[Array, dict[str, str]]:
    """Digests [N, 32] of all images, zeros for those that cannot be read, and why; each process does its share."""
    mine = range(len(source))[share(len(source), *((runtime.rank, runtime.ranks) if runtime else (0, 1)))]
    digests, skipped = np.zeros((len(mine), 32), np.uint8), dict[str, str]()
    error: VitkitError | None = None
    for row, i in enumerate(mine):
        try:
            digests[row] = digest(source.raw(i))
        except BadImage as found:
            if bad_images == "fail":
                error = found
                break
            skipped[source.names[i]] = str(found)
    return _join(runtime, digests, skipped, error)


def _call(work: Callable[[], Array]) -> Array:
    return work()


def _join(
    runtime: Runtime | None,
    digests: Array,
    skipped: dict[str, str],
    error: VitkitError | None,
) -> tuple[Array, dict[str, str]]:
    """Bring the processes' parts together; what failed in one fails in all."""
    mine = (digests, skipped, error)
    parts = runtime.gather(mine) if runtime else [mine]
    if failed := next((failed for *_, failed in parts if failed is not None), None):
        raise failed
    return np.concatenate([part for part, *_ in parts]), {n: why for _, part, _ in parts for n, why in part.items()}


def _missing(cache: FeatureCache, space: Space, digests: Array, width: int) -> Array:
    """Places of images whose features are not there: one place for each content, none for what could not be read."""
    places: list[int] = []
    seen: set[bytes] = set()
    for start in range(0, len(digests), CHUNK):
        part = digests[start : start + CHUNK]
        _, found = cache.read(space, part, width)
        for i in np.flatnonzero(~found & part.any(1)):
            if (key := part[i].tobytes()) not in seen:
                seen.add(key)
                places.append(start + int(i))
    return np.array(places, np.int64)
