"""`vitkit walk`: follow a photo through the equations of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import free_place, loads_weights, one_photo


@loads_weights
def walk(
    image: Annotated[str | None, typer.Argument(help="Image file (default: a sample photo).")] = None,
    weights: Annotated[
        str | None,
        typer.Option("--from", help="Trained weights: a run folder, a file or a hub id (default: random weights)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Output folder (default: walk, or else walk-2, ...).")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="Variant with random weights, see `vitkit models`.")
    ] = "vit-b/16",
    *,
    overrides: dict[str, Any],
) -> None:
    """Follow a photo through the equations of the paper: the shape, a few values and a picture of each step."""
    from vitkit.cli.text import console, printable
    from vitkit.model.config import variant

    variant(model)  # reports an unknown name before importing torch, which is slow
    from vitkit.checkpoints.outputs import check_folder
    from vitkit.jobs.patches import model_for
    from vitkit.jobs.walk import walk as job

    out = check_folder(out if out is not None else free_place(Path("walk")))
    image = one_photo(image)
    size = overrides.pop("image_size", None)
    found = job(model_for(model, weights, size, **overrides), image, size)
    note = "" if weights else " The weights are random, so look at the shapes, not the values."
    print(f"One photo through Eqs. 1-4 of {weights or model}.{note}\n")
    console().print(printable(str(found)), markup=False, soft_wrap=True)
    print()
    for picture in found.save(out):
        print(f"wrote {picture}")
    print(f"next: vitkit describe {weights or model} --draw {out}    vitkit models    vitkit --help")
