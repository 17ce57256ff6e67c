"""Run a frozen backbone over a data set: features that are missing from the cache are computed and added to it.

`fill` holds one batch in memory, so it needs as much for a thousand images as for a million; `Filled.read` holds all.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitkit.cpu_products import fp32_products
from vitkit.data.base import Source, Subset
from vitkit.data.batch import BadImages, images_per_batch
from vitkit.data.eval_loader import EvalLoader
from vitkit.data.gpu import Decode
from vitkit.errors import DataError, InputError, VitkitError
from vitkit.features.cache import FeatureCache, Space, outline, space_of
from vitkit.features.choice import Choice, choose
from vitkit.features.digests import Hashed, hashes, join, unseen
from vitkit.features.filled import CHUNK, Embedded, Filled
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import device_of, evaluating
from vitkit.runtime import Runtime, on_host
from vitkit.speed.frozen import Way, way
from vitkit.types import Array, Tick

T = TypeVar("T")

UNWRITTEN = 64  # batches that may wait for the disk, and at first for the hash of the weights
CPU_BATCH = 16  # images per forward pass on a CPU, so that activations stay in its cache


def fill(
    model: Backbone,
    source: Source,
    cache: FeatureCache,
    *,
    features: str | None = None,
    batch_size: int | None = None,
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
        batch_size: images per batch in each process (default: see `data.batch.images_per_batch`).
        workers: worker processes for decoding; None for one per core.
        runtime: processes, device and precision. With several processes, each of them must call this.
        progress: called with the number of images finished since the last call, over all processes.
        bad_images: `fail` raises BadImage; `skip` leaves the image out and lists it in the result.
        by: how the model runs (default: what suits the device, the precision and the number of images).
        decode: `cpu`, or `gpu` to decode and resize JPEGs there; its features have a key of their own.
    """
    start = time.perf_counter()
    choice = choose(features, model.config)
    device = runtime.device if runtime else device_of(model)
    batch_size = images_per_batch(batch_size, model.input_spec, device)
    by = by or way(model, runtime.precision if runtime else "fp32", len(source), choice.name, batch_size)
    loading = partial(
        EvalLoader,
        spec=model.input_spec,
        batch_size=batch_size,
        workers=workers,
        rank=runtime.rank if runtime else 0,
        ranks=runtime.ranks if runtime else 1,
        device=device,
        bad_images=bad_images,
        decode=decode,
    )
    work = _Filling(model, source, cache, choice, by, runtime, progress or (lambda count: None), loading)
    work.find()
    if work.loader is not None:
        work.compute(work.loader)
    readable = work.readable()
    if not readable.any():
        raise DataError(
            f"Expected at least one readable image; got none. The first: {next(iter(work.skipped.values()))}"
        )
    computed = work.computed(readable)
    return Filled(
        cache,
        source,
        choice,
        work.space,
        work.digests,
        readable,
        tuple(work.skipped.items()),
        computed,
        int(readable.sum()) - computed,
        time.perf_counter() - start,
        by.name,
        decode,
    )


