"""Refuse to replace a table by one with other columns: only what a command wrote itself can be made again."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitkit.errors import Occupied

SHOWN = 8  # columns that a message names


def check_replaced(path: Path, *headings: Sequence[str]) -> None:
    """Refuse a .csv, .parquet or .npz file that holds something else than the table to write.

    Args:
        path: the file, there or not.
        headings: the columns that the table may have.

    Raises:
        Occupied: replacing the file would lose something else.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    found = columns_of(path)
    if found in map(tuple, headings):
        return
    what = ", ".join(found[:SHOWN]) + ", ..." * (len(found) > SHOWN)
    raise Occupied(
        f"Expected a new file, or one with the columns {', '.join(headings[0])} to replace; {path} "
        f"{f'has the columns {what}' if what else 'is another kind of file'}. Choose another name, or delete it first."
    )


def columns_of(path: Path) -> tuple[str, ...]:
    """Return the columns of a .csv or .parquet file, or the arrays of an .npz file; none if it is none of these.

    Args:
        path: the file; its ending says what it should be.
    """
    if path.suffix.lower() == ".npz":
        try:
            with zipfile.ZipFile(path) as file:
                return tuple(name.removesuffix(".npy") for name in file.namelist())
        except (OSError, zipfile.BadZipFile):
            return ()
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet

        parquet: Any = pyarrow.parquet
        try:
            return tuple(parquet.read_schema(path).names)
        except (OSError, ValueError):
            return ()
    try:
        with open(path, newline="", encoding="utf-8-sig") as text:
            return tuple(next(csv.reader(text), ()))
    except (OSError, UnicodeDecodeError, csv.Error):
        return ()
