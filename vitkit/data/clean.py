"""A cleaned copy of a data set, or a list of its good images. The original is only read.

Left out: images that cannot be read, images without content (a side of at most two pixels), all copies of a photo that
has two labels, training images that are also in another split, further copies within a split, and classes that the
training split does not have. A misspelt class folder gets the name it clearly stands for. Near-duplicates and suspected
labels stay: only a person can decide about them.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vitkit.data.base import NO_LABEL, SEPARATOR
from vitkit.data.doctor import Place, Report, place_of
from vitkit.data.sources import parse
from vitkit.data.survey import Problem, shown, too_few
from vitkit.data.table import cells
from vitkit.errors import DataError, OutputError
from vitkit.types import Progress

RECORD = ".json"  # ends the name of the file next to `out` that says what was left out or renamed, and why


@dataclass(frozen=True)
class Cleaned:
    """What `clean` wrote.

    Args:
        out: the folder or the .csv file.
        record: the .json file that says what was left out or renamed, and why.
        kept: number of images in it.
        left_out: {path of the image: reason} of every other image.
        renamed: {split: {class folder: the name it got}}.
        problems: what would still stop training, because only more images can mend it.
    """

    out: Path
    record: Path
    kept: int
    left_out: dict[str, str]
    renamed: dict[str, dict[str, str]]
    problems: list[Problem]


def clean(report: Report, out: str | Path, progress: Progress | None = None) -> Cleaned:
    """Write a cleaned copy of the data, or a .csv list of its good images. The original is never changed.

    Args:
        report: the report of `examine`.
        out: a new folder for copies, or a new .csv file for a list; it must be outside of the data.
        progress: called with (images done, total).

    Raises:
        DataError: the images are not files, or none is left.
        OutputError: `out` exists, lies inside of the data, or cannot be written.
    """
    path, listed, record = check_place(report.data, out)
    if any(source.place(0) is None for source in report.sources.values() if len(source)):
        raise DataError(f"Expected a folder or a table of files to clean; {report.data} has no files of its own.")
    rows, left_out = _sorted_out(report)
    if not rows:
        raise DataError(f"No image of {report.data} is left after cleaning. The report says why.")
    lost = {shown(image.split, image.name): why for image, why in left_out.items()}
    try:
        if listed:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x", newline="", encoding="utf-8", errors="surrogateescape") as file:
                writer = csv.writer(file)
                word = "labels" if report.combinations else "label"
                writer.writerow(("path", word, *(() if "all" in report.sources else ("split",))))
                for file_of, image in rows:
                    split = () if image.split == "all" else (image.split,)
                    label = "" if report.combinations and image.label == NO_LABEL else image.label
                    writer.writerow(cells((os.path.relpath(file_of, path.parent), label, *split)))
        else:
            for done, (file_of, image) in enumerate(rows, 1):
                below = Path(image.name).parts[1:]
                target = path.joinpath(*(() if image.split == "all" else (image.split,)), image.label, *below)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file_of, target)
                if progress is not None:
                    progress(done, len(rows))
        text = json.dumps({"data": report.data, "left_out": lost, "renamed": report.renames}, indent=1)
        record.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)
        raise OutputError(f"The cleaned data could not be written to {path}: {error.strerror}.") from error
    counts = {split: Counter[str]() for split in report.sources}
    for _, image in rows:
        counts[image.split].update(image.label.split(SEPARATOR) if report.combinations else [image.label])
        if report.combinations:
            del counts[image.split][NO_LABEL]
    short = [problem for problem in too_few(counts, bool(report.combinations)) if problem.level == "bad"]
    return Cleaned(path, record, len(rows), lost, report.renames, short)


def check_place(data: str | Path, out: str | Path) -> tuple[Path, bool, Path]:
    """Refuse a place where nothing may be written, before any work is done.

    Args:
        data: the data set.
        out: where its cleaned copy or list should go.

    Returns:
        The path, whether it is a list, and the path of the record.
    """
    path = Path(out).expanduser()
    kind, place = parse(data)
    listed, record = path.suffix.lower() == ".csv", Path(f"{path}{RECORD}")
    if kind not in ("folder", "food", "csv", "parquet"):
        raise DataError(f"Expected a folder or a table of files to clean; {data} is a {kind!r} source.")
    if kind not in ("folder", "food") and not listed:
        raise DataError(f"Expected a name that ends in .csv: the images of {data} can be listed, not copied.")
    if there := next((one for one in (path, record) if one.exists()), None):
        raise OutputError(f"--fix needs a new folder or .csv file; {there} exists. Choose another.")
    if place and Path(place).is_dir() and Path(place).resolve() in path.resolve().parents:
        raise OutputError(f"--fix needs a place outside of the data; {path} is in {place}. Choose another.")
    return path, listed, record


def _sorted_out(report: Report) -> tuple[list[tuple[Path, Place]], dict[Place, str]]:
    """Return (file, image with its final label) of the images to keep, and {image: reason} of the others."""
    left_out = dict(_left_out(report))
    kept: list[tuple[Path, Place, Place]] = []
    for split, source in report.sources.items():
        for i in range(len(source)):
            image, file = place_of(source, split, i), source.place(i)
            if image not in left_out and file is not None:
                kept.append((file, image, image._replace(label=report.label(image))))
    if report.combinations:  # a combination of labels needs no training images of its own
        return [(file, new) for file, _, new in kept], left_out
    first = next(iter(report.sources))
    known = {new.label for _, _, new in kept if new.split == first}
    left_out |= {old: f"no training images of class {new.label!r}" for _, old, new in kept if new.label not in known}
    return [(file, new) for file, _, new in kept if new.label in known], left_out


def _left_out(report: Report) -> Iterator[tuple[Place, str]]:
    """Yield the images to leave out for their own sake, and why; the reason given last counts."""
    for group in report.duplicates:
        of_split = {split: [place for place in group if place.split == split] for split in report.sources}
        judged = next((places[0] for split, places in of_split.items() if split != "train" and places), None)
        for split, places in of_split.items():
            if split == "train" and judged is not None:
                yield from ((place, f"also in {judged.split}: {judged.name}") for place in places)
            yield from ((place, f"a copy of {places[0].name}") for place in places[1:])
    for group in report.conflicts:
        labels = " and ".join(sorted({place.label for place in group}))
        yield from ((place, f"the same photo has the labels {labels}") for place in group)
    reasons = {(found.split, found.name): found.reason for found in report.findings if found.useless}
    for split, source in report.sources.items() if reasons else ():
        for i, name in enumerate(source.names):
            if (split, name) in reasons:
                yield place_of(source, split, i), reasons[split, name]
