"""How the command line writes: one console, tables that are plain when nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Standard output; not wrapped to 80 columns when it goes into a file or a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Print a table; columns whose name ends in `#` hold numbers and stand to the right.

    Args:
        columns: names of the columns.
        rows: their values, in the columns' order.
        title: a line above it.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.rstrip("#"), justify="right" if column.endswith("#") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row))
    console().print(table)
