"""A table of images: a .csv or .parquet file with one row per image, and optionally a column `split`.

    path,label          one class per image
    image,labels        any number of labels per image, separated by |; an empty cell is an image without labels
    image,cat,dog,...   the same, as one column per label with 0 or 1

Semicolons may take the place of the commas. Lists of names in a .parquet file are labels too. Every .csv file that
vitkit writes passes through `cells`, which keeps spreadsheets from running what it says; reading takes that back.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from vitkit.data.base import SEPARATOR, Source, Splits
from vitkit.data.folder import SPLIT_FOLDERS, Files
from vitkit.data.string_table import natural
from vitkit.errors import DataError, MissingDependency
from vitkit.types import Array

# The names that each column may have; the first is the preferred one.
COLUMNS: dict[str, tuple[str, ...]] = {
    "path": ("path", "file", "file_name", "filename", "image", "image_path"),
    "label": ("label", "class", "class_name", "target"),
    "labels": ("labels", "tags"),
    "split": ("split", "subset"),
}
PRESENT: dict[str, int] = {"1": 1, "1.0": 1, "true": 1, "0": 0, "0.0": 0, "false": 0}  # cells of a column per label
FORMULA = re.compile(r"'*[=+@\t\r-](?![\d.]+(e[+-]?\d+)?$)")  # what a spreadsheet runs, and not a number
MakeFiles = Callable[[list[str], Array, list[str]], Source]  # paths, labels and names of the classes -> a source
Where = Callable[[int], str]  # row -> the file and the line, for messages


def cells(row: Iterable[object]) -> list[object]:
    """Return a row for a CSV file, with an apostrophe before text that a spreadsheet would run as a formula."""
    return [f"'{one}" if isinstance(one, str) and FORMULA.match(one) else one for one in row]


def _text(cell: str) -> str:
    """Return what a cell says, without the apostrophe of `cells`."""
    cell = cell.strip()
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def splits_csv(place: str) -> Splits:
    """Return the splits of a .csv file.

    Args:
        place: the file; paths in it are relative to its folder.
    """
    path = Path(place).expanduser()
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return of_csv(str(path), file, partial(Files, path.parent))
    except OSError as error:
        raise DataError(f"Expected a .csv file in UTF-8 at {place}: {error}.") from error


def of_csv(place: str, file: TextIO, files: MakeFiles) -> Splits:
    """Return the splits of an open .csv file.

    Args:
        place: its name, for messages.
        file: the file.
        files: makes the source of some of its rows.
    """
    try:
        first = file.readline()
        # Excel separates by semicolons where the comma is the decimal point.
        mark = ";" if ";" in first and "," not in first else ","
        reader = csv.reader(chain([first] if first else [], file), delimiter=mark)
        rows = [(reader.line_num, row) for row in reader]
    except UnicodeDecodeError as error:
        raise DataError(
            f"Expected a .csv file in UTF-8 at {place}; it is in another encoding. In a spreadsheet, save it as CSV "
            f"UTF-8."
        ) from error
    except (OSError, csv.Error) as error:
        raise DataError(f"Expected a .csv file in UTF-8 at {place}: {error}.") from error
    if not rows:
        raise DataError(f"Expected the heading path,label and one line per image; {place} is empty.")
    heading = [_text(cell) for cell in rows[0][1]]
    lines = [(number, row) for number, row in rows[1:] if row]
    for number, row in lines:
        if len(row) != len(heading):
            raise DataError(
                f"{place}, line {number}: expected {len(heading)} cells, as in the heading; got {len(row)}."
            )
    columns = {name: [_text(row[i]) for _, row in lines] for i, name in enumerate(heading)}
    return _splits(place, heading, columns, lambda row: f"{place}, line {lines[row][0]}", files)


def splits_parquet(place: str) -> Splits:
    """Return the splits of a .parquet file.

    Args:
        place: the file; paths in it are relative to its folder.
    """
    path = Path(place).expanduser()
    return of_parquet(str(path), path, partial(Files, path.parent))


def of_parquet(place: str, file: Path | BinaryIO, files: MakeFiles) -> Splits:
    """Return the splits of a .parquet file.

    Args:
        place: its name, for messages.
        file: its path, or the open file.
        files: makes the source of some of its rows.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependency("Reading .parquet needs pyarrow: pip install 'vitkit[data]'.") from error
    try:
        heading = list(parquet.read_schema(file).names)  # type: ignore[no-untyped-call]
        known = [name for names in COLUMNS.values() for name in names if name in heading]
        given = any(name in heading for kind in ("label", "labels") for name in COLUMNS[kind])
        columns = parquet.read_table(file, columns=known if given else heading).to_pydict()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise DataError(f"Expected a .parquet file at {place}: {error}.") from error
    return _splits(place, heading, columns, lambda row: f"{place}, row {row + 2}", files)


