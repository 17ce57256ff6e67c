"""`vitkit embed`: compute features and keep them in the cache."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from vitkit.cli.options import (
    BadImagesOrRows,
    BatchSize,
    Cache,
    Decode,
    Device,
    Features,
    From,
    On,
    Precision,
    Workers,
    loads_weights,
)
from vitkit.cli.text import one_line


@loads_weights
def embed(
    data: Annotated[str, typer.Argument(help="Data: a folder, a .csv, .parquet or .tar file, or kind:place.")],
    weights: From,
    features: Features = None,
    split: Annotated[str | None, typer.Option("--split", help="Part of the data (default: all parts).")] = None,
    cache: Cache = None,
    out: Annotated[
        str | None,
        typer.Option("--out", help="Also write the features to this .npz or .parquet file (default: none)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    bad_images: BadImagesOrRows = None,
    batch_size: BatchSize = None,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = "auto",
    decode: Decode = "cpu",
    on: On = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Compute the features of a data set and cache them; cached features are not computed again."""
    from vitkit.cli import on_ray
    from vitkit.cli import options as common
    from vitkit.features.choice import choose
    from vitkit.jobs import embed as job
    from vitkit.runtime import Runtime

    if on is not None:
        folder = on_ray.check(on, out, cache=cache, decode=decode != "cpu")
        about = {"weights": weights, "data": data}
        how = {"features": features, "batch_size": batch_size, "workers": workers, "device": device}
        how["bad_images"] = bad_images or "skip"
        parts = job.parts_of(data, split)
        on_ray.run("embed", on_ray.load(weights, overrides), parts, folder, as_json, about, precision=precision, **how)
        return
    if out is not None:
        job.check_out(out)
    sources = job.parts_of(data, split)
    runtime = Runtime(device, precision)
    model = common.load(weights, runtime, overrides)
    choice = choose(features, model.config)
    kept = job.open_cache(cache, lambda sentence: print(f"vitkit: {sentence}", file=sys.stderr))
    with common.counting("embedding", sum(map(len, sources.values())), show=runtime.main) as tick:
        found = job.embed(
            model,
            sources,
            kept,
            features=features,
            out=out,
            batch_size=batch_size,
            workers=workers,
            runtime=runtime,
            progress=tick,
            bad_images=bad_images or "fail",  # type: ignore[arg-type]
            decode=decode,  # type: ignore[arg-type]
        )
    skipped = [pair for filled in found.parts.values() for pair in filled.skipped]
    if runtime.main:
        done: dict[str, dict[str, Any]] = {
            name: {
                "images": int(filled.readable.sum()),
                "computed": filled.computed,
                "reused": filled.reused,
                "precision": filled.precision,
                "decode": filled.decode,
                "seconds": round(filled.seconds, 3),
            }
            for name, filled in found.parts.items()
        }
        if as_json:
            print(
                json.dumps(
                    {
                        "weights": weights,
                        "data": data,
                        "features": choice.name,
                        "width": choice.width,
                        "cache": str(kept.path),
                        "out": str(out) if out else None,
                        "parts": done,
                        "skipped": [{"image": name, "why": why} for name, why in skipped],
                    },
                    indent=1,
                )
            )
        else:
            for name, part in done.items():
                by_gpu = ", decoded on the GPU" if part["decode"] == "gpu" else ""
                rate = f", {part['computed'] / part['seconds']:.1f} images/s" if part["computed"] else ""
                print(
                    f"{name}: {part['images']} images, {part['computed']} computed, {part['reused']} from the cache, "
                    f"{part['seconds']:.2f} s{rate}, {part['precision']}{by_gpu}"
                )
            print(f"{choice.width} values per image (feature: {choice.name}), cached in {kept.path}")
            if out is not None:
                print(f"wrote {out}")
        for _, why in skipped:
            print(f"vitkit: skipped {one_line(why)}", file=sys.stderr)
    runtime.close()
    if skipped:
        raise typer.Exit(1)
