"""How the command line prints: one console, tables, and text that cannot take over a terminal."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

# Control characters, which a terminal obeys, and marks that reverse the order of what follows.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Write control characters in a text as `\x1b`; names of files and classes may contain any."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    r"""Write control characters and newlines as `\x1b` and `\n`: a name must not look like a line of ours."""
    return printable(text).replace("\n", r"\n")


class _Printable:
    """A stream that prints only printable text; everything else is that of the stream behind it."""

    def __init__(self, behind: TextIO) -> None:
        self.behind = behind

    def write(self, text: str) -> int:
        self.behind.write("\r".join(map(printable, text.split("\r"))))  # libraries redraw their progress bars with \r
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


@contextmanager
def only_printable() -> Iterator[None]:
    """Print only printable text on stdout and stderr."""
    out, err = (cast(TextIO, _Printable(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


class _Terminal(FileIO):
    """A terminal that may be closed while a command runs. What is written to it afterwards is lost, without an error.

    Args:
        stream: stdout or stderr; its descriptor stays open with it.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self.stream = stream

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def prepare(stream: TextIO) -> TextIO:
    """Return stdout or stderr as the command line uses it: no text that it cannot show, and no closed terminal, fails.

    Args:
        stream: `sys.stdout` or `sys.stderr`.
    """
    if not isinstance(stream, TextIOWrapper):
        return stream
    stream.reconfigure(errors="backslashreplace")
    raw = getattr(stream.buffer, "raw", stream.buffer)  # PYTHONUNBUFFERED leaves the buffer out
    if os.name != "posix" or not isinstance(raw, FileIO) or not stream.isatty():
        return stream
    terminal: Any = _Terminal(stream)
    buffer = terminal if raw is stream.buffer else BufferedWriter(terminal)
    return TextIOWrapper(
        buffer, stream.encoding, stream.errors, line_buffering=True, write_through=stream.write_through
    )


def say_last(text: str) -> None:
    """Print the last line of a command that was stopped; its exit code must not depend on whether anyone reads it."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console(*, stderr: bool = False) -> Console:
    """Return a console, which does not wrap at 80 columns when the output is a file or a pipe.

    Args:
        stderr: write to stderr instead of stdout (default: stdout).
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    behind = getattr(stream, "behind", stream)  # a console writes the terminal's own codes
    return Console(file=behind, highlight=False, width=None if behind.isatty() else 200)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Print a table. Columns whose names end in `#` hold numbers and are right-aligned.

    Args:
        columns: the columns' names.
        rows: one sequence of values per row.
        title: line above the table (default: none).
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    heading = Text(printable(title)) if title is not None else None
    table = Table(title=heading, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(
            Text(printable(column.rstrip("#"))), justify="right" if column.endswith("#") else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(printable(str(value))) for value in row))  # Text: [x] in a name is not markup
    console().print(table)
