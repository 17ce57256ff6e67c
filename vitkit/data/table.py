"""A table of images: a .csv or .parquet file with the columns path, label and, optionally, split."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vitkit.data.base import Source, Splits
from vitkit.data.folder import SPLIT_FOLDERS, Files
from vitkit.data.string_table import natural
from vitkit.errors import DataError, MissingDependency

# The names that each column may have; the first is the preferred one.
COLUMNS: dict[str, tuple[str, ...]] = {
    "path": ("path", "file", "file_name", "filename", "image", "image_path"),
    "label": ("label", "class", "class_name", "target"),
    "split": ("split", "subset"),
}


def splits_csv(place: str) -> Splits:
    """Return the splits of a .csv file.

    Args:
        place: the file; paths in it are relative to its folder.
    """
    path = Path(place).expanduser()
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"Expected a .csv file in UTF-8 at {place}: {error}.") from error
    if not rows:
        raise DataError(f"Expected the heading path,label and one line per image; {place} is empty.")
    heading = [cell.strip() for cell in rows[0]]
    lines = [(number, row) for number, row in enumerate(rows[1:], 2) if row]
    for number, row in lines:
        if len(row) != len(heading):
            raise DataError(
                f"{place}, line {number}: expected {len(heading)} cells, as in the heading; got {len(row)}."
            )
    return _splits(path, heading, {name: [row[i].strip() for _, row in lines] for i, name in enumerate(heading)})


def splits_parquet(place: str) -> Splits:
    """Return the splits of a .parquet file.

    Args:
        place: the file; paths in it are relative to its folder.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependency("Reading .parquet needs pyarrow: pip install 'vitkit[data]'.") from error
    path = Path(place).expanduser()
    try:
        heading = list(parquet.read_schema(path).names)  # type: ignore[no-untyped-call]
        wanted = [name for names in COLUMNS.values() for name in names if name in heading]
        columns = parquet.read_table(path, columns=wanted).to_pydict()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise DataError(f"Expected a .parquet file at {place}: {error}.") from error
    return _splits(path, heading, columns)


def _splits(path: Path, heading: Sequence[str], columns: dict[str, list[Any]]) -> Splits:
    of = {kind: next((n for n in names if n in heading), None) for kind, names in COLUMNS.items()}
    for kind in ("path", "label"):
        if of[kind] is None:
            raise DataError(f"Expected a column {kind!r} in {path}; its columns are: {', '.join(heading)}.")
    names, labels = columns[str(of["path"])], columns[str(of["label"])]
    for row, (name, value) in enumerate(zip(names, labels, strict=True), 2):
        missing = value is None or value == "" or (isinstance(value, float) and math.isnan(value))
        if not isinstance(name, str) or not name or missing:
            raise DataError(f"{path}, row {row}: expected a path and a label; got {name!r} and {value!r}.")
    values = [str(value) for value in labels]
    class_names = sorted(set(values), key=natural)
    number = {name: i for i, name in enumerate(class_names)}
    rows: dict[str, list[int]] = {"all": list(range(len(names)))}
    if of["split"] is not None:
        meaning = {word: split for split, words in SPLIT_FOLDERS.items() for word in words}
        rows = {}
        for row, word in enumerate(columns[of["split"]]):
            if str(word).lower() not in meaning:
                raise DataError(f"{path}, row {row + 2}: expected one of {', '.join(meaning)}; got split {word!r}.")
            rows.setdefault(meaning[str(word).lower()], []).append(row)

    def read(chosen: list[int]) -> Source:
        return Files(path.parent, [names[r] for r in chosen], [number[values[r]] for r in chosen], class_names)

    return {split: partial(read, chosen) for split, chosen in rows.items()}
