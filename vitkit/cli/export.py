"""`vitkit export`: write a model as a file for another runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import BadImages, BatchOf, Weights, Workers, loads_weights


@loads_weights
def export(
    weights: Weights,
    to: Annotated[str, typer.Option("--to", help="Format: onnx, openvino or openvino-int8.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write (default: in the run folder, or in the current folder).")
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(
            "--images",
            help="Images to calibrate int8 on and to compare on, in folders by class or not (default: the run's own "
            "data, or random pixels).",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", help="Part of the images to compare on (default: test, else val, else everything)."),
    ] = None,
    merge: Annotated[
        int,
        typer.Option(
            "--merge",
            min=0,
            help="Tokens to merge per block: faster but less accurate; the report says by how much (default: 0).",
        ),
    ] = 0,
    calibrate: Annotated[
        int, typer.Option("--calibrate", min=1, help="Images to calibrate int8 on (default: 128).")
    ] = 128,
    report: Annotated[
        int, typer.Option("--report", min=1, help="Number of images to compare with the plain model on (default: 512).")
    ] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    bad_images: BadImages = "fail",
    batch_size: BatchOf = 32,
    workers: Workers = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Export a model for another runtime and compare it with the plain model on your images.

    You can pass the file to predict, eval and serve in place of weights. Exits with code 1 if the file is not as exact
    as promised.
    """
    from vitkit.errors import pick
    from vitkit.speed.exported import EXPORTS

    row = pick(EXPORTS, to, "export")
    from vitkit.cli import options as common
    from vitkit.jobs import export as job
    from vitkit.runtime import Runtime

    model = common.load(weights, Runtime("cpu"), overrides)
    shown = job.images_for(images, weights, model, calibrate if row.calibrates else 0, report, split)
    total = 0 if shown.report is None else 2 * len(shown.report)
    with common.counting("comparing", total, show=bool(total)) as tick:
        done = job.export_file(
            model,
            to,
            out or job.default_place(weights, to, merge),
            shown,
            merge=merge,
            source=weights,
            batch_size=batch_size,
            workers=workers,
            progress=tick,
            bad_images=bad_images,  # type: ignore[arg-type]
        )
    if as_json:
        print(json.dumps(done.to_dict(), indent=1))
    else:
        print(
            f"wrote {done.path}: {done.megabytes:.1f} MB, {done.seconds:.0f} s"
            + (f", calibrated on {done.calibrated} images" if done.calibrated else "")
            + (", any image size" if done.card.any_size else "")
        )
        print(f"on {done.on}:")
        for line in done.report.sentences():
            print(f"  {line}")
    if not done.report.within:
        raise typer.Exit(1)
