"""The doctor: everything about a data set that stops or misleads training, and with weights also doubtful labels."""

from __future__ import annotations

import logging
import time
from itertools import chain
from pathlib import Path

import numpy as np

from vitkit.checkpoints.atomic import writing
from vitkit.checkpoints.outputs import check_page
from vitkit.data.doctor import Report, Suspect, examine, place_of
from vitkit.data.near import close_features, groups
from vitkit.errors import DataError
from vitkit.features.cache import FeatureCache
from vitkit.features.embed import fill
from vitkit.features.labels import rank
from vitkit.model.backbone import Backbone
from vitkit.reports import doctor_page
from vitkit.runtime import Runtime
from vitkit.types import Progress, Tick

log = logging.getLogger("vitkit")

__all__ = ["doctor", "examine", "look_at_features", "write_page"]


def doctor(
    data: str | Path,
    *,
    model: Backbone | None = None,
    cache: FeatureCache | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    runtime: Runtime | None = None,
    progress: Progress | None = None,
) -> Report:
    """Examine a data set; with a model, also compare the features of its images.

    Args:
        data: a data set, as `open_splits` takes it.
        model: a pre-trained model; its features find near-duplicates and suspected labels (default: none).
        cache: the feature cache; needed with a model.
        batch_size: images per batch (default: see `data.batch.images_per_batch`).
        workers: worker processes for decoding (default: one per core).
        runtime: device and precision of the model.
        progress: called with (images decoded, total).
    """
    report = examine(data, workers=workers, progress=progress)
    if model is not None and cache is not None:
        look_at_features(report, model, cache, batch_size=batch_size, workers=workers, runtime=runtime)
    return report


def look_at_features(
    report: Report,
    model: Backbone,
    cache: FeatureCache,
    *,
    batch_size: int | None = None,
    workers: int | None = None,
    runtime: Runtime | None = None,
    progress: Tick | None = None,
) -> None:
    """Add near-duplicates by features and suspected wrong labels to a report.

    Args:
        report: the report of `examine`; it is changed.
        model: a pre-trained model, on its device.
        cache: the feature cache.
        batch_size: images per batch (default: see `data.batch.images_per_batch`).
        workers: worker processes for decoding (default: one per core).
        runtime: device and precision.
        progress: called with the number of images finished since the last call.
    """
    start = time.monotonic()
    filled = {
        split: fill(
            model,
            source,
            cache,
            batch_size=batch_size,
            workers=workers,
            runtime=runtime,
            progress=progress,
            bad_images="skip",
        )
        for split, source in report.sources.items()
        if len(source)
    }
    found = {split: part.read() for split, part in filled.items()}
    images = [place_of(report.sources[split], split, int(i)) for split, part in found.items() for i in part.index]
    X = np.concatenate([part.features for part in found.values()])
    copies = {image: n for n, group in enumerate(report.duplicates) for image in group}
    row = {image[:2]: i for i, image in enumerate(images)}
    hashed = [[row[image[:2]] for image in group if image[:2] in row] for group in report.near]
    pairs = chain(((group[0], other) for group in hashed for other in group[1:]), close_features(X))
    joined = [[images[i] for i in group] for group in groups(pairs)]
    report.near = [g for g in joined if len({copies.get(image, (image.split, image.name)) for image in g}) > 1]
    if report.combinations:
        log.warning("Suspected wrong labels are found only where images have one class; these have several labels.")
        report.seconds += time.monotonic() - start
        return
    names = sorted({report.label(image) for image in images})
    number = {name: k for k, name in enumerate(names)}
    y = np.array([number[report.label(image)] for image in images])
    try:
        ranking = rank(X, y)
    except DataError as error:
        log.warning("%s", error)
        report.suspects = []
        return
    report.suspects = [
        Suspect(images[i], names[int(ranking.suggested[i])], float(ranking.confidence[i])) for i in ranking.suspects(y)
    ]
    report.seconds += time.monotonic() - start


def write_page(report: Report, path: str | Path) -> Path:
    """Write the report with its pictures as one HTML file, and return its path.

    Args:
        report: the doctor's report.
        path: the file.
    """
    path = check_page(path, "--page")
    with writing(path) as private:
        private.write_text(doctor_page(report), encoding="utf-8", errors="surrogateescape")
    return path
