"""`vitkit explain`: what a model looks at in an image, and how far to trust the picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import Device, Weights, loads_weights


@loads_weights
def explain(
    weights: Weights,
    images: Annotated[list[str], typer.Argument(help="Image files, folders or glob patterns.", metavar="IMAGE...")],
    out: Annotated[Path, typer.Option("--out", help="Output folder; each image gets a subfolder.")] = Path("explained"),
    target: Annotated[
        str | None,
        typer.Option("--class", help="Class to explain, by name or number (default: the most probable class)."),
    ] = None,
    patch: Annotated[
        str | None,
        typer.Option(
            "--patch",
            help="Patch to compare the others with: ROW,COLUMN counted from 0, or its number in `vitkit patches`, "
            "counted from 1 (default: the middle patch).",
        ),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            "--layer",
            help="Compare patches after this many layers, from 0 (the embedding) to all; negative numbers count from "
            "the end (default: after all layers and the final LayerNorm).",
        ),
    ] = None,
    occlusion: Annotated[
        bool, typer.Option("--occlusion", help="Also compute the occlusion map, which is slow.")
    ] = False,
    faithfulness: Annotated[
        bool,
        typer.Option(
            "--faithfulness",
            help="Also score each map against a random order of the patches, which is slow.",
        ),
    ] = False,
    registers: Annotated[
        bool,
        typer.Option(
            "--registers",
            help="Compute the maps with test-time registers, against bright corners and other patches of huge norm; "
            "needs no training (default: the model as it is).",
        ),
    ] = False,
    device: Device = "auto",
    *,
    overrides: dict[str, Any],
) -> None:
    """Show what a model looks at: predictions, attention, rollout, gradient-weighted rollout, similar patches.

    Files that cannot be read are reported and skipped, and the exit code is 1.
    """
    from vitkit.checkpoints.outputs import check_folder
    from vitkit.cli import options as common
    from vitkit.cli.options import progress_bar
    from vitkit.cli.text import one_line, print_table
    from vitkit.evaluation.predict import Images
    from vitkit.jobs.explain import Explained, summary
    from vitkit.jobs.explain import explain as run
    from vitkit.runtime import Runtime

    check_folder(out)
    source, skipped = Images(images), 0

    def on_bad(name: str, why: str) -> None:
        nonlocal skipped
        skipped += 1
        print(f"vitkit: skipped {one_line(why)}", file=sys.stderr)

    model = common.load(weights, Runtime(device, "fp32"), overrides)
    results: list[Explained] = []
    with progress_bar("occlusion") as tell:
        for one in run(
            model,
            source,
            out,
            target=target,
            patch=patch,
            layer=layer,
            occlusion=occlusion,
            score=faithfulness,
            registers=registers,
            progress=tell,
            on_bad=on_bad,
        ):
            if one.registers is not None and not results:
                print(one.registers, flush=True)
            results.append(one)
            said = (
                ", ".join(f"{name} {p:.1%}" for name, p in one.predictions[:3])
                or "no predictions (the model has no head)"
            )
            print(f"{one.image}: {said}\n  wrote {one.folder / 'overview.png'} and more files next to it", flush=True)
    if faithfulness and results:
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
            "Mean probability of the class as the highest-ranked patches are covered (deletion: lower is better) or "
            "sharpened (insertion: higher is better). A map that does not beat a random order says nothing about this "
            "model."
        )
    if skipped:
        print(f"vitkit: {skipped} of {len(source)} images could not be read.", file=sys.stderr)
        raise typer.Exit(1)
