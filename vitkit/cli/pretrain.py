"""`vitkit pretrain`: images without labels -> weights to fine-tune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import loads_weights, parse_fields, parse_size
from vitkit.cli.train import of_machine, of_recipe


@loads_weights
def pretrain(
    data: Annotated[
        str | None,
        typer.Argument(
            help="A folder of images at any depth, or anything that `vitkit train` accepts; labels are ignored "
            "(default with --resume: the run's own data)."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the run, which must not exist yet (required).")
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", help="What to learn: masked-patch (Appendix B.1.2).")
    ] = "masked-patch",
    target: Annotated[
        str | None,
        of_recipe(
            "--target",
            help="What to predict of a hidden patch: mean (its mean colour of 3 bits per channel), 4x4 (4 x 4 such "
            "colours) or patch (every pixel, by regression).",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="A recipe with this objective; see `vitkit recipes` (default: OBJECTIVE-small)."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Variant to train; see `vitkit models` (default: the recipe's)."),
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Change a field of the new model, such as patch_size=8; repeat for several (default: none).",
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--from", help="Weights to start from: a file, a run or a hub id (default: none).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run at --out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, without training.")] = False,
    image_size: Annotated[
        str | None,
        typer.Option("--image-size", help="Image size in pixels: 64, or 64x96 (default: the recipe's or the model's)."),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write report.html at the end (default: yes).")
    ] = True,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed (default: 0).")] = None,
    val: Annotated[
        float | None,
        typer.Option("--val", help="Share of the images to hold out; 0 for none (default: the recipe's)."),
    ] = None,
    images: Annotated[
        float | None, of_recipe("--images", help="Training images to use: a count or, below 1, a share.")
    ] = None,
    epochs: Annotated[float | None, of_recipe("--epochs", help="Passes over the training data.")] = None,
    steps: Annotated[int | None, of_recipe("--steps", help="Number of updates, instead of --epochs.")] = None,
    batch_size: Annotated[int | None, of_recipe("--batch-size", help="Images per update, over all processes.")] = None,
    lr: Annotated[float | None, of_recipe("--lr", help="Base learning rate.")] = None,
    warmup: Annotated[
        float | None, of_recipe("--warmup", help="Warm-up steps; a value below 1 is a share of the run.")
    ] = None,
    precision: Annotated[
        str | None, of_machine("--precision", help="fp32, or mixed precision: bf16 or fp16 (default: fp32).")
    ] = None,
    device: Annotated[
        str | None, of_machine("--device", help="Device: auto, cpu, cuda or mps (default: auto).")
    ] = None,
    micro_batch: Annotated[
        int | None,
        of_machine(
            "--micro-batch",
            help="Images per forward pass; gradients are accumulated over the batch (default: all at once).",
        ),
    ] = None,
    workers: Annotated[
        int | None, of_machine("--workers", help="Worker processes for decoding (default: one per core).")
    ] = None,
    bad_images: Annotated[
        str | None, of_machine("--bad-images", help="What to do about unreadable images: fail or skip (default: fail).")
    ] = None,
    log_every: Annotated[int | None, of_machine("--log-every", help="Log metrics every N steps (default: 10).")] = None,
    evaluate_every: Annotated[
        int | None, of_machine("--evaluate-every", help="Validate every N steps (default: every epoch).")
    ] = None,
    save_every: Annotated[
        int | None,
        of_machine("--save-every", help="Save every N steps, besides each new best (default: at every validation)."),
    ] = None,
    tracker: Annotated[
        list[str] | None,
        of_machine("--tracker", help="Tracker: tensorboard, wandb, mlflow or none. Repeatable (default: tensorboard)."),
    ] = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Train without labels: hide half of the patches and predict what they show. The result is there to fine-tune."""
    from vitkit.cli.train import carry_out, show_plan
    from vitkit.errors import ConfigError

    if out is None:
        raise ConfigError("Expected a folder for the run; got none. Give --out, such as --out runs/first.")
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
        changes={
            "target": target,
            "images": images,
            "epochs": epochs,
            "steps": steps,
            "batch_size": batch_size,
            "lr": lr,
            "warmup": warmup,
            "val": val,
        },
        settings={
            "seed": seed,
            "precision": precision,
            "device": device,
            "micro_batch": micro_batch,
            "workers": workers,
            "bad_images": bad_images,
            "log_every": log_every,
            "evaluate_every": evaluate_every,
            "save_every": save_every,
            "trackers": None if not tracker else tuple(name for name in tracker if name != "none"),
        },
    )
    if dry_run:
        from vitkit.jobs.dry_run import dry_run as describe

        if ready.runtime.main:
            show_plan(describe(ready))
        return
    carry_out(ready, report)
    if ready.runtime.main:
        print(f"picture: {write_picture(RunFolder.open(ready.out))}")
