"""`vitkit demo`: train on data that comes with vitkit's dependencies."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the run (default: runs/demo, or else runs/demo-2, ...).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed (default: 0).")] = 0,
    epochs: Annotated[
        float | None, typer.Option("--epochs", help="Passes over the training data (default: the recipe's).")
    ] = None,
) -> None:
    """Train a small Vision Transformer on handwritten digits in a minute or two, and measure it."""
    from vitkit.cli.options import free_place
    from vitkit.cli.text import console, printable
    from vitkit.jobs.watch import Watch

    place = out if out is not None else free_place(Path("runs/demo"))
    print("Training a Vision Transformer from scratch on 1,797 handwritten digits; a tenth is held out for testing.")
    from vitkit.jobs.demo import demo as job

    with Watch(console=console(), clean=printable) as watch:
        found = job(place, seed=seed, epochs=epochs, watch=watch)
    if found["stopped"]:
        print(f"stopped; everything is saved. Resume with: vitkit train --out {place} --resume")
        raise typer.Exit(128 + found["stopped"])
    from vitkit.jobs.report import try_report

    print(
        f"\n{found['right']} of the {found['images']} held-out digits are recognised ({found['accuracy']:.2%}) "
        f"after {found['seconds']:.0f} s of training.\nwrote {place}\n{try_report(place)}\nnext:\n{activation()}"
        f"  vitkit eval {place} digits\n"
        f"  vitkit train PHOTOS --from timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k --out runs/mine\n"
        f"  vitkit walk    vitkit recipes    vitkit --help"
    )


def activation() -> str:
    """Return the line that lets a shell find `vitkit`, if it does not yet and this is a virtual environment."""
    activate = Path(sys.argv[0]).with_name("activate")
    if os.name != "posix" or shutil.which("vitkit") or not activate.is_file():
        return ""
    return f"  source {activate}\n"
