"""`vitkit figures`: the paper's figures of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitkit.cli.options import Device, ImageSize, Mean, Std


def figures(
    weights: Annotated[
        str | None, typer.Argument(help="Weights: a run folder, a file, or a hub id.", metavar="RUN|WEIGHTS")
    ] = None,
    images: Annotated[
        str | None,
        typer.Option("--images", help="A data set, a folder or a pattern; two sample photos when not given."),
    ] = None,
    count: Annotated[int, typer.Option("--count", help="Images that are looked at, spread over the data.")] = 128,
    only: Annotated[list[str] | None, typer.Option("--only", help="A figure by name; repeatable. See --list.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder.")] = Path("figures"),
    listed: Annotated[bool, typer.Option("--list", help="List the figures, and stop.")] = False,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
    device: Device = "auto",
) -> None:
    """Draw Figures 6, 7, 10, 11 and 14 of the paper for a model; PNG, SVG and the data."""
    from vitkit.cli.text import print_table
    from vitkit.errors import InputError, pick
    from vitkit.explain.plots import PLOTS

    if listed:
        print_table(["figure", "made of", "what it shows"], [(n, p.needs, p.title) for n, p in PLOTS.items()])
        return
    if weights is None:
        raise InputError("Give a run, a file of weights or a hub id to draw figures of, or --list.")
    for name in only or ():
        pick(PLOTS, name, "plot")
    from vitkit.cli import options as common
    from vitkit.jobs.figures import figures as run
    from vitkit.jobs.figures import some_images
    from vitkit.runtime import Runtime

    found = some_images(images, count)
    model = common.load(weights, Runtime(device, "fp32"), mean, std, image_size)
    if images is None:
        print("no --images: two sample photos are looked at; mean attention distance wants about 128")
    for name, files in run(model, found, out, only=only):
        print(f"{name:16} {PLOTS[name].title}\n{'':16} {', '.join(str(file) for file in files)}", flush=True)
