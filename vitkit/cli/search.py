"""`vitkit search`: the images of a data set that are most similar to a photo, and near-duplicates."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import BatchSize, Cache, Device, Features, From, Precision, Workers, loads_weights
from vitkit.cli.text import one_line


@loads_weights
def search(
    data: Annotated[
        str, typer.Argument(help="Data to search: a folder of photos, with or without classes, a table, or kind:place.")
    ],
    weights: From,
    queries: Annotated[
        list[str] | None,
        typer.Argument(help="Photos to search for (default: none; give --near-duplicates then).", metavar="[IMAGE]..."),
    ] = None,
    near: Annotated[
        bool,
        typer.Option(
            "--near-duplicates",
            help="Find the images of the data that are nearly the same, in groups (default: search for photos).",
        ),
    ] = False,
    similarity: Annotated[
        float | None,
        typer.Option(
            "--similarity",
            help="Smallest cosine similarity of near-duplicates, up to 1 (default: as unusual as in `vitkit doctor`).",
        ),
    ] = None,
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
    batch_size: BatchSize = None,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = "auto",
    *,
    overrides: dict[str, Any],
) -> None:
    """Find images that are most similar to a photo, or near-duplicates. Features are computed once and cached."""
    from vitkit.cli import options as common
    from vitkit.errors import InputError
    from vitkit.jobs import search as job
    from vitkit.jobs.embed import open_cache
    from vitkit.runtime import Runtime

    if near is bool(queries):
        raise InputError("Expected either photos to search for or --near-duplicates.")
    if similarity is not None and not near:
        raise InputError("--similarity is for --near-duplicates; --count says how many images a search finds.")
    if export is not None:
        job.check_export(export)
    sources = job.sources_of(data, split)
    runtime = Runtime(device, precision)
    model = common.load(weights, runtime, overrides)
    kept = open_cache(cache, lambda sentence: print(f"vitkit: {sentence}", file=sys.stderr))
    skipped: list[str] = []
    with common.counting("embedding", sum(map(len, sources.values()))) as tick:
        how: dict[str, Any] = {"features": features, "batch_size": batch_size, "workers": workers, "runtime": runtime}
        how["on_bad"] = lambda name, why: skipped.append(why)
        if near:
            found = job.near_duplicates(model, sources, kept, similarity=similarity, progress=tick, **how)
        else:
            found = job.search(model, sources, queries or [], kept, count=count, progress=tick, **how)
    if as_json:
        key = "groups" if near else "queries"
        print(json.dumps({"data": data, key: [[asdict(hit) for hit in hits] for hits in found]}, indent=1))
    elif near:
        some = "no near-duplicates" if not found else f"{len(found)} group{'s' if len(found) > 1 else ''}"
        print(f"{some} among {sum(map(len, sources.values())) - len(skipped):,} images")
        for hits in found:
            print()
            for hit in hits:
                print(f"  {hit.similarity:.3f}  {hit.filepath}  ({', '.join(filter(None, (hit.split, hit.label)))})")
    else:
        for hits in found:
            print(f"{hits[0].query}:")
            for hit in hits:
                print(f"  {hit.similarity:.3f}  {hit.filepath}{f'  ({hit.label})' if hit.label else ''}")
    if export is not None:
        print(f"wrote {job.export_hits(found, export)}", file=sys.stderr if as_json else sys.stdout)
    for why in skipped:
        print(f"vitkit: skipped {one_line(why)}", file=sys.stderr)
    if skipped:
        raise typer.Exit(1)