@dataclass
class _Filling:
    """What `fill` does: find the images that the cache lacks (`find`), then compute and write them (`compute`).

    Args:
        model: see `fill`.
        source: see `fill`.
        cache: see `fill`.
        choice: the feature.
        by: how the model runs.
        runtime: see `fill`.
        report: called with the number of images finished since the last call, over all processes.
        loading: makes the loader of some images.
    """

    model: Backbone
    source: Source
    cache: FeatureCache
    choice: Choice
    by: Way
    runtime: Runtime | None
    report: Tick
    loading: partial[EvalLoader]

    def __post_init__(self) -> None:
        self.digests: Array = np.zeros((len(self.source), 32), np.uint8)  # zeros where there are no bytes to hash
        self.missing: Array = np.arange(len(self.source))  # positions of the images that the cache lacks
        self.skipped: dict[str, str] = {}
        self.loader: EvalLoader | None = None  # None if nothing is missing
        self._key = (self.model, self.choice, self.by.name, self.loading.keywords["decode"])
        self._about: Future[dict[str, Any]] | None = None  # what a thread finds out about the space

    @functools.cached_property
    def space(self) -> Space:
        """The cache's key for model, preprocessing and feature."""
        return self.cache.space(self._about.result() if self._about is not None else space_of(*self._key))

    def _describe(self) -> dict[str, Any]:
        """Hash the weights, whose copies do not wait for what the GPU computes meanwhile."""
        device = device_of(self.model)
        with torch.cuda.stream(torch.cuda.Stream(device) if device.type == "cuda" else None):
            return space_of(*self._key)

    def find(self) -> None:
        """Find what is missing. Into an empty space everything is: then workers hash the images that they decode.

        If the space cannot exist yet, they start at once, and the weights are hashed while features are computed.
        """
        once = self.runtime.on_main if self.runtime else _call
        if once(lambda: not self.cache.knows(outline(*self._key))):
            self._load(self.source, hashed=True)
            self._about = _in_thread(self._describe)
            return
        if not once(lambda: self.cache.holds(self.space)):
            self._load(self.source, hashed=True)
            return
        self.digests, self.skipped = hashes(self.source, self.runtime, self.loading.keywords["bad_images"])
        self.missing = once(lambda: _missing(self.cache, self.space, self.digests, self.choice.width))
        self.report(len(self.source) - len(self.missing))
        if len(self.missing):
            self._load(Subset(Hashed(self.source, self.digests), self.missing), hashed=False)

    def _load(self, images: Source, hashed: bool) -> None:
        self.cache.close()  # workers are forked next
        self.loader = self.loading(images, hashed=hashed)
        self.batches = iter(self.loader)

    def compute(self, loader: EvalLoader) -> None:
        """Compute the features of what is missing, and write them while the next ones are computed."""
        error: VitkitError | None = None
        try:
            with closing(self.batches), _Writer(self.cache, lambda: self.space) as writer:
                for (places, count), found in on_host(self._features(loader)):
                    rows = found.numpy()
                    need_finite(rows, self.source, places)
                    writer.write(self.digests[places], rows)
                    self.report(count * loader.ranks)
        except VitkitError as stopped:
            error = stopped
        mine = self.digests[loader.indices] if loader.hashed else self.digests[:0]
        joined, bad = join(self.runtime, mine, loader.skipped, error)
        self.digests, self.skipped = joined if loader.hashed else self.digests, self.skipped | bad

    def _features(self, loader: EvalLoader) -> Iterator[tuple[tuple[Array, int], Tensor]]:
        """Yield ((positions, images of the batch), features) of every batch; of equal images, only the first."""
        run: Callable[[Tensor], Tensor] | None = None  # built while the next batches are made ready
        seen: set[bytes] = set()
        for batch in self.batches:
            places, pixels = self.missing[batch.index.numpy()], batch.pixels
            if batch.digests is not None:
                self.digests[places] = batch.digests
                if len(new := unseen(batch.digests, seen)) < len(places):
                    places, pixels = places[new], pixels[torch.from_numpy(new).to(pixels.device)]
            if not len(places):
                self.report(len(batch) * loader.ranks)
                continue
            run = run or forward(self.model, self.choice, self.by, self.runtime)
            yield (places, len(batch)), run(pixels)

    def readable(self) -> Array:
        """Return whether each image could be read, [n]; a copy of an unreadable one was not tried, and is skipped."""
        found: Array = np.asarray(self.digests.any(1))
        if not self.skipped:
            return found
        names = {int(i): self.source.names[int(i)] for i in self.missing}
        why = {self.digests[i].tobytes(): self.skipped[name] for i, name in names.items() if name in self.skipped}
        for place in np.flatnonzero(found):
            if (reason := why.get(self.digests[place].tobytes())) is not None:
                found[place] = False
                self.skipped.setdefault(self.source.names[int(place)], reason)
        return found

    def computed(self, readable: Array) -> int:
        """Return how many features were computed."""
        if self.loader is not None and self.loader.hashed:
            return len(np.unique(self.digests[readable], axis=0))
        return int(readable[self.missing].sum())


def forward(model: Backbone, choice: Choice, by: Way, runtime: Runtime | None) -> Callable[[Tensor], Tensor]:
    """Return the function from pixels [B, C, H, W] to features [B, F] in fp32, on their device.

    Args:
        model: the backbone, on its device.
        choice: the feature.
        by: how the model runs.
        runtime: its precision is that of the plain model (default: fp32).
    """
    run = by.build() if by.build else partial(choice.of, model)

    def compute(pixels: Tensor) -> Tensor:
        kind = pixels.device.type
        few = CPU_BATCH if kind == "cpu" else len(pixels)
        with evaluating(model), runtime.autocast() if runtime and not by.build else fp32_products(kind):
            return torch.cat([run(x).float() for x in pixels.split(few)])

    return compute


def need_finite(rows: Array, source: Source, index: Array) -> None:
    """Raise InputError if a feature is NaN or infinite.

    Args:
        rows: features [n, F].
        source: the images.
        index: [n] position of each image in the source.
    """
    if len(broken := np.flatnonzero(~np.isfinite(rows).all(1))):
        raise InputError(
            f"Expected finite features; {source.names[int(index[broken[0]])]} gave NaN or infinity. Use --precision "
            f"fp32, or other weights."
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
    digests, skipped = hashes(source, None, "skip")
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
        space: returns where the features belong; called in the thread.
    """

    def __init__(self, cache: FeatureCache, space: Callable[[], Space]) -> None:
        self.cache, self.space = cache, space
        self.thread, self.waiting = ThreadPoolExecutor(1), deque[Future[None]]()

    def write(self, images: Array, rows: Array) -> None:
        """Write some features soon; if an earlier batch could not be written, raise its error."""
        self.waiting.append(self.thread.submit(lambda: self.cache.write(self.space(), images, rows)))
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


def _in_thread(work: Callable[[], T]) -> Future[T]:
    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(work)
    finally:
        thread.shutdown(wait=False)


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
