"""`vitkit card`: the model card of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitkit.cli.options import Licence


def card(
    run: Annotated[str, typer.Argument(help="Run folder.", metavar="RUN")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The Markdown file (default: README.md in the run folder).")
    ] = None,
    licence: Licence = None,
) -> None:
    """Write a model card: data, classes, results with intervals, preprocessing, licence, and how to load the model."""
    from vitkit.jobs.share import write_card

    print(f"wrote {write_card(run, out, licence=licence)}")
