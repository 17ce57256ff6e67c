"""Run a frozen backbone over a data set: features that are missing from the cache are computed and added to it.

Legend: N images, F values per feature. Only `Filled.read` holds all features in memory; `fill` holds one batch, so it
needs as much memory for a thousand images as for a million.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitkit.data.base import READERS, Source, Subset
from vitkit.data.decode import Raw, digest
from vitkit.data.gpu import Decode
from vitkit.data.loader import BadImages, EvalLoader
from vitkit.data.order import share
from vitkit.errors import BadImage, DataError, InputError, VitkitError
from vitkit.features.cache import FeatureCache, Space, outline, space_of
from vitkit.features.choice import Choice, choose
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import device_of, evaluating
from vitkit.runtime import Runtime, on_host
from vitkit.speed.frozen import Way, way
from vitkit.types import Array, Tick

T = TypeVar("T")

CHUNK = 4096  # rows of the cache to read at once
PIECE = 64  # images that a thread hashes at once
UNWRITTEN = 4  # batches that may wait for the disk
CPU_BATCH = 16  # images per forward pass on a CPU, so that activations stay in its cache


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


def fill(
    model: Backbone,
    source: Source,
    cache: FeatureCache,
    *,
    features: str | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    runtime: Runtime | None = None,
    progress: Tick | None = None,
    bad_images: BadImages = "fail",
    by: Way | None = None,
    decode: Decode = "cpu",
) -> Filled:
    """Compute the features of every image that are not in the cache yet.

    Args:
        model: the backbone, on its device.
        source: the images.
        cache: the cache; several processes may fill it at once.
        features: the feature, as `choose` takes it (default: the model's own pooling).
        batch_size: images per batch in each process.
        workers: worker processes for decoding; None for one per core.
        runtime: processes, device and precision. With several processes, each of them must call this.
        progress: called with the number of images finished since the last call, over all processes.
        bad_images: `fail` raises BadImage; `skip` leaves the image out and lists it in the result.
        by: how the model runs (default: what suits the device, the precision and the number of images).
        decode: `cpu`, or `gpu` to decode and resize JPEGs there; its features have a key of their own.
    """
    start = time.perf_counter()
    choice, report = choose(features, model.config), progress or (lambda count: None)
    by = by or way(model, runtime.precision if runtime else "fp32", len(source), choice.name, batch_size)
    once = runtime.on_main if runtime else _call

    def loader_of(images: Source, hashed: bool) -> EvalLoader:
        cache.close()  # workers may be forked next
        return EvalLoader(
            images,
            model.input_spec,
            batch_size=batch_size,
            workers=workers,
            rank=runtime.rank if runtime else 0,
            ranks=runtime.ranks if runtime else 1,
            device=runtime.device if runtime else device_of(model),
            bad_images=bad_images,
            hashed=hashed,
            decode=decode,
        )

    # With nothing in the cache, images are hashed by the workers that decode them. These start before the weights are
    # hashed and the engine is built, which takes as long as decoding a few thousand images.
    unknown = once(lambda: not cache.knows(outline(model, choice, by.name, decode)))
    loader = loader_of(source, True) if unknown else None
    batches = iter(loader) if loader is not None else None
    space = cache.space(space_of(model, choice, by.name, decode))
    if loader is None and not once(lambda: cache.holds(space)):
        loader = loader_of(source, True)
        batches = iter(loader)
    digests, skipped, missing = np.zeros((len(source), 32), np.uint8), dict[str, str](), np.arange(len(source))
    if loader is None:
        digests, skipped = _hash(source, runtime, bad_images)
        missing = once(lambda: _missing(cache, space, digests, choice.width))
        report(len(source) - len(missing))
        if len(missing):
            loader = loader_of(Subset(_Hashed(source, digests), missing), False)
            batches = iter(loader)
    if loader is not None and batches is not None:
        first: set[bytes] | None = set() if loader.hashed else None  # what has been computed in this pass
        run = by.build() if by.build else partial(choice.of, model)

        def compute() -> Iterator[tuple[tuple[Array, int], Tensor]]:
            for batch in batches:
                places, pixels = missing[batch.index.numpy()], batch.pixels
                if first is not None and batch.digests is not None:
                    digests[places] = batch.digests
                    if len(new := _new(batch.digests, first)) < len(places):
                        places, pixels = places[new], pixels[torch.from_numpy(new).to(pixels.device)]
                if not len(places):
                    report(len(batch) * loader.ranks)
                    continue
                with evaluating(model), runtime.autocast() if runtime and not by.build else nullcontext():
                    few = CPU_BATCH if loader.device.type == "cpu" else len(places)
                    rows = torch.cat([run(x).float() for x in pixels.split(few)])
                yield (places, len(batch)), rows

        error: VitkitError | None = None
        try:
            with closing(batches), _Writer(cache, space) as writer:
                for (places, count), found in on_host(compute()):
                    rows = found.numpy()
                    if len(broken := np.flatnonzero(~np.isfinite(rows).all(1))):
                        raise InputError(
                            f"Expected finite features; {source.names[int(places[broken[0]])]} gave NaN or infinity. "
                            f"Use --precision fp32, or other weights."
                        )
                    writer.write(digests[places], rows)
                    report(count * loader.ranks)
        except VitkitError as stopped:
            error = stopped
        mine = digests[loader.indices] if loader.hashed else digests[:0]
        joined, bad = _join(runtime, mine, loader.skipped, error)
        digests, skipped = joined if loader.hashed else digests, skipped | bad
    readable: Array = np.asarray(digests.any(1))
    if skipped:  # a copy of an image that could not be decoded was not tried: report it too
        why = {digests[i].tobytes(): skipped[name] for i in missing if (name := source.names[int(i)]) in skipped}
        for place in np.flatnonzero(readable):
            if (reason := why.get(digests[place].tobytes())) is not None:
                readable[place] = False
                skipped.setdefault(source.names[int(place)], reason)
    if not readable.any():
        raise DataError(f"Expected at least one readable image; got none. The first: {next(iter(skipped.values()))}")
    if loader is not None and loader.hashed:
        computed = len(np.unique(digests[readable], axis=0))
    else:
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
        by.name,
        decode,
    )


def cached(model: Backbone, source: Source, cache: FeatureCache, *, features: str | None = None) -> Filled | None:
    """Look up the features of a data set without computing any: those that are not in the cache count as unreadable.

    Args:
        model: the backbone, on its device.
        source: the images.
        cache: the cache.
        features: the feature, as `choose` takes it (default: the model's own pooling).

    Returns:
        None if the cache holds none of them.
    """
    start = time.perf_counter()
    choice = choose(features, model.config)
    space = cache.space(space_of(model, choice))
    digests, skipped = _hash(source, None, "skip")
    found = [
        cache.read(space, digests[start : start + CHUNK], choice.width)[1] for start in range(0, len(digests), CHUNK)
    ]
    there = np.concatenate(found) & digests.any(1) if found else np.zeros(0, bool)
    if not there.any():
        return None
    seconds = time.perf_counter() - start
    return Filled(cache, source, choice, space, digests, there, tuple(skipped.items()), 0, int(there.sum()), seconds)


def embed(model: Backbone, source: Source, cache: FeatureCache, **how: Any) -> Embedded:
    """Return the features of a data set, computing only what is not in the cache. Takes the arguments of `fill`."""
    return fill(model, source, cache, **how).read()


class _Writer:
    """Write features to the cache in a thread, so that the next ones are computed meanwhile.

    Args:
        cache: used by this thread alone until the context ends.
        space: where the features belong.
    """

    def __init__(self, cache: FeatureCache, space: Space) -> None:
        self.cache, self.space = cache, space
        self.thread, self.waiting = ThreadPoolExecutor(1), deque[Future[None]]()

    def write(self, images: Array, rows: Array) -> None:
        """Write some features soon; if an earlier batch could not be written, raise its error."""
        self.waiting.append(self.thread.submit(self.cache.write, self.space, images, rows))
        while len(self.waiting) > UNWRITTEN:
            self.waiting.popleft().result()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.thread.shutdown()
        while kind is None and self.waiting:
            self.waiting.popleft().result()


def _call(work: Callable[[], T]) -> T:
    return work()


def _new(digests: Array, seen: set[bytes]) -> Array:
    """Return the rows whose content is not among `seen`, and add it there."""
    found: list[int] = []
    for row, image in enumerate(digests):
        if (key := image.tobytes()) not in seen:
            seen.add(key)
            found.append(row)
    return np.array(found, np.int64)


class _Hashed(Source):
    """A source that refuses images whose content has changed since they were hashed."""

    def __init__(self, source: Source, digests: Array) -> None:
        super().__init__(source.labels, source.class_names, source.names)
        self.source, self.digests, self.in_memory = source, digests, source.in_memory

    def raw(self, i: int) -> Raw:
        raw = self.source.raw(i)
        if not np.array_equal(digest(raw), self.digests[i]):
            raise BadImage(f"{self.names[i]}: was changed while features were computed. Run the command again.")
        return raw


def _hash(source: Source, runtime: Runtime | None, bad_images: BadImages) -> tuple[Array, dict[str, str]]:
    """Hash all images, each process its share: digests [N, 32], zeros for unreadable images, and {name: reason}."""
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
                return _join(runtime, digests, skipped, error)
            skipped[source.names[mine[row]]] = str(error)
    return _join(runtime, digests, skipped, None)


def _join(
    runtime: Runtime | None,
    digests: Array,
    skipped: dict[str, str],
    error: VitkitError | None,
) -> tuple[Array, dict[str, str]]:
    """Join the parts of all processes; an error in one of them is raised in all."""
    mine = (digests, skipped, error)
    parts = runtime.gather(mine) if runtime else [mine]
    if failed := next((failed for *_, failed in parts if failed is not None), None):
        raise failed
    return np.concatenate([part for part, *_ in parts]), {n: why for _, part, _ in parts for n, why in part.items()}


def _missing(cache: FeatureCache, space: Space, digests: Array, width: int) -> Array:
    """Return the positions of images to compute: one for each distinct content that is readable and not cached."""
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
