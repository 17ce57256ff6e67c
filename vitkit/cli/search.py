"""`vitkit search`: the images of a data set that are most similar to a photo."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import BatchSize, Cache, Device, Features, From, Precision, Workers, loads_weights


@loads_weights
def search(
    data: Annotated[
        str, typer.Argument(help="Data to search: a folder of photos, with or without classes, a table, or kind:place.")
    ],
    queries: Annotated[list[str], typer.Argument(help="Photos to search for.", metavar="IMAGE...")],
    weights: From,
    count: Annotated[int, typer.Option("--count", min=1, help="Images to find per query.")] = 10,
    split: Annotated[str | None, typer.Option("--split", help="Part of the data (default: all parts).")] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export", help="Write what was found to this .parquet file, or .csv file for FiftyOne (default: none)."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    features: Features = None,
    cache: Cache = None,
    batch_size: BatchSize = 64,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = "auto",
    *,
    overrides: dict[str, Any],
) -> None:
    """Find the images of a data set that are most similar to a photo. Features are computed once and cached."""
    from vitkit.cli import options as common
    from vitkit.jobs import search as job
    from vitkit.jobs.embed import open_cache
    from vitkit.runtime import Runtime

    if export is not None:
        job.check_export(export)
    sources = job.sources_of(data, split)
    runtime = Runtime(device, precision)
    model = common.load(weights, runtime, overrides)
    kept = open_cache(cache, lambda sentence: print(f"vitkit: {sentence}", file=sys.stderr))
    with common.counting("embedding", sum(map(len, sources.values()))) as tick:
        found = job.search(
            model,
            sources,
            queries,
            kept,
            count=count,
            features=features,
            batch_size=batch_size,
            workers=workers,
            runtime=runtime,
            progress=tick,
        )
    if as_json:
        print(json.dumps({"data": data, "queries": [[asdict(hit) for hit in hits] for hits in found]}, indent=1))
    else:
        for hits in found:
            print(f"{hits[0].query}:")
            for hit in hits:
                print(f"  {hit.similarity:.3f}  {hit.filepath}{f'  ({hit.label})' if hit.label else ''}")
    if export is not None:
        print(f"wrote {job.export_hits(found, export)}", file=sys.stderr if as_json else sys.stdout)
