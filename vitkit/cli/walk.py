"""`vitkit walk`: a photo through the paper's equations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def walk(
    out: Annotated[Path, typer.Option("--out", help="Folder for what it writes.")] = Path("walk"),
    model: Annotated[str, typer.Option("--model", help="A variant (see `vitkit models`).")] = "vit-b/16",
) -> None:
    """Walk a photo through the paper's equations and show every shape."""
    from vitkit.cli.text import console
    from vitkit.model.config import variant

    variant(model)  # a wrong name is told before torch is imported
    from vitkit.jobs.walk import walk as steps_of

    print(f"One photo through {model}, Eqs. 1-4. The weights are random: shapes are real, predictions mean nothing.\n")
    pictures = []
    for step in steps_of(model, out):
        if isinstance(step, Path):
            pictures.append(step)
        else:
            console().print(f"  {step.equation:6} {list(step.shape)!s:20} {step.words}", markup=False)
    print()
    for picture in pictures:
        print(f"wrote {picture}: look at it")
    print(f"next: vitkit describe {model} --draw {out}    vitkit models    vitkit --help")
