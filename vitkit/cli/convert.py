"""`vitkit convert SRC DST --to DIALECT`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitkit.cli.inspect import numbers, size

if TYPE_CHECKING:
    from vitkit.checkpoints.verify import Comparison


def convert(
    source: Annotated[str, typer.Argument(help="A file, a folder, or a hub id (google/vit-base-patch16-224).")],
    destination: Annotated[Path, typer.Argument(help="A file; for huggingface and dinov2-hf a folder.")],
    to: Annotated[str, typer.Option("--to", help="native, huggingface, timm, torchvision, google, dinov2, dinov2-hf, "
                                                 "course.")] = "native",
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
    from vitkit.errors import CannotExpress, CheckpointError

    overrides = {"dialect": dialect, "revision": revision, "num_classes": num_classes, "mean": numbers(mean, "--mean"),
                 "std": numbers(std, "--std"), "image_size": size(image_size),
                 "num_attention_heads": num_attention_heads}
    model = checkpoints.convert(source, destination, to, **overrides)
    print(f"wrote {destination} ({to}, {sum(p.numel() for p in model.parameters()):,} parameters)")
    if not verify:
        return
    from vitkit.checkpoints import verify as proof

    rows: list[Comparison] = []
    for place, arguments in ((source, overrides), (destination, {})):
        if place is source and num_classes is not None:
            continue        # a new head has no original to compare with
        print(f"{place} as its own library runs it, against vitkit:")
        try:
            found = proof.compare(place, model.float(), **arguments)
        except (ImportError, CannotExpress) as error:
            print(f"  not compared: {error}")
            continue
        for row in found:
            print(f"  {row}")
        if not found:
            print("  nothing to compare with: the dialect has no library of its own")
        rows += found
    if any(not row.equal and not row.explanation for row in rows):
        raise CheckpointError("The outputs differ from the original library's and no known property explains it; "
                              "do not use the file that was written.")
