"""`vitkit study`: the paper's comparisons on a small scale, each as a table and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vitkit.jobs.cells import Cell, Request

# The rows of jobs.study.STUDIES. Reading them for a help text would import torch; a test keeps the two equal.
STUDIES = "positions, pooling, data-size, compute"


def study(
    name: Annotated[str, typer.Argument(help=f"The comparison: {STUDIES}.")],
    data: Annotated[str, typer.Argument(help="Anything that `vitkit train` accepts.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the runs, the table and the picture.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="A recipe with a model of its own (default: digits, fashion-adamw for IDX files, foodvision-scratch).",
        ),
    ] = None,
    epochs: Annotated[
        float | None, typer.Option("--epochs", help="Passes over the training data per run (default: the study's).")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs per cell: seeds 0, 1, ....")] = 1,
    shots: Annotated[
        int | None,
        typer.Option("--shots", min=0, help="Images per class of the few-shot accuracy; 0 for none (default: 5)."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at the same time.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the study at --out.")] = False,
    precision: Annotated[str | None, typer.Option("--precision", help="fp32, bf16 or fp16 (default: fp32).")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Device: auto, cpu, cuda, cuda:1 or mps (default: auto).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Worker processes for decoding, per run (default: one per core).")
    ] = None,
) -> None:
    """Repeat one of the paper's comparisons on a small scale: position embeddings, pooling, data size or compute."""
    from vitkit.errors import ConfigError, pick
    from vitkit.jobs.cells import Request
    from vitkit.jobs.study import STUDIES, recipe_of

    row = pick(STUDIES, name, "study")
    if epochs is not None and row.epochs is None:
        raise ConfigError(f"The cells of {name} set their own epochs; leave --epochs out.")
    print(f"{row.source}, on a small scale. {row.question}")
    compare(
        Request(
            data=data,
            out=out.expanduser(),
            recipe=recipe_of(data, recipe),
            changes={"epochs": epochs or row.epochs} if row.epochs else {},
            settings={"precision": precision, "device": device, "workers": workers, "trackers": ()},
            shots=row.shots if shots is None else shots,
        ),
        row.with_seeds(range(seeds)),
        title=f"{row.source}, on a small scale",
        axes=(row.x, row.series),
        paper=row.paper,
        resume=resume,
        jobs=jobs,
    )


def parse_over(given: Sequence[str]) -> dict[str, list[Any]]:
    """Parse `positions=none,1d` and `lr=0.001,0.01`: a field, and JSON values or plain words."""
    from vitkit.errors import ConfigError

    found: dict[str, list[Any]] = {}
    for text in given:
        field, equals, values = text.partition("=")
        if not equals or not field.strip() or not all(value.strip() for value in values.split(",")):
            raise ConfigError(f"--over takes FIELD=A,B,C, such as positions=none,1d,2d; got {text!r}.")
        if field.strip() in found:
            raise ConfigError(f"--over names {field.strip()} twice; give all of its values at once.")
        found[field.strip()] = [_value(word.strip()) for word in values.split(",")]
    return found


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def compare(
    request: Request,
    cells: Sequence[Cell],
    *,
    title: str,
    axes: tuple[str | None, str | None],
    paper: Sequence[float] = (),
    resume: bool,
    jobs: int,
) -> None:
    """Train every cell, print the table, and write the picture; what is finished stays if it is interrupted."""
    from vitkit.cli.text import console, print_table, printable, say_last
    from vitkit.explanations import draw
    from vitkit.jobs.cells import sweep_cells
    from vitkit.jobs.study import picture, summary, table
    from vitkit.jobs.watch import Watch

    with Watch(console=console(), clean=printable) as watch:
        rows = sweep_cells(request, cells, resume=resume, jobs=jobs, watch=watch, say=watch.say)
    if isinstance(rows, int):
        say_last("stopped; everything is saved. To continue, repeat the command with --resume.")
        raise typer.Exit(128 + rows)
    found = summary(rows)
    heads, lines = table(found, paper)
    print_table(heads, lines)
    print(f"picture: {draw.save(picture(found, title, *axes), request.out / 'sweep.png')}")
