"""Predictions -> a table with one row per image."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from vitkit.checkpoints.atomic import writing
from vitkit.checkpoints.outputs import check_file
from vitkit.data.base import SEPARATOR
from vitkit.data.table import cells
from vitkit.evaluation.predict import Images, Prediction, predictions
from vitkit.jobs.tables import check_replaced
from vitkit.model.classifier import Classifier
from vitkit.runtime import Runtime
from vitkit.types import Tick

COLUMNS = ("image", "class", "index", "probability", "distance", "error")
LABEL_COLUMNS = ("image", "labels", "probabilities", "error")  # of a model that gives an image any number of labels


@dataclass(frozen=True)
class Answers:
    """What `write_answers` wrote: its file, and how many images got no class or label or could not be read."""

    path: Path
    none: int
    bad: int


def check_out(path: str | Path) -> Path:
    """Refuse a file that cannot be written or holds something else, before any work is done; return it expanded.

    Args:
        path: the file.
    """
    file = check_file(path, (".csv",), "--out")
    check_replaced(file, COLUMNS, LABEL_COLUMNS)
    return file


def write_answers(
    model: Classifier,
    source: Images,
    out: str | Path,
    *,
    batch_size: int = 64,
    workers: int | None = 0,
    progress: Tick | None = None,
    runtime: Runtime | None = None,
) -> Answers:
    """Classify images and write a .csv file with one row per image, in their order.

    An image that is none of the classes has the class "none of these" and no index; one that could not be read has
    only an error. Cells that a spreadsheet would run as formulas are written as text. A model that gives an image any
    number of labels writes them as `cat|dog`, with their probabilities in the same order: the file is a data set.

    Args:
        model: the classifier.
        source: the images.
        out: the file; it is complete or not there.
        batch_size: images per batch.
        workers: worker processes for decoding; None for one per core.
        progress: called with the number of images finished since the last call.
        runtime: sets the precision; see `evaluation.predict.runs` (default: fp32).
    """
    path, bad, none = check_out(out), dict[str, str](), 0
    columns = LABEL_COLUMNS if model.input_spec.several else COLUMNS
    with (
        writing(path) as private,
        open(private, "w", encoding="utf-8", errors="surrogateescape", newline="") as file,
    ):
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(columns)
        names = iter(source.names)

        def until(name: str | None) -> None:
            """Write the rows of the images before `name`, none of which could be read."""
            for other in names:
                if other == name:
                    return
                blank = [""] * (len(columns) - 2)
                lines.writerow(cells((other, *blank, bad.get(other, "could not be read"))))

        for found in predictions(
            model,
            source,
            top=1,
            batch_size=batch_size,
            workers=workers,
            bad_images="skip",
            on_bad=lambda name, why: bad.update({name: why}),
            runtime=runtime,
        ):
            until(found.image)
            none += found.none_of_these or found.labels == ()
            lines.writerow(cells(_row(found)))
            if progress is not None:
                progress(1)
        until(None)
    return Answers(path, none, len(bad))


def _row(found: Prediction) -> tuple[object, ...]:
    """Return the row of one image that could be read."""
    if found.labels is not None:
        names = SEPARATOR.join(one.name for one in found.labels)
        return found.image, names, SEPARATOR.join(f"{one.probability:.6f}" for one in found.labels), ""
    return (
        found.image,
        found.name,
        "" if found.none_of_these else found.guesses[0].index,
        f"{found.probability:.6f}",
        "" if found.distance is None else f"{found.distance:.4f}",
        "",
    )
