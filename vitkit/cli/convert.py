"""`vitkit convert SOURCE DESTINATION --to DIALECT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitkit.cli.options import parse_numbers, parse_size


def convert(
    source: Annotated[
        str, typer.Argument(help="A file, a folder, a run, or a hub id such as google/vit-base-patch16-224.")
    ],
    destination: Annotated[Path, typer.Argument(help="A file, or a folder for huggingface and dinov2-hf.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="Dialect to write: native, huggingface, timm, torchvision, google, dinov2, dinov2-hf or course "
            "(default: native).",
            show_default=False,
        ),
    ] = "native",
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare both files with the libraries of their dialects.")
    ] = False,
    dialect: Annotated[
        str | None, typer.Option(help="Dialect of SOURCE (default: recognised from the names of its tensors).")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit on the hub (default: the main branch).")
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(help="Replace the head by a zero one with this many classes (default: keep it).")
    ] = None,
    image_size: Annotated[
        str | None, typer.Option(help="Resize positions to this image size: pixels or HEIGHTxWIDTH (default: keep it).")
    ] = None,
    num_attention_heads: Annotated[
        int | None, typer.Option("--heads", help="Number of attention heads (default: what SOURCE states).")
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option(
            help="Mean to subtract from pixels in 0..1, such as 0.5 or 0.485,0.456,0.406 (default: SOURCE's own)."
        ),
    ] = None,
    std: Annotated[str | None, typer.Option(help="Standard deviation to divide by (default: SOURCE's own).")] = None,
) -> None:
    """Convert a checkpoint from any dialect to any other, and verify the result."""
    from vitkit import checkpoints

    overrides = {
        "dialect": dialect,
        "revision": revision,
        "num_classes": num_classes,
        "mean": parse_numbers(mean, "--mean"),
        "std": parse_numbers(std, "--std"),
        "image_size": parse_size(image_size),
        "num_attention_heads": num_attention_heads,
    }
    model = checkpoints.convert(source, destination, to, **overrides)
    print(f"wrote {destination} ({to}, {sum(p.numel() for p in model.parameters()):,} parameters)")
    if not verify:
        return
    from vitkit.jobs.convert import prove

    for row in prove(model, source, destination, **overrides):
        print(row if isinstance(row, str) else f"  {row}")
