"""`vitkit sweep`: choose the learning rate on a held-out part of train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sweep(
    data: Annotated[str, typer.Argument(help="What `vitkit train` takes.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the runs.")],
    recipe: Annotated[str, typer.Option("--recipe", help="See `vitkit recipes`; Table 4's have lrs of their own.")],
    weights: Annotated[str | None, typer.Option("--from", help="Pre-trained weights: a file, a run, a hub id.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="A variant, from scratch.")] = None,
    lrs: Annotated[str | None, typer.Option("--lrs", help="Learning rates to try: 0.003,0.01,0.03.")] = None,
    val: Annotated[float | None, typer.Option("--val", help="Share of train that is held out to choose on.")] = None,
    final: Annotated[bool, typer.Option("--final/--no-final", help="Train on everything with the best one.")] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the sweep at --out.")] = False,
    image_size: Annotated[str | None, typer.Option("--image-size", help="Pixels: 384, or 384x512.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Updates of each run.")] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Passes over the data of each run.")] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Images of an update.")] = None,
    warmup: Annotated[float | None, typer.Option("--warmup", help="Steps; below 1, share of the run.")] = None,
    micro_batch: Annotated[int | None, typer.Option("--micro-batch", help="Images at once.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Processes that decode images.")] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="fp32, bf16 or fp16.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Decides everything random; 0.")] = None,
) -> None:
    """Try learning rates on a held-out part of train, then train on everything with the best (Table 4)."""
    from vitkit.cli.options import parse_size
    from vitkit.cli.text import print_table
    from vitkit.cli.watch import Watch
    from vitkit.errors import ConfigError

    try:
        tried = [float(word) for word in lrs.split(",")] if lrs else None
    except ValueError as error:
        raise ConfigError(f"--lrs takes numbers with commas between them, such as 0.003,0.01; got {lrs!r}.") from error
    size = parse_size(image_size)

    from vitkit.jobs.sweep import sweep as job

    with Watch() as watch:
        found = job(
            data,
            out,
            recipe=recipe,
            lrs=tried,
            weights=weights,
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
        print("stopped; all of it is saved. Go on with the same command and --resume.")
        raise typer.Exit(130)
    print_table(["lr#", "held-out accuracy#"], [(lr, f"{score:.2%}") for lr, score in found["lrs"].items()])
    print(f"best: {found['lr']:g}" + (f"; the final run is {found['final']}" if found["final"] else ""))
