"""`vitkit patches`: an image as Eq. 1 meets it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def patches(
    image: Annotated[str | None, typer.Argument(help="An image file; a sample photo when not given.")] = None,
    model: Annotated[str, typer.Option("--model", help="A variant (see `vitkit models`), random.")] = "vit-b/16",
    weights: Annotated[str | None, typer.Option("--from", help="Trained weights: a run, a file, a hub id.")] = None,
    image_size: Annotated[str | None, typer.Option("--image-size", help="Pixels: 384, or 384x512.")] = None,
    patch_size: Annotated[int | None, typer.Option("--patch-size", min=1, help="P of a new model.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random weights.")] = 42,
    out: Annotated[Path, typer.Option("--out", help="Folder.")] = Path("patches"),
) -> None:
    """Draw an image, its patches, their embedding and the sequence, each with its shape."""
    from vitkit.cli.options import parse_size
    from vitkit.model.config import variant

    size = parse_size(image_size)
    variant(model)  # a wrong name is told before torch is imported
    from vitkit.jobs.patches import patches as run

    files, shapes, trained = run(
        image, out, model=model, weights=weights, image_size=size, patch_size=patch_size, seed=seed
    )
    for name, shape in shapes.items():
        print(f"{name:10} {list(shape)}")
    for file in files:
        print(f"wrote {file}")
    if not trained:
        print("The weights are random: patches and shapes are real, feature maps and positions have learnt nothing.")
