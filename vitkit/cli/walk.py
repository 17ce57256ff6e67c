"""`vitkit walk`: follow a photo through the equations of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def walk(
    out: Annotated[Path, typer.Option("--out", help="Output folder.")] = Path("walk"),
    model: Annotated[str, typer.Option("--model", help="Variant, see `vitkit models`.")] = "vit-b/16",
) -> None:
    """Follow a photo through the equations of the paper and show the shape after each step."""
    from vitkit.cli.text import console
    from vitkit.model.config import variant

    variant(model)  # reports an unknown name before importing torch, which is slow
    from vitkit.jobs.walk import walk as steps_of

    print(f"One photo through Eqs. 1-4 of {model}. The weights are random, so look at the shapes, not the values.\n")
    pictures = []
    for step in steps_of(model, out):
        if isinstance(step, Path):
            pictures.append(step)
        else:
            console().print(f"  {step.equation:6} {list(step.shape)!s:20} {step.words}", markup=False)
    print()
    for picture in pictures:
        print(f"wrote {picture}")
    print(f"next: vitkit describe {model} --draw {out}    vitkit models    vitkit --help")
