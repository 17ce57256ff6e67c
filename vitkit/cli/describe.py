"""`vitkit describe`: a model's modules, shapes and parameters; and its drawings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import parse_size


def describe(
    model: Annotated[str, typer.Argument(help="A variant: vit-b/16, or timm's name of it (see `vitkit models`).")],
    size: Annotated[str | None, typer.Option("--image-size", help="Pixels: 384, or 384x512 (height x width).")] = None,
    num_classes: Annotated[int | None, typer.Option("--classes", help="Outputs of the head; 0 for none.")] = None,
    channels: Annotated[int | None, typer.Option("--channels", help="Channels of an image.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images at once, for the shapes.")] = 1,
    depth: Annotated[int | None, typer.Option("--depth", help="Show modules only down to this depth.")] = None,
    draw: Annotated[Path | None, typer.Option("--draw", help="Folder to write two SVG drawings into.")] = None,
) -> None:
    """Show every module of a model: what goes in, what comes out, how many parameters."""
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
                list(row.input),
                list(row.output),
                f"{row.parameters:,}" if row.parameters else "-",
                {True: "yes", False: "no", None: "-"}[row.trainable],
            ]
            for row in rows
        ],
    )
    print(
        f"{parameters(config):,} parameters ({parameters(config) * 4 / 2**20:,.0f} MiB in fp32), "
        f"{flops(config) / 1e9:,.1f} GFLOPs an image of {config.image_hw[0]} x {config.image_hw[1]}."
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
                f"Expected a folder that can be written to; {draw} cannot ({error.strerror}). "
                f"Choose another with --draw."
            ) from error
