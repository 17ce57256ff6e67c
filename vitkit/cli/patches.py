"""`vitkit patches`: Eq. 1 of the paper in pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import free_place, loads_weights, one_photo


@loads_weights
def patches(
    image: Annotated[str | None, typer.Argument(help="Image file (default: a sample photo).")] = None,
    model: Annotated[
        str, typer.Option("--model", help="Variant with random weights, see `vitkit models`.")
    ] = "vit-b/16",
    weights: Annotated[
        str | None,
        typer.Option("--from", help="Trained weights: a run folder, a file or a hub id (default: random weights)."),
    ] = None,
    patch_size: Annotated[
        int | None, typer.Option("--patch-size", min=1, help="Patch size in pixels (default: the variant's).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the weights.")] = 42,
    out: Annotated[
        Path | None, typer.Option("--out", help="Output folder (default: patches, or else patches-2, ...).")
    ] = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Draw an image, its patches, their embeddings and the sequence, each with its shape."""
    from vitkit.model.config import variant

    variant(model)  # reports an unknown name before importing torch, which is slow
    from vitkit.checkpoints.outputs import check_folder
    from vitkit.jobs.patches import model_for
    from vitkit.jobs.patches import patches as job

    out = check_folder(out if out is not None else free_place(Path("patches")))
    image = one_photo(image)
    size = overrides.pop("image_size", None)
    found = job(model_for(model, weights, size, patch_size, seed, **overrides), image, size)
    print(found)
    for file in found.save(out):
        print(f"wrote {file}")
    if weights is None:
        print("The weights are random: feature maps and positions have learned nothing. Use trained ones with --from.")
