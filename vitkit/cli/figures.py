"""`vitkit figures`: the figures of the paper, drawn for your model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import Device, loads_weights


@loads_weights
def figures(
    weights: Annotated[
        str | None, typer.Argument(help="Weights: a run folder, a file, or a hub id.", metavar="RUN|WEIGHTS")
    ] = None,
    images: Annotated[
        str | None,
        typer.Option("--images", help="Data set, folder or glob pattern (default: two sample photos)."),
    ] = None,
    count: Annotated[int, typer.Option("--count", help="Maximum number of images, spread evenly over the data.")] = 128,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Figure to draw, by its name in --list; repeatable (default: all of the paper's)."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Output folder.")] = Path("figures"),
    listed: Annotated[bool, typer.Option("--list", help="List the figures and exit.")] = False,
    device: Device = "auto",
    *,
    overrides: dict[str, Any],
) -> None:
    """Draw Figures 6, 7, 10, 11 and 14 of the paper for a model, as PNG and SVG with their data."""
    from vitkit.cli.text import print_table
    from vitkit.errors import InputError, pick
    from vitkit.explanations.plots import PLOTS

    if listed:
        print_table(["figure", "needs", "what it shows"], [(n, p.needs, p.title) for n, p in PLOTS.items()])
        return
    if weights is None:
        raise InputError(
            "Expected a run, a weights file or a hub id; got none. Give one, or list the figures with --list."
        )
    for name in only or ():
        pick(PLOTS, name, "plot")
    from vitkit.checkpoints.outputs import check_folder
    from vitkit.cli import options as common
    from vitkit.jobs.figures import figures as run
    from vitkit.jobs.figures import some_images
    from vitkit.runtime import Runtime

    check_folder(out)
    found = some_images(images, count)
    model = common.load(weights, Runtime(device, "fp32"), overrides)
    if images is None:
        print("Using two sample photos. Mean attention distance needs about 128: give yours with --images.")
    for name, files in run(model, found, out, only=only):
        print(f"{name:16} {PLOTS[name].title}\n{'':16} {', '.join(str(file) for file in files)}", flush=True)
