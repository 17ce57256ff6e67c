"""The photos of a run for its page: held-out ones to try, and training ones that are similar to a photo.

Nothing is computed here: similar photos are found with the features that `vitkit probe` (or `embed`, or `search`) left
in the cache. Files are hashed in a thread, because a large data set takes a while.
"""

from __future__ import annotations

import io
import logging
import threading
from pathlib import Path

import numpy as np
from PIL import Image

from vitkit.data.base import Source, Subset
from vitkit.data.decode import decode, header
from vitkit.data.sources import open_splits, parse
from vitkit.errors import DataError, VitkitError
from vitkit.features.embed import cached
from vitkit.features.search import Vectors, vectors
from vitkit.jobs.embed import open_cache
from vitkit.jobs.evaluate import part_of
from vitkit.model.backbone import Backbone
from vitkit.places import cache_folder
from vitkit.training.run_folder import RunFolder
from vitkit.types import Array

log = logging.getLogger("vitkit")
SAMPLES = 6  # photos to try
SMALL = 240  # pixels, longest side of a thumbnail
SHOWN = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp", "GIF": "image/gif", "BMP": "image/bmp"}


class RunPhotos:
    """The photos of a run, numbered: the training photos first, then the held-out ones.

    Args:
        train: the training photos.
        held: the photos to try.
        model: the run's model, whose features are looked up.
        cache: folder of the feature cache (default: the user's).
    """

    def __init__(self, train: Source, held: Source, model: Backbone, cache: str | Path | None = None) -> None:
        self.train, self.held = train, held
        self.samples = tuple(len(train) + i for i in spread(held.labels, SAMPLES))
        self._vectors: Vectors | None = None
        self._thread = threading.Thread(target=self._look_up, args=(model, cache), name="vitkit-photos", daemon=True)
        self._thread.start()

    def _look_up(self, model: Backbone, cache: str | Path | None) -> None:
        try:
            kept = open_cache(cache)
            filled = cached(model, self.train, kept)
            self._vectors = vectors(filled) if filled is not None else None
            kept.close()
        except VitkitError as error:
            log.warning("the page shows no similar photos: %s", error)

    def wait(self) -> None:
        """Wait until the features have been looked up."""
        self._thread.join()

    @property
    def searchable(self) -> bool:
        """Whether the features of the training photos were in the cache."""
        return self._vectors is not None

    def __len__(self) -> int:
        return len(self.train) + len(self.held)

    def _find(self, number: int) -> tuple[Source, int]:
        n = len(self.train)
        return (self.train, number) if number < n else (self.held, number - n)

    def label(self, number: int) -> str:
        """Return the class of a photo, or its labels."""
        source, i = self._find(number)
        return source.said(i)

    def file(self, number: int) -> tuple[bytes, str]:
        """Return a photo and its content type: its own bytes if browsers show its format, otherwise a PNG."""
        source, i = self._find(number)
        raw = source.raw(i)
        if isinstance(raw, bytes):
            kind = header(raw, source.names[i]).format
            if kind in SHOWN:
                return raw, SHOWN[kind]
        out = io.BytesIO()
        decode(raw, source.names[i]).save(out, "PNG")
        return out.getvalue(), "image/png"

    def image(self, number: int) -> Image.Image:
        """Return a decoded photo."""
        source, i = self._find(number)
        return source.read(i)[0]

    def thumbnail(self, number: int) -> bytes:
        """Return a small JPEG of a photo."""
        image, out = self.image(number).convert("RGB"), io.BytesIO()
        image.thumbnail((SMALL, SMALL))
        image.save(out, "JPEG", quality=85)
        return out.getvalue()

    def nearest(self, features: Array, count: int) -> list[list[tuple[int, float]]]:
        """Return the most similar training photos for each row of features [m, F], and their cosine similarities."""
        assert self._vectors is not None
        places, values = self._vectors.search(features, count)
        return [[(int(i), float(v)) for i, v in zip(*row, strict=True)] for row in zip(places, values, strict=True)]


def spread(labels: Array, count: int) -> list[int]:
    """Return positions of `count` images: each class in turn, spread over its images.

    Args:
        labels: [N] classes; of several labels, [N, K], the first of each image counts.
        count: number of positions; fewer if there are fewer images.
    """
    if labels.ndim == 2:
        labels = np.where(labels.any(1), labels.argmax(1), labels.shape[1])
    classes = [np.flatnonzero(labels == k) for k in np.unique(labels)]
    turns = -(-count // max(len(classes), 1))
    rows = [places[np.unique(np.linspace(0, len(places) - 1, turns + 2).astype(int)[1:-1])] for places in classes]
    found = [int(row[turn]) for turn in range(turns) for row in rows if turn < len(row)]
    return found[:count]


def open_photos(source: str | Path, model: Backbone, cache: str | Path | None = None) -> RunPhotos | None:
    """Open the photos of a run, if its data is at hand; nothing is downloaded.

    Args:
        source: the run folder, as `vitkit.load` accepts it; None is returned for anything else.
        model: its model.
        cache: folder of the feature cache (default: the user's).
    """
    folder = Path(str(source).partition("@")[0]).expanduser()
    try:
        if not RunFolder.exists(folder):
            return None
        run = RunFolder.open(folder)
        if not run.data or not _at_hand(run.data):
            return None
        with run.reading():
            train, held = _parts(run)
        return RunPhotos(train, held, model, cache)
    except VitkitError as error:
        log.warning("the page shows no photos of the run: %s", error)
        return None


def _at_hand(data: str) -> bool:
    kind, place = parse(data)
    if place:
        return Path(place).exists()
    return kind in ("digits", "digit-pairs") or (kind == "food" and (cache_folder() / "pizza_steak_sushi").is_dir())


def _parts(run: RunFolder) -> tuple[Source, Source]:
    """Return the photos that a run was fitted to, and those to try."""
    splits = open_splits(run.data)
    whole = splits["train" if "train" in splits else "all"]()
    try:
        held, _ = part_of(run.data, None, run)
    except DataError:  # it was fitted to all of them
        return whole, whole
    if isinstance(held, Subset) and not {"test", "val"} & set(splits):
        return Subset(whole, np.setdiff1d(np.arange(len(whole)), held.indices.numpy())), held
    return whole, held
