"""Know your photos: problems, similar ones, duplicates, what to label next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vitkit.api.models import Model, Weights, model_of

if TYPE_CHECKING:
    from vitkit.data.doctor import Report
    from vitkit.evaluation.predict import Given
    from vitkit.jobs.search import Hit
    from vitkit.jobs.suggest import Suggestions


def doctor(
    data: Weights,
    *,
    weights: Model | None = None,
    fix: Weights | None = None,
    page: Weights | None = None,
    cache: Weights | None = None,
    device: str = "auto",
    precision: str = "auto",
    batch_size: int | None = None,
    workers: int | None = None,
) -> Report:
    """Check a data set: unreadable images, files that are not read, classes, duplicates, sizes, and doubtful labels.

    Args:
        data: anything that `vitkit.data.open_splits` accepts.
        weights: a model of any interface, or anything that `vitkit.load` accepts; its features find near-duplicates and
            suspected wrong labels (default: near-duplicates by a perceptual hash, no labels).
        fix: a new folder for a cleaned copy, or a new .csv file for a list of the good images; the data itself is never
            changed (default: neither).
        page: an HTML file with the pictures (default: none).
        cache: folder of the feature cache (default: $VITKIT_CACHE, or the user's cache folder).
        device: auto, cpu, cuda, cuda:1 or mps (default: auto).
        precision: fp32, bf16 or fp16 (default: bf16 on CUDA, fp32 elsewhere).
        batch_size: images per batch (default: 256 on CUDA for images of up to 256 pixels, 64 otherwise).
        workers: worker processes for decoding (default: one per core).

    Returns:
        The report: `problems`, `unread`, `bad`, `notes`, `duplicates`, `near`, `suspects`, `healthy` and more.

    Example:
        >>> import vitkit
        >>> vitkit.doctor("digits", workers=0).healthy
        True
    """
    from vitkit.checkpoints.outputs import check_page
    from vitkit.data.clean import check_place, clean
    from vitkit.jobs import doctor as job
    from vitkit.jobs.embed import open_cache
    from vitkit.runtime import Runtime

    if fix is not None:
        check_place(data, fix)
    if page is not None:
        check_page(page, "page")
    runtime = Runtime(device, precision) if weights is not None else None
    report = job.doctor(
        data,
        model=model_of(weights, str(runtime.device)) if weights is not None and runtime is not None else None,
        cache=open_cache(cache) if weights is not None else None,
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
    )
    if page is not None:
        job.write_page(report, page)
    if fix is not None:
        clean(report, fix)
    return report


def search(
    model: Model,
    data: Weights,
    images: Given | Iterable[Given],
    *,
    count: int = 10,
    split: str | None = None,
    features: str | None = None,
    cache: Weights | None = None,
    device: str = "auto",
    precision: str = "auto",
    batch_size: int | None = None,
    workers: int | None = None,
) -> list[list[Hit]]:
    """Find the images of a data set that are most similar to a query, by their features.

    Args:
        model: a model of any interface, or anything that `vitkit.load` accepts.
        data: anything that `vitkit.data.open_splits` accepts, or a folder of photos without classes.
        images: the queries: anything that `predict` accepts.
        count: number of images per query (default: 10).
        split: one part of the data (default: all parts).
        features: which vector, see `vitkit.features.choose` (default: what the model's own head reads).
        cache: folder of the feature cache (default: $VITKIT_CACHE, or the user's cache folder).
        device: auto, cpu, cuda, cuda:1 or mps (default: auto).
        precision: fp32, bf16 or fp16 (default: bf16 on CUDA, fp32 elsewhere).
        batch_size: images per batch (default: 256 on CUDA for images of up to 256 pixels, 64 otherwise).
        workers: worker processes for decoding (default: one per core).

    Returns:
        For each query its hits, the most similar first; each has `filepath`, `label` and `similarity`.

    Example:
        >>> import vitkit
        >>> from vitkit.data import open_source
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=0, num_hidden_layers=1)
        >>> digit = open_source("digits", "all").raw(7)[:, :, 0]
        >>> vitkit.search(model, "digits", digit, count=1, cache="cache", workers=0)[0][0].filepath
        'digit 7'
    """
    from vitkit.jobs import search as job
    from vitkit.jobs.embed import open_cache
    from vitkit.runtime import Runtime

    runtime = Runtime(device, precision)
    return job.search(
        model_of(model, str(runtime.device)),
        job.sources_of(data, split),
        images,
        open_cache(cache),
        count=count,
        features=features,
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
    )


def near_duplicates(
    model: Model,
    data: Weights,
    *,
    similarity: float | None = None,
    split: str | None = None,
    features: str | None = None,
    cache: Weights | None = None,
    device: str = "auto",
    precision: str = "auto",
    batch_size: int | None = None,
    workers: int | None = None,
) -> list[list[Hit]]:
    """Find the images of a data set that are nearly the same, within and across its parts, by their features.

    Args:
        model: a model of any interface, or anything that `vitkit.load` accepts.
        data: anything that `vitkit.data.open_splits` accepts, or a folder of photos without classes.
        similarity: smallest cosine similarity of a pair (default: high, and unusual in this data).
        split: one part of the data (default: all parts).
        features: which vector, see `vitkit.features.choose` (default: what the model's own head reads).
        cache: folder of the feature cache (default: $VITKIT_CACHE, or the user's cache folder).
        device: auto, cpu, cuda or mps (default: auto).
        precision: fp32, bf16 or fp16 (default: bf16 on CUDA, fp32 elsewhere).
        batch_size: images per batch (default: 256 on CUDA for images of up to 256 pixels, 64 otherwise).
        workers: worker processes for decoding (default: one per core).

    Returns:
        Groups of images that are joined by pairs, the largest first; each image has `filepath`, `split`, `label`, and
        its `similarity` to the first of its group.

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=0, num_hidden_layers=1)
        >>> groups = vitkit.near_duplicates(model, "digits", similarity=1, cache="cache", workers=0)
        >>> all(len(group) > 1 for group in groups)
        True
    """
    from vitkit.jobs import search as job
    from vitkit.jobs.embed import open_cache
    from vitkit.runtime import Runtime

    runtime = Runtime(device, precision)
    return job.near_duplicates(
        model_of(model, str(runtime.device)),
        job.sources_of(data, split),
        open_cache(cache),
        similarity=similarity,
        features=features,
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
    )


def suggest(
    model: Model,
    images: Given | Iterable[Given],
    *,
    count: int = 50,
    cache: Weights | None = None,
    device: str = "auto",
    precision: str = "auto",
    batch_size: int | None = None,
    workers: int | None = None,
) -> Suggestions:
    """Suggest which photos to label next: those that the model is unsure about, and that differ from each other.

    Args:
        model: the classifier so far: a model of any interface, or anything that `vitkit.load` accepts.
        images: the unlabelled photos: anything that `predict` accepts.
        count: number of photos to suggest (default: 50).
        cache: folder of the feature cache (default: $VITKIT_CACHE, or the user's cache folder).
        device: auto, cpu, cuda, cuda:1 or mps (default: auto).
        precision: fp32, bf16 or fp16 (default: bf16 on CUDA, fp32 elsewhere).
        batch_size: images per batch (default: 256 on CUDA for images of up to 256 pixels, 64 otherwise).
        workers: worker processes for decoding (default: one per core).

    Returns:
        `photos`, the most useful first, each with `image`, `guess` and `margin`; and `skipped`.

    Example:
        >>> import numpy as np, vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=3, num_hidden_layers=1)
        >>> photos = [np.full((40, 40, 3), 20 * i, np.uint8) for i in range(9)]
        >>> len(vitkit.suggest(model, photos, count=4, cache="cache", workers=0).photos)
        4
    """
    from vitkit.jobs import suggest as job
    from vitkit.jobs.embed import open_cache
    from vitkit.runtime import Runtime

    runtime = Runtime(device, precision)
    return job.suggest(
        model_of(model, str(runtime.device)),
        images,
        open_cache(cache),
        count=count,
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
    )
