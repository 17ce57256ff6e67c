"""`vitkit report`: one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder.", metavar="RUN")],
    out: Annotated[Path | None, typer.Option("--out", help="The page; report.html in the run's folder.")] = None,
) -> None:
    """Write one self-contained HTML page about a run: settings, data, curves, results, errors, figures."""
    from vitkit.jobs.report import report as write

    print(f"wrote {write(run, out=out)}")
