"""`vitkit demo`: the main job on embedded data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; runs/demo, or runs/demo-2, ...")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Decides everything random.")] = 0,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Passes over the data; the recipe's own.")] = None,
) -> None:
    """Train a small Vision Transformer on real handwritten digits, in a minute or two, and measure it."""
    from vitkit.cli.watch import Watch

    place = out if out is not None else free_place(Path("runs/demo"))
    print("A Vision Transformer learns 1,797 real digits from nothing; a tenth is left out and shown at the end.")
    from vitkit.jobs.demo import demo as job

    with Watch() as watch:
        found = job(place, seed=seed, epochs=epochs, watch=watch)
    if found["stopped"]:
        print(f"stopped; all of it is saved. Go on with: vitkit train --out {place} --resume")
        raise typer.Exit(130)
    from vitkit.jobs.report import try_report

    print(
        f"\n{found['right']} of {found['images']} digits that it had never seen are right: {found['accuracy']:.2%}, "
        f"after {found['seconds']:.0f} s of training.\nwrote {place}\n{try_report(place)}\nnext:\n"
        f"  vitkit eval {place} digits\n"
        f"  vitkit train PHOTOS --from timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k --out runs/mine\n"
        f"  vitkit walk    vitkit recipes    vitkit --help"
    )


def free_place(path: Path) -> Path:
    """The path, or the first of path-2, path-3, ... that is not there."""
    number, place = 2, path
    while place.exists():
        place, number = path.with_name(f"{path.name}-{number}"), number + 1
    return place
