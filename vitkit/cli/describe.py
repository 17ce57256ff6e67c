"""`vitkit describe`: the modules of a model with their shapes and parameters, and drawings of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import parse_size


def describe(
    model: Annotated[str, typer.Argument(help="Variant, such as vit-b/16 or its timm name (see `vitkit models`).")],
    size: Annotated[
        str | None, typer.Option("--image-size", help="Pixels, such as 384 or 384x512 (default: the variant's size).")
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option("--classes", help="Number of classes; 0 for no head (default: 1000).")
    ] = None,
    channels: Annotated[int | None, typer.Option("--channels", help="Channels per image (default: 3).")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Batch size of the shapes.")] = 1,
    depth: Annotated[
        int | None, typer.Option("--depth", min=0, help="Show modules down to this depth (default: all).")
    ] = None,
    draw: Annotated[
        Path | None, typer.Option("--draw", help="Folder for two SVG drawings of the model (default: no drawings).")
    ] = None,
) -> None:
    """Show every module of a model with the shapes of its input and output and its parameters."""
    from vitkit.cli.text import print_table
    from vitkit.model.config import variant
    from vitkit.model.count import flops, parameters

    given: dict[str, Any] = {"image_size": parse_size(size), "num_classes": num_classes, "num_channels": channels}
    config = variant(model, **{name: value for name, value in given.items() if value is not None})

    from vitkit.explain.describe import describe as rows_of

    rows = [row for row in rows_of(config, batch) if depth is None or row.depth <= depth]
    print_table(
        ["module", "class", "input", "output", "parameters#", "trainable"],
        [
            [
                "  " * row.depth
                + (row.name.rpartition(".")[2] if not row.name.startswith("blocks.") or row.depth > 2 else row.name)
                if row.name
                else model,
                row.kind,
                "-" if row.input is None else list(row.input),
                "-" if row.output is None else list(row.output),
                f"{row.parameters:,}" if row.parameters else "-",
                {True: "yes", False: "no", None: "-"}[row.trainable],
            ]
            for row in rows
        ],
    )
    print(
        f"{parameters(config):,} parameters ({parameters(config) * 4 / 2**20:,.0f} MiB in fp32), "
        f"{flops(config) / 1e9:,.1f} GFLOPs per image of {config.image_hw[0]} x {config.image_hw[1]} pixels."
    )
    if draw is not None:
        from vitkit.errors import OutputError
        from vitkit.explain.diagram import DIAGRAMS

        try:
            draw.mkdir(parents=True, exist_ok=True)
            for name, diagram in DIAGRAMS.items():
                path = draw / f"{name}.svg"
                path.write_text(diagram(config), encoding="utf-8")
                print(f"wrote {path}")
        except OSError as error:
            raise OutputError(
                f"Expected a writable folder; cannot write to {draw} ({error.strerror}). Choose another with --draw."
            ) from error
