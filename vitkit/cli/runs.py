"""`vitkit runs` and `vitkit diff`: list and compare runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

FILES = (".safetensors", ".pth", ".pt", ".bin", ".npz")  # endings of weights


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder to search recursively.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="HTML file to write that compares the runs (default: none).")
    ] = None,
) -> None:
    """List the runs in a folder, with their results."""
    from vitkit.cli.text import print_table
    from vitkit.jobs.listing import list_runs

    if html is not None:
        from vitkit.checkpoints.outputs import check_page

        check_page(html, "--html")
    found = list_runs(folder)
    if as_json:
        print(json.dumps([{**asdict(row), "path": str(row.path)} for row in found], indent=1))
        return
    print_table(
        [
            "run",
            "kind",
            "recipe",
            "model",
            "steps#",
            "loss#",
            "last accuracy#",
            "best accuracy#",
            "seconds#",
            "started",
        ],
        [
            (
                row.path,
                row.kind,
                row.recipe,
                short(row.model),
                f"{row.step:,}/{row.total:,}" if row.total is not None else "-",
                number(row.loss),
                share(row.top1) if row.mean_ap is None else f"mAP {share(row.mean_ap)}",
                share(row.best) if row.mean_ap is None else f"mAP {share(row.best)}",
                f"{row.seconds:,.0f}",
                row.created,
            )
            for row in found
        ],
    )
    if not found:
        print(f"There are no runs in {folder}.")
    elif html is not None:
        from vitkit.jobs.report import compare

        print(f"wrote {compare(folder, html)}")


def diff(
    first: Annotated[Path, typer.Argument(help="A run folder.")],
    second: Annotated[Path, typer.Argument(help="Another run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the settings, metrics and weights of two runs. The exit code is 1 if their results differ."""
    from vitkit.cli.text import print_table
    from vitkit.jobs.listing import diff as compare

    found = compare(first, second)
    if as_json:
        print(json.dumps({**asdict(found), "same": found.same}, indent=1))
    else:
        if found.settings:
            print_table(["setting", str(first), str(second)], [(k, *v) for k, v in found.settings.items()])
        numbers = [(k, *map(number, v)) for k, v in found.numbers.items() if v != (None, None)]
        print_table(["result", str(first), str(second)], numbers)
        if found.metrics is None:
            print(f"metrics: {found.lines[0]:,} lines, equal except for times")
        else:
            print(f"metrics: {found.lines[0]:,} and {found.lines[1]:,} lines; the first difference:")
            for line, which in zip(found.metrics, ("first", "second"), strict=True):
                print(f"  the {which} run ends here" if line is None else f"  {json.dumps(line)}")
        for which, distance in found.weights.items():
            print(
                f"{which} weights: "
                + (
                    "shapes differ"
                    if distance is None
                    else "bit-identical"
                    if distance == 0
                    else f"differ by up to {distance:.3g}"
                )
            )
    if not found.same:
        raise typer.Exit(1)


def short(model: str) -> str:
    """Return the name of a weights file without its folder; a variant or an id of the hub as it is."""
    path = Path(model)
    return path.name if path.is_absolute() or path.suffix.lower() in FILES else model


def number(value: Any) -> str:
    """Format a number; a dash stands for None."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def share(value: float | None) -> str:
    """Format a share as a percentage; a dash stands for None."""
    return "-" if value is None else f"{value:.2%}"
