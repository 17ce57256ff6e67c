"""`vitkit pretrain`: images without labels -> weights to fine-tune."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from vitkit.cli.config_file import takes_config
from vitkit.cli.options import loads_weights, parse_fields, parse_size
from vitkit.cli.run_options import SETTINGS, DryRun, Fields, Out, Resume, RunReport, RunSize, run_options

CHANGES = ("val", "target", "images", "epochs", "steps", "batch_size", "lr", "warmup", "early_stop")
MACHINE = [name for name in SETTINGS if name not in ("compile", "deterministic", "checkpointing", "shard")]


@takes_config
@loads_weights
@run_options(CHANGES, MACHINE)
def pretrain(
    data: Annotated[
        str | None,
        typer.Argument(
            help="A folder of images at any depth, or anything that `vitkit train` accepts; labels are ignored "
            "(default with --resume: the run's own data)."
        ),
    ] = None,
    out: Out = None,
    objective: Annotated[
        str, typer.Option("--objective", help="What to learn: masked-patch (Appendix B.1.2).")
    ] = "masked-patch",
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", help="A recipe with this objective; see `vitkit recipes` (default: masked-patch-small)."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Variant to train; see `vitkit models` (default: the recipe's)."),
    ] = None,
    fields: Fields = None,
    weights: Annotated[
        str | None, typer.Option("--from", help="Weights to start from: a file, a run or a hub id (default: none).")
    ] = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    image_size: RunSize = None,
    report: RunReport = True,
    *,
    changes: dict[str, Any],
    settings: dict[str, Any],
    overrides: dict[str, Any],
    more: dict[str, Any],
) -> None:
    """Train without labels: hide half of the patches and predict what they show. The weights can then be fine-tuned."""
    from vitkit.cli.train import carry_out, folder_of, show_plan

    out = folder_of(out, dry_run, "vitkit pretrain --resume" if resume else "", data)
    size = parse_size(image_size)

    from vitkit.jobs.pretrain import choose_recipe, write_picture
    from vitkit.jobs.train import prepare
    from vitkit.training.run_folder import RunFolder

    ready = prepare(
        data,
        out,
        recipe=choose_recipe(objective, recipe, out if resume else None),
        model=model,
        fields=parse_fields(fields),
        weights=weights,
        loading=overrides,
        image_size=size,
        resume=resume,
        changes=more | changes,
        settings=settings,
    )
    if dry_run:
        from vitkit.jobs.dry_run import dry_run as describe

        if ready.runtime.main:
            show_plan(describe(ready))
        return
    carry_out(ready, report)
    if ready.runtime.main:
        print(f"picture: {write_picture(RunFolder.open(ready.out))}")