def _splits(
    path: str, heading: Sequence[str], columns: Mapping[str, list[Any]], where: Where, files: MakeFiles
) -> Splits:
    of = {kind: next((n for n in names if n in heading), None) for kind, names in COLUMNS.items()}
    if of["path"] is None:
        raise DataError(f"Expected a column 'path' in {path}; its columns are: {', '.join(heading)}.")
    names = columns[of["path"]]
    if of["label"] is not None and of["labels"] is not None:
        raise DataError(
            f"Expected one column of labels in {path}; got {of['label']!r} (one class per image) and {of['labels']!r} "
            f"(any number of labels). Remove one of them."
        )
    for row, name in enumerate(names):
        if not isinstance(name, str) or not name:
            value = columns[of["label"]][row] if of["label"] is not None else None
            raise DataError(f"{where(row)}: expected a path and a label; got {name!r} and {value!r}.")
    rows = _rows(columns[of["split"]], where) if of["split"] is not None else {"all": list(range(len(names)))}
    class_names, labels, layout = _labels(path, heading, of, columns, where)

    def read(chosen: list[int]) -> Source:
        source = files([names[r] for r in chosen], labels[chosen], class_names)
        source.layout = layout
        return source

    return {split: partial(read, chosen) for split, chosen in rows.items()}


def _rows(words: Sequence[Any], where: Where) -> dict[str, list[int]]:
    """Return the rows of each split."""
    meaning = {word: split for split, words in SPLIT_FOLDERS.items() for word in words}
    rows: dict[str, list[int]] = {}
    for row, word in enumerate(words):
        if str(word).lower() not in meaning:
            raise DataError(f"{where(row)}: expected one of {', '.join(meaning)}; got split {word!r}.")
        rows.setdefault(meaning[str(word).lower()], []).append(row)
    return rows


def _labels(
    path: str, heading: Sequence[str], of: Mapping[str, str | None], columns: Mapping[str, list[Any]], where: Where
) -> tuple[list[str], Array, str]:
    """Return the names of the classes or labels, [N] classes or [N, K] labels, and where the latter stand."""
    column = of["label"] or of["labels"]
    if column is None:
        used = {name for name in of.values() if name is not None}
        class_names = [name for name in heading if name not in used]
        labels = _by_column(path, class_names, columns, where)
        how = "one column per label"
    else:
        values = columns[column]
        several = [isinstance(value, list | tuple) or SEPARATOR in str(value) for value in values]
        if of["labels"] is None and not any(several):
            return *_classes(values, where), ""
        cells = [_cell(value, where, row) for row, value in enumerate(values)]
        class_names = sorted({name for cell in cells for name in cell}, key=natural)
        number = {name: k for k, name in enumerate(class_names)}
        labels = np.zeros((len(cells), len(class_names)), np.uint8)
        for row, cell in enumerate(cells):
            labels[row, [number[name] for name in cell]] = 1
        how = f"column {column!r}"
        if of["labels"] is None:
            how += f", because of {SEPARATOR!r} in {where(several.index(True)).rpartition(', ')[2]}"
    if not class_names:
        raise DataError(
            f"Expected a column 'label', a column 'labels' or one column per label in {path}; got no labels at all."
        )
    return class_names, labels, how


def _missing(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _classes(values: Sequence[Any], where: Where) -> tuple[list[str], Array]:
    """Return the names of the classes, and the class of each row."""
    for row, value in enumerate(values):
        if _missing(value):
            raise DataError(
                f"{where(row)}: expected a path and a label; got no label. If images may have several labels or none, "
                f"call the column 'labels'."
            )
    class_names = sorted(set(map(str, values)), key=natural)
    number = {name: k for k, name in enumerate(class_names)}
    return class_names, np.array([number[str(value)] for value in values], np.int32)


def _cell(value: Any, where: Where, row: int) -> list[str]:
    """Return the labels in one cell: `a|b`, a list of names, or nothing."""
    if not isinstance(value, list | tuple):
        value = [] if _missing(value) else str(value).split(SEPARATOR)
    names = [str(name).strip() for name in value]
    if "" in names:
        raise DataError(f"{where(row)}: expected labels separated by {SEPARATOR}; got an empty one in {value!r}.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{where(row)}: expected each label once; got {twice!r} twice.")
    return names


def _by_column(path: str, names: Sequence[str], columns: Mapping[str, list[Any]], where: Where) -> Array:
    """Return [N, K] labels from one column of zeros and ones per label."""
    if twice := [name for name in names if names.count(name) > 1 or SEPARATOR in name or not name]:
        raise DataError(
            f"Expected different names of labels without {SEPARATOR} in the heading of {path}; got {twice[0]!r}."
        )
    labels = np.zeros((len(next(iter(columns.values()))), len(names)), np.uint8)
    for k, name in enumerate(names):
        for row, value in enumerate(columns[name]):
            if (found := PRESENT.get(str(value).lower())) is None:
                raise DataError(
                    f"{where(row)}: expected 0 or 1 in column {name!r}, because {Path(path).name} has no column "
                    f"'label' or 'labels', so each other column is a label; got {value!r}."
                )
            labels[row, k] = found
    return labels
