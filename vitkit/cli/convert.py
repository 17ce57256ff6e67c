"""`vitkit convert SOURCE DESTINATION --to DIALECT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import loads_weights


@loads_weights
def convert(
    source: Annotated[
        str, typer.Argument(help="A file, a folder, a run, or a hub id such as google/vit-base-patch16-224.")
    ],
    destination: Annotated[
        Path, typer.Argument(help="A new file, or a new folder for huggingface and the dialects ending in -hf.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="Dialect to write: native, huggingface, timm, torchvision, google, dinov2, dinov2-hf, course, clip, "
            "clip-hf, siglip-hf, dinov3, dinov3-hf, beit-hf or aimv2-hf (default: native).",
            show_default=False,
        ),
    ] = "native",
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare both files with the libraries of their dialects.")
    ] = False,
    dialect: Annotated[
        str | None, typer.Option(help="Dialect of SOURCE (default: recognised from the names of its tensors).")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit on the hub (default: the main branch).")
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(help="Replace the head by a zero one with this many classes (default: keep it).")
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            help="New name for tensors as OLD=NEW, OLD a regular expression; without NEW they are left out. Repeat for "
            "several (default: keep the names).",
        ),
    ] = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Convert a checkpoint from any dialect to any other, and verify the result."""
    from vitkit import checkpoints

    table = {old: new for old, _, new in (part.partition("=") for part in rename or ())}
    overrides |= {"dialect": dialect, "revision": revision, "num_classes": num_classes, "rename": table}
    model = checkpoints.convert(source, destination, to, **overrides)
    print(f"wrote {destination} ({to}, {sum(p.numel() for p in model.parameters()):,} parameters)")
    if model.licence:
        print(f"licence: {model.licence}. It applies to the new file too: pass its terms on with the weights.")
    if model.input_spec.several and to != "native":
        folder = checkpoints.DIALECTS[to].suffixes == ("",)
        what = "transformers has no thresholds" if folder else f"{to} files cannot say that outputs are labels"
        where = "config.json" if folder else f"{Path(destination).name}.vitkit.json"
        print(
            f"note: {what}: vitkit keeps them in {where}. Elsewhere, compare the sigmoid of each output with "
            f"its threshold."
        )
    if not verify:
        return
    from vitkit.jobs.convert import prove

    for row in prove(model, source, destination, **overrides):
        print(row if isinstance(row, str) else f"  {row}")
