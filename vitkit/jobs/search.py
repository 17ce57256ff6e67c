"""Search a data set for the images that are most similar to a query."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.checkpoints.atomic import writing
from vitkit.checkpoints.outputs import check_file
from vitkit.data.base import Source
from vitkit.data.batch import BadImages
from vitkit.data.near import close_features, groups
from vitkit.data.table import cells
from vitkit.errors import ConfigError, DataError, MissingDependency
from vitkit.evaluation.predict import Given, Images
from vitkit.features.cache import FeatureCache
from vitkit.features.embed import fill
from vitkit.features.search import vectors
from vitkit.jobs.embed import parts_of
from vitkit.jobs.tables import check_replaced
from vitkit.model.backbone import Backbone
from vitkit.runtime import Runtime
from vitkit.types import Tick

COLUMNS = ("query", "rank", "filepath", "split", "label", "similarity")  # `filepath` is the name FiftyOne expects


@dataclass(frozen=True)
class Hit:
    """One image that was found.

    Args:
        query: name of the query.
        rank: 1 for the most similar.
        filepath: the image's file, or its name if it has no file of its own.
        split: its part of the data.
        label: its class; empty if the data has none.
        similarity: cosine similarity of the features, at most 1.
    """

    query: str
    rank: int
    filepath: str
    split: str
    label: str
    similarity: float


def sources_of(data: str | Path, split: str | None = None) -> dict[str, Source]:
    """Open a data set, or a plain folder of photos without classes.

    Args:
        data: a data set, as `open_splits` takes it, or a folder of photos.
        split: one part of the data (default: all parts).
    """
    try:
        return parts_of(data, split)
    except DataError:
        folder = Path(data).expanduser()
        if split is None and folder.is_dir():
            return {"all": Images(folder)}
        raise


def search(
    model: Backbone,
    sources: dict[str, Source],
    queries: Given | Iterable[Given],
    cache: FeatureCache,
    *,
    count: int = 10,
    features: str | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    runtime: Runtime | None = None,
    progress: Tick | None = None,
    bad_images: BadImages = "skip",
    on_bad: Callable[[str, str], None] = lambda name, why: None,
) -> list[list[Hit]]:
    """Find the images that are most similar to each query, exactly.

    Args:
        model: the backbone, on its device.
        sources: {part: images}; see `sources_of`.
        queries: anything that `predict` accepts.
        cache: the feature cache.
        count: number of images per query.
        features: the feature, as `vitkit.features.choose` takes it (default: the model's own pooling).
        batch_size: images per batch (default: see `data.batch.images_per_batch`).
        workers: worker processes for decoding; None for one per core.
        runtime: device and precision.
        progress: called with the number of images finished since the last call.
        bad_images: `fail` or `skip`, for the images of the data; a query must be readable.
        on_bad: called with (name, reason) for every image that is skipped.
    """
    if count < 1:
        raise ConfigError(f"count must be at least 1; got {count}.")
    how: dict[str, Any] = {"features": features, "batch_size": batch_size, "runtime": runtime}
    asked = fill(model, Images(queries), cache, workers=0, **how).read()
    found: list[list[Hit]] = [[] for _ in asked.names]
    for split, source in sources.items():
        filled = fill(model, source, cache, workers=workers, progress=progress, bad_images=bad_images, **how)
        rows = vectors(filled)
        places, similarity = rows.search(asked.features, count)
        for q, query in enumerate(asked.names):
            for i, value in zip(places[q], similarity[q], strict=True):
                found[q].append(_hit(query, 0, (split, source, int(i)), float(value)))
        for name, why in filled.skipped:
            on_bad(name, why)
    best = [sorted(hits, key=lambda hit: -hit.similarity)[:count] for hits in found]
    return [[Hit(**{**asdict(hit), "rank": n}) for n, hit in enumerate(hits, 1)] for hits in best]


def near_duplicates(
    model: Backbone,
    sources: dict[str, Source],
    cache: FeatureCache,
    *,
    similarity: float | None = None,
    features: str | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    runtime: Runtime | None = None,
    progress: Tick | None = None,
    bad_images: BadImages = "skip",
    on_bad: Callable[[str, str], None] = lambda name, why: None,
) -> list[list[Hit]]:
    """Find the images of a data set that are nearly the same, within and across its parts.

    Args:
        model: the backbone, on its device.
        sources: {part: images}; see `sources_of`.
        cache: the feature cache.
        similarity: smallest cosine similarity of a pair (default: as `vitkit doctor --from` has it, see data/near.py).
        features: the feature, as `vitkit.features.choose` takes it (default: the model's own pooling).
        batch_size: images per batch (default: see `data.batch.images_per_batch`).
        workers: worker processes for decoding; None for one per core.
        runtime: device and precision.
        progress: called with the number of images finished since the last call.
        bad_images: `fail` or `skip`.
        on_bad: called with (name, reason) for every image that is skipped.

    Returns:
        Groups of images that are joined by pairs, the largest first. The first image of a group is the `query` that
        all of its images are compared with.
    """
    if similarity is not None and not 0 < similarity <= 1:
        raise ConfigError(f"Expected a similarity above 0 and at most 1; got {similarity:g}.")
    how: dict[str, Any] = {"features": features, "batch_size": batch_size, "runtime": runtime, "workers": workers}
    found = []
    for split, source in sources.items():
        filled = fill(model, source, cache, progress=progress, bad_images=bad_images, **how)
        found.append((split, source, vectors(filled)))
        for name, why in filled.skipped:
            on_bad(name, why)
    rows = np.concatenate([one.rows() for _, _, one in found])
    places = [(split, source, int(i)) for split, source, one in found for i in one.index]
    joined = groups(close_features(rows, similarity))
    return [
        [
            _hit(str(_file(places[group[0]])), n, places[i], float(rows[group[0]] @ rows[i]))
            for n, i in enumerate(group, 1)
        ]
        for group in sorted(joined, key=len, reverse=True)
    ]


def _file(place: tuple[str, Source, int]) -> str:
    """Return an image's file, or its name if it has no file of its own."""
    _, source, i = place
    file = source.place(i)
    return str(file if file is not None else source.names[i])


def _hit(query: str, rank: int, place: tuple[str, Source, int], similarity: float) -> Hit:
    split, source, i = place
    label = "" if isinstance(source, Images) else source.said(i)
    return Hit(query, rank, _file(place), split, label, float(np.clip(similarity, -1, 1)))


def check_export(path: str | Path) -> None:
    """Refuse a file that cannot be written or holds something else, before any work is done.

    Args:
        path: the file.
    """
    file = check_file(path, (".csv", ".parquet"), "--export")
    if file.suffix.lower() == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise MissingDependency("Writing Parquet needs pyarrow: pip install 'vitkit[data]'") from error
    check_replaced(file, COLUMNS)


def export_hits(hits: Sequence[Sequence[Hit]], path: str | Path) -> Path:
    """Write hits to a .parquet file, or to a .csv file that FiftyOne reads (its CSVDataset; the media are `filepath`).

    Args:
        hits: the result of `search` or `near_duplicates`.
        path: the file; its ending selects the format.
    """
    path = Path(path).expanduser()
    check_export(path)
    rows = [asdict(hit) for one in hits for hit in one]
    for row in rows:
        if Path(row["filepath"]).exists():
            row["filepath"] = str(Path(row["filepath"]).absolute())
    with writing(path) as private:
        if path.suffix.lower() == ".csv":
            with open(private, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(COLUMNS)
                writer.writerows(cells(row[name] for name in COLUMNS) for row in rows)
        else:
            import pyarrow.parquet

            arrow: Any = pyarrow
            table = arrow.table({name: [row[name] for row in rows] for name in COLUMNS})
            arrow.parquet.write_table(table, private)
    return path
