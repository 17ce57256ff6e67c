"""Compute the features of a data set, and export them to a file on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vitkit.checkpoints.atomic import writing
from vitkit.checkpoints.outputs import check_file
from vitkit.data.base import Source
from vitkit.data.batch import BadImages, images_per_batch
from vitkit.data.gpu import Decode
from vitkit.data.sources import open_splits
from vitkit.errors import DataError
from vitkit.features.cache import FeatureCache
from vitkit.features.choice import choose
from vitkit.features.embed import fill
from vitkit.features.export import ARRAYS, COLUMNS, LABEL_COLUMNS, check, export
from vitkit.features.filled import Filled
from vitkit.jobs.tables import check_replaced
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import device_of
from vitkit.places import cache_folder
from vitkit.runtime import Runtime
from vitkit.speed.frozen import way
from vitkit.types import Tick


@dataclass(frozen=True)
class Embedding:
    """The result of `embed`.

    Args:
        parts: {part of the data: its features in the cache}.
        out: the exported file, if any.
    """

    parts: dict[str, Filled]
    out: Path | None


def open_cache(folder: str | Path | None, note: Callable[[str], None] | None = None) -> FeatureCache:
    """Open the feature cache in a folder (default: $VITKIT_CACHE, or the user's cache folder)."""
    return FeatureCache(folder or cache_folder(), note)


def parts_of(data: str | Path, split: str | None = None) -> dict[str, Source]:
    """Open the parts of a data set that have images.

    Args:
        data: a data set, as `open_splits` takes it.
        split: name of one part (default: all parts).
    """
    splits = open_splits(data)
    if split is not None and split not in splits:
        raise DataError(f"Expected {data} to have a part called {split}; it has {', '.join(splits)}.")
    found = {name: source() for name, source in splits.items() if split in (None, name)}
    found = {name: source for name, source in found.items() if len(source)}
    if not found:
        raise DataError(f"Expected images in {data}; it has none.")
    return found


def check_out(path: str | Path) -> Path:
    """Refuse a file that cannot be written or holds something else, before any work is done; return it expanded.

    Args:
        path: the file.
    """
    check(Path(path))
    file = check_file(path)
    check_replaced(file, *([ARRAYS] if file.suffix == ".npz" else [COLUMNS, LABEL_COLUMNS]))
    return file


def embed(
    model: Backbone,
    sources: dict[str, Source],
    cache: FeatureCache,
    *,
    features: str | None = None,
    out: str | Path | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    runtime: Runtime | None = None,
    progress: Tick | None = None,
    bad_images: BadImages = "fail",
    decode: Decode = "cpu",
) -> Embedding:
    """Fill the cache with the features of several sources; with several processes, each of them must call this.

    Args:
        model: the backbone, on its device.
        sources: {part: images}.
        cache: the feature cache.
        features: the feature, as `vitkit.features.choose` takes it (default: the model's own pooling).
        out: an .npz or .parquet file to export the features to.
        batch_size: images per batch in each process (default: see `data.batch.images_per_batch`).
        workers: worker processes for decoding; None for one per core.
        runtime: processes, device and precision.
        progress: called with the number of images finished since the last call.
        bad_images: `fail` or `skip`.
        decode: where images are decoded, `cpu` or `gpu`.
    """
    path = check_out(out) if out is not None else None
    images, name = sum(map(len, sources.values())), choose(features, model.config).name
    device = runtime.device if runtime else device_of(model)
    batch_size = images_per_batch(batch_size, model.input_spec, device)
    by = way(model, runtime.precision if runtime else "fp32", images, name, batch_size)  # the same for all parts
    parts = {
        name: fill(
            model,
            source,
            cache,
            features=features,
            batch_size=batch_size,
            workers=workers,
            runtime=runtime,
            progress=progress,
            bad_images=bad_images,
            by=by,
            decode=decode,
        )
        for name, source in sources.items()
    }
    if path is not None and (runtime is None or runtime.main):
        with writing(path) as private:
            export(parts, private)
    return Embedding(parts, path)
