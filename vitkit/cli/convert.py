"""`vitkit convert SRC DST --to DIALECT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitkit.cli.options import parse_numbers, parse_size


def convert(
    source: Annotated[str, typer.Argument(help="A file, a folder, or a hub id (google/vit-base-patch16-224).")],
    destination: Annotated[Path, typer.Argument(help="A file; for huggingface and dinov2-hf a folder.")],
    to: Annotated[
        str, typer.Option("--to", help="native, huggingface, timm, torchvision, google, dinov2, dinov2-hf, course.")
    ] = "native",
    verify: Annotated[bool, typer.Option("--verify", help="Compare with the libraries of the two files.")] = False,
    dialect: Annotated[str | None, typer.Option(help="How SRC is spelled, where its names do not tell.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    num_classes: Annotated[int | None, typer.Option(help="A new zero head with so many classes.")] = None,
    image_size: Annotated[str | None, typer.Option(help="Resize positions: pixels, or HEIGHTxWIDTH.")] = None,
    num_attention_heads: Annotated[int | None, typer.Option("--heads", help="Heads, where SRC does not say.")] = None,
    mean: Annotated[str | None, typer.Option(help="Subtracted from pixels in 0..1: 0.5 or 0.485,0.456,0.406.")] = None,
    std: Annotated[str | None, typer.Option(help="Divides after that.")] = None,
) -> None:
    """Convert a checkpoint from any dialect to any other, with proof."""
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
