"""Predictions -> a table with one row per image."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from vitkit.checkpoints.atomic import staging
from vitkit.evaluation.names import cells
from vitkit.evaluation.predict import Images, predictions
from vitkit.model.classifier import Classifier
from vitkit.types import Tick

COLUMNS = ("image", "class", "index", "probability", "distance", "error")


@dataclass(frozen=True)
class Answers:
    """What `write_answers` wrote: its file, and how many images are none of the classes or could not be read."""

    path: Path
    none: int
    bad: int


def write_answers(
    model: Classifier,
    source: Images,
    out: str | Path,
    *,
    batch_size: int = 64,
    workers: int | None = 0,
    progress: Tick | None = None,
) -> Answers:
    """Classify images and write a .csv file with one row per image, in their order.

    An image that is none of the classes has the class "none of these" and no index; one that could not be read has
    only an error. Cells that a spreadsheet would run as formulas are written as text.

    Args:
        model: the classifier.
        source: the images.
        out: the file; it is complete or not there.
        batch_size: images per batch.
        workers: worker processes for decoding; None for one per core.
        progress: called with the number of images finished since the last call.
    """
    path, bad, none = Path(out).expanduser(), dict[str, str](), 0
    with (
        staging(path.parent) as beside,
        open(beside / path.name, "w", encoding="utf-8", errors="surrogateescape", newline="") as file,
    ):
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(COLUMNS)
        names = iter(source.names)

        def until(name: str | None) -> None:
            """Write the rows of the images before `name`, none of which could be read."""
            for other in names:
                if other == name:
                    return
                lines.writerow(cells((other, "", "", "", "", bad.get(other, "could not be read"))))

        for found in predictions(
            model,
            source,
            top=1,
            batch_size=batch_size,
            workers=workers,
            bad_images="skip",
            on_bad=lambda name, why: bad.update({name: why}),
        ):
            until(found.image)
            none += found.none_of_these
            lines.writerow(
                cells(
                    (
                        found.image,
                        found.name,
                        "" if found.none_of_these else found.guesses[0].index,
                        f"{found.probability:.6f}",
                        "" if found.distance is None else f"{found.distance:.4f}",
                        "",
                    )
                )
            )
            if progress is not None:
                progress(1)
        until(None)
    return Answers(path, none, len(bad))
