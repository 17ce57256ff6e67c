"""How the command line prints: one console, and tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Return a console on stdout, which does not wrap at 80 columns when the output is a file or a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Print a table. Columns whose names end in `#` hold numbers and are right-aligned.

    Args:
        columns: the columns' names.
        rows: one sequence of values per row.
        title: line above the table (default: none).
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.rstrip("#"), justify="right" if column.endswith("#") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row))
    console().print(table)
