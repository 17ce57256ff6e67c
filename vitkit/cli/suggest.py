"""`vitkit suggest`: which photos to label next."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import BatchSize, Cache, Device, Precision, Weights, Workers, loads_weights
from vitkit.cli.text import one_line


@loads_weights
def suggest(
    weights: Weights,
    images: Annotated[
        list[str], typer.Argument(help="Unlabelled photos: folders, files or glob patterns.", metavar="UNLABELLED...")
    ],
    count: Annotated[int, typer.Option("--count", min=1, help="Photos to suggest.")] = 50,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write a .csv list with an empty column for your labels (default: none)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    cache: Cache = None,
    batch_size: BatchSize = None,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = "auto",
    *,
    overrides: dict[str, Any],
) -> None:
    """Suggest photos to label next: those that the model is unsure about, and that differ from each other."""
    from vitkit.cli import options as common
    from vitkit.evaluation.predict import Images
    from vitkit.jobs import suggest as job
    from vitkit.jobs.embed import open_cache
    from vitkit.runtime import Runtime

    if out is not None:
        job.check_list(out)
    source = Images(images)
    runtime = Runtime(device, precision)
    model = common.load(weights, runtime, overrides)
    kept = open_cache(cache, lambda sentence: print(f"vitkit: {sentence}", file=sys.stderr))
    with common.counting("embedding", len(source)) as tick:
        found = job.suggest(
            model,
            source,
            kept,
            count=count,
            batch_size=batch_size,
            workers=workers,
            runtime=runtime,
            progress=tick,
        )
    if as_json:
        print(json.dumps({"weights": weights, "photos": [asdict(one) for one in found.photos]}, indent=1))
    else:
        for one in found.photos:
            print(f"{one.image}: {one.guess}? (margin {one.margin:.1%})")
    if out is not None:
        print(f"wrote {job.write_list(found, out)}", file=sys.stderr if as_json else sys.stdout)
    for _, why in found.skipped:
        print(f"vitkit: skipped {one_line(why)}", file=sys.stderr)
    if found.skipped:
        raise typer.Exit(1)
