"""`vitkit sweep`: choose the learning rate on a held-out part of train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import loads_weights, parse_size


@loads_weights
def sweep(
    data: Annotated[str, typer.Argument(help="Anything that `vitkit train` accepts.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the runs.")],
    recipe: Annotated[
        str,
        typer.Option("--recipe", help="A recipe (see `vitkit recipes`); Table 4's have learning rates to choose from."),
    ],
    weights: Annotated[
        str | None, typer.Option("--from", help="Pre-trained weights: a file, a run or a hub id (default: none).")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Variant to train from scratch (default: the recipe's).")
    ] = None,
    lrs: Annotated[
        str | None,
        typer.Option("--lrs", help="Learning rates to try, such as 0.003,0.01,0.03 (default: the recipe's)."),
    ] = None,
    val: Annotated[
        float | None, typer.Option("--val", help="Share of train to hold out for choosing (default: the recipe's).")
    ] = None,
    final: Annotated[
        bool, typer.Option("--final/--no-final", help="Train on all of train with the best rate (default: yes).")
    ] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the sweep at --out.")] = False,
    image_size: Annotated[
        str | None,
        typer.Option(
            "--image-size", help="Image size in pixels: 384, or 384x512 (default: the recipe's or the model's)."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Updates per run (default: the recipe's).")] = None,
    epochs: Annotated[
        float | None, typer.Option("--epochs", help="Passes over the training data per run (default: the recipe's).")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Images per update (default: the recipe's).")
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option("--warmup", help="Warm-up steps; a value below 1 is a share of the run (default: the recipe's)."),
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", help="Images per forward pass (default: all at once).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Worker processes for decoding (default: one per core).")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="fp32, bf16 or fp16 (default: fp32).")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed (default: 0).")] = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Try several learning rates with a part of train held out, then train on all of it with the best (Table 4)."""
    from vitkit.cli.text import console, print_table, printable
    from vitkit.errors import ConfigError
    from vitkit.jobs.watch import Watch

    try:
        tried = [float(word) for word in lrs.split(",")] if lrs else None
    except ValueError as error:
        raise ConfigError(f"--lrs expects numbers separated by commas, such as 0.003,0.01; got {lrs!r}.") from error
    size = parse_size(image_size)

    from vitkit.jobs.sweep import sweep as job

    with Watch(console=console(), clean=printable) as watch:
        found = job(
            data,
            out,
            recipe=recipe,
            lrs=tried,
            weights=weights,
            loading=overrides,
            model=model,
            image_size=size,
            resume=resume,
            final=final,
            watch=watch,
            say=watch.say,
            changes={"steps": steps, "epochs": epochs, "batch_size": batch_size, "warmup": warmup, "val": val},
            settings={"micro_batch": micro_batch, "workers": workers, "precision": precision, "seed": seed},
        )
    if found.get("stopped"):
        print("stopped; everything is saved. To resume, repeat the command with --resume.")
        raise typer.Exit(130)
    print_table(["lr#", "held-out accuracy#"], [(lr, f"{score:.2%}") for lr, score in found["lrs"].items()])
    print(f"best: {found['lr']:g}" + (f"; the final run is {found['final']}" if found["final"] else ""))
