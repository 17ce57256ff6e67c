"""`vitkit report`: the HTML report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Output file (default: report.html in the run folder).")
    ] = None,
) -> None:
    """Write a self-contained HTML report of a run: settings, data, curves, results, errors, figures."""
    from vitkit.jobs.report import report as write

    print(f"wrote {write(run, out=out)}")
