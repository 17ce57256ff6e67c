"""`vitkit sweep`: choose the learning rate on a held-out part of train, or compare any fields of model and recipe."""

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
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="FIELD=A,B,C",
            help="Compare these values of a field of the recipe or the model, such as positions=none,1d,2d; repeat for "
            "every combination (default: none; choose the learning rate).",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="With --over, runs per combination: seeds 0, 1, ....")
    ] = 1,
    shots: Annotated[
        int, typer.Option("--shots", min=0, help="With --over, also the accuracy with N images per class; 0 for none.")
    ] = 0,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="With --over, runs at the same time.")] = 1,
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
    """Try several learning rates with a part of train held out, then train on all of it with the best (Table 4).

    With --over, train every combination of the given values instead, and show their accuracies on the held-out part as
    a table and a picture.
    """
    from vitkit.cli.text import console, print_table, printable, say_last
    from vitkit.errors import ConfigError
    from vitkit.jobs.watch import Watch

    try:
        tried = [float(word) for word in lrs.split(",")] if lrs else None
    except ValueError as error:
        raise ConfigError(f"--lrs expects numbers separated by commas, such as 0.003,0.01; got {lrs!r}.") from error
    size = parse_size(image_size)
    changes = {"steps": steps, "epochs": epochs, "batch_size": batch_size, "warmup": warmup, "val": val}
    settings = {"micro_batch": micro_batch, "workers": workers, "precision": precision, "seed": seed}
    if over:
        if lrs or seed is not None:
            raise ConfigError("Expected --over lr=... and --seeds with --over; got --lrs or --seed.")
        from vitkit.cli.study import compare, parse_over
        from vitkit.jobs.cells import Request, product

        values = parse_over(over)
        how = {"weights": weights, "loading": overrides, "model": model, "image_size": size}
        compare(
            Request(
                data=data,
                out=out.expanduser(),
                recipe=recipe,
                changes={name: value for name, value in changes.items() if value is not None},
                settings=settings,
                how={name: value for name, value in how.items() if value},
                shots=shots,
            ),
            product(values, range(seeds)),
            title=f"{recipe}: {', '.join(values)}",
            axes=numeric_axis(values),
            resume=resume,
            jobs=jobs,
        )
        return

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
            changes=changes,
            settings=settings,
        )
    if found.get("stopped"):
        say_last("stopped; everything is saved. To resume, repeat the command with --resume.")
        raise typer.Exit(128 + found["stopped"])
    print_table(["lr#", "held-out accuracy#"], [(lr, f"{score:.2%}") for lr, score in found["lrs"].items()])
    print(f"best: {found['lr']:g}" + (f"; the final run is {found['final']}" if found["final"] else ""))


def numeric_axis(over: dict[str, list[Any]]) -> tuple[str | None, str | None]:
    """Return the field of the picture's horizontal axis, if one has several numbers, and the field of its lines."""

    def numeric(values: list[Any]) -> bool:
        return len(values) > 1 and all(isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in values)

    x = next((field for field, values in reversed(over.items()) if numeric(values)), None)
    others = [field for field in over if field != x]
    return (x, others[0] if others else None) if x is not None and len(others) <= 1 else (None, None)
