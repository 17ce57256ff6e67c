"""`vitkit explain`: what a model sees in images, and whether to believe the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitkit.cli.options import Device, ImageSize, Mean, Std, Weights


def explain(
    weights: Weights,
    images: Annotated[list[str], typer.Argument(help="Files, folders or patterns.", metavar="IMAGE...")],
    out: Annotated[Path, typer.Option("--out", help="Folder; each image has its own below it.")] = Path("explained"),
    target: Annotated[
        str | None, typer.Option("--class", help="Class to explain, by name or number; the likeliest when not given.")
    ] = None,
    patch: Annotated[
        str | None,
        typer.Option("--patch", help="Patch to compare with: ROW,COLUMN from 0, or its number in `vitkit patches`."),
    ] = None,
    layer: Annotated[int | None, typer.Option("--layer", help="Layer whose patches are compared; the last.")] = None,
    occlusion: Annotated[bool, typer.Option("--occlusion", help="Also cover every place in turn (slow).")] = False,
    faithfulness: Annotated[
        bool, typer.Option("--faithfulness", help="Score the maps against a random one (slow).")
    ] = False,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
    device: Device = "auto",
) -> None:
    """Show what a model sees: predictions, attention, rollout, gradient rollout, similar patches."""
    from vitkit.cli import options as common
    from vitkit.cli.options import progress_bar
    from vitkit.cli.text import print_table
    from vitkit.jobs.explain import explain as run
    from vitkit.jobs.explain import summary
    from vitkit.runtime import Runtime

    model = common.load(weights, Runtime(device, "fp32"), mean, std, image_size)
    results = []
    with progress_bar("covering") as tell:
        for one in run(
            model,
            images,
            out,
            target=target,
            patch=patch,
            layer=layer,
            occlusion=occlusion,
            score=faithfulness,
            progress=tell,
        ):
            results.append(one)
            said = ", ".join(f"{name} {p:.1%}" for name, p in one.predictions[:3]) or "no head, no predictions"
            print(f"{one.image}: {said}\n  wrote {one.folder / 'overview.png'} and its parts", flush=True)
    if faithfulness:
        print_table(
            ["map", "deletion#", "beats random#", "insertion#", "beats random#"],
            [
                (
                    name,
                    f"{row['deletion']:.3f}",
                    "" if name == "random" else f"{row['deletion_beats_random']:.0%}",
                    f"{row['insertion']:.3f}",
                    "" if name == "random" else f"{row['insertion_beats_random']:.0%}",
                )
                for name, row in summary(results).items()
            ],
            title=f"Faithfulness over {len(results)} image{'s' if len(results) > 1 else ''}",
        )
        print(
            "Probability of the class while the best patches are hidden (deletion: low is good) or shown (insertion: "
            "high is good). A map that does not beat random tells nothing about this model."
        )
