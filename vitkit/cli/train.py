"""`vitkit train`: data and a recipe -> a run folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

RECIPE, MACHINE = "Changes of the recipe", "The machine"


def train(
    data: Annotated[
        str | None,
        typer.Argument(
            help="A folder of images (train/CLASS/*.jpg), a .csv, or a name such as digits; a resumed run has its own."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; must not be there yet.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="See `vitkit recipes`; default: finetune with --from, else small-data."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="A variant (see `vitkit models`), from scratch.")] = None,
    weights: Annotated[str | None, typer.Option("--from", help="Pre-trained weights: a file, a run, a hub id.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run at --out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
    image_size: Annotated[str | None, typer.Option("--image-size", help="Pixels: 384, or 384x512.")] = None,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html at the end.")] = True,
    seed: Annotated[int | None, typer.Option("--seed", help="Decides everything random; 0.")] = None,
    val: Annotated[
        float | None,
        typer.Option("--val", help="Share of train held out where there is no val folder; 0 trains on all."),
    ] = None,
    epochs: Annotated[
        float | None, typer.Option("--epochs", rich_help_panel=RECIPE, help="Passes over the data.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", rich_help_panel=RECIPE, help="Updates.")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", rich_help_panel=RECIPE, help="Images of an update, over all processes."),
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", rich_help_panel=RECIPE, help="Highest learning rate.")] = None,
    lr_rule: Annotated[
        str | None,
        typer.Option(
            "--lr-rule", rich_help_panel=RECIPE, help="What another --batch-size does to lr: fixed, linear, sqrt."
        ),
    ] = None,
    warmup: Annotated[
        float | None, typer.Option("--warmup", rich_help_panel=RECIPE, help="Steps; below 1, share of the run.")
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option("--weight-decay", rich_help_panel=RECIPE, help="Of kernels, decoupled, relative to lr."),
    ] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", rich_help_panel=RECIPE, help="adamw or sgd.")] = None,
    decay: Annotated[
        str | None, typer.Option("--decay", rich_help_panel=RECIPE, help="linear, cosine or constant.")
    ] = None,
    clip: Annotated[
        float | None, typer.Option("--clip", rich_help_panel=RECIPE, help="Largest norm of the gradient.")
    ] = None,
    ema: Annotated[
        float | None,
        typer.Option("--ema", rich_help_panel=RECIPE, help="Decay of the weights' running average, such as 0.9999."),
    ] = None,
    layer_decay: Annotated[
        float | None, typer.Option("--layer-decay", rich_help_panel=RECIPE, help="lr of a layer against the one above.")
    ] = None,
    loss: Annotated[str | None, typer.Option("--loss", rich_help_panel=RECIPE, help="softmax or sigmoid.")] = None,
    label_smoothing: Annotated[
        float | None,
        typer.Option("--label-smoothing", rich_help_panel=RECIPE, help="Share of each target spread over all classes."),
    ] = None,
    dropout: Annotated[float | None, typer.Option("--dropout", rich_help_panel=RECIPE, help="Of dense layers.")] = None,
    drop_path: Annotated[
        float | None, typer.Option("--drop-path", rich_help_panel=RECIPE, help="Stochastic depth of the last block.")
    ] = None,
    freeze: Annotated[
        list[str] | None,
        typer.Option(
            "--freeze", rich_help_panel=RECIPE, help="Parameters not to train, by name: 'blocks.0.*'. Repeatable."
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", rich_help_panel=MACHINE, help="fp32, bf16, fp16 or fp8 (mixed; fp8 on CUDA)."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", rich_help_panel=MACHINE, help="auto, cpu, cuda, mps.")
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option("--micro-batch", rich_help_panel=MACHINE, help="Images at once; the rest is accumulated."),
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            "--accumulate", rich_help_panel=MACHINE, help="Micro-batches of an update, instead of --micro-batch."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", rich_help_panel=MACHINE, help="Processes that decode images; one a core.")
    ] = None,
    bad_images: Annotated[
        str | None, typer.Option("--bad-images", rich_help_panel=MACHINE, help="fail, or skip what cannot be read.")
    ] = None,
    compile_: Annotated[bool, typer.Option("--compile", rich_help_panel=MACHINE, help="Use torch.compile.")] = False,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", rich_help_panel=MACHINE, help="CUDA: only kernels that repeat to the bit."),
    ] = False,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", rich_help_panel=MACHINE, help="Less memory, more time.")
    ] = False,
    log_every: Annotated[
        int | None, typer.Option("--log-every", rich_help_panel=MACHINE, help="Steps between lines of metrics; 10.")
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option("--evaluate-every", rich_help_panel=MACHINE, help="Steps between validations; an epoch."),
    ] = None,
    save_every: Annotated[
        int | None, typer.Option("--save-every", rich_help_panel=MACHINE, help="Steps between saves; at validations.")
    ] = None,
    tracker: Annotated[
        list[str] | None,
        typer.Option(
            "--tracker", rich_help_panel=MACHINE, help="tensorboard (default), wandb, mlflow, none. Repeatable."
        ),
    ] = None,
) -> None:
    """Train a Vision Transformer; a run that was cut goes on with --resume, to the same bits."""
    from vitkit.cli.options import parse_size
    from vitkit.errors import ConfigError

    if out is None:
        raise ConfigError("Where shall the run go? Give --out, such as --out runs/first.")
    if micro_batch is not None and accumulate is not None:
        raise ConfigError("Give --micro-batch or --accumulate, not both.")
    changes = {
        "epochs": epochs,
        "steps": steps,
        "batch_size": batch_size,
        "lr": lr,
        "lr_rule": lr_rule,
        "warmup": warmup,
        "weight_decay": weight_decay,
        "optimizer": optimizer,
        "decay": decay,
        "clip": clip,
        "ema": ema,
        "layer_decay": layer_decay,
        "loss": loss,
        "label_smoothing": label_smoothing,
        "dropout": dropout,
        "drop_path": drop_path,
        "freeze": tuple(freeze) if freeze else None,
        "val": val,
    }
    settings = {
        "seed": seed,
        "precision": precision,
        "device": device,
        "micro_batch": micro_batch,
        "workers": workers,
        "bad_images": bad_images,
        "compile": compile_ or None,
        "deterministic": deterministic or None,
        "checkpointing": checkpointing or None,
        "log_every": log_every,
        "evaluate_every": evaluate_every,
        "save_every": save_every,
        "trackers": None if not tracker else tuple(name for name in tracker if name != "none"),
    }
    size = parse_size(image_size)

    from vitkit.jobs.train import prepare

    ready = prepare(
        data,
        out,
        recipe=recipe,
        model=model,
        weights=weights,
        image_size=size,
        resume=resume,
        accumulate=accumulate,
        changes=changes,
        settings=settings,
    )
    if dry_run:
        from vitkit.jobs.dry_run import dry_run as describe

        if ready.runtime.main:
            plan = describe(ready)
            print(json.dumps(plan, indent=1)) if as_json else show_plan(plan)
        return
    carry_out(ready, report)


def carry_out(ready: Any, report: bool = True) -> None:
    """Train what was prepared, and show it; Ctrl-C saves, says how to go on, and ends with exit code 130."""
    from vitkit.cli.watch import Watch
    from vitkit.jobs.train import start

    main = ready.runtime.main
    for note in ready.notes if main else ():
        print(f"note: {note}", file=sys.stderr)
    if main:
        with Watch() as watch:
            watch.say(summary(ready.info))
            run, outcome = start(ready, watch)
    else:
        run, outcome = start(ready)
    ready.runtime.close()
    if outcome.stopped:
        if main:
            print(
                f"stopped at step {outcome.step:,} of {outcome.total:,}; all of it is saved. Go on with: "
                f"vitkit train --out {run.path} --resume"
            )
        raise typer.Exit(130)
    if main:
        best = f", best on validation {outcome.best:.2%}" if outcome.best is not None else ""
        print(
            f"done: {outcome.total:,} steps in {outcome.seconds:.0f} s{best}. The run is {run.path}; it stands "
            f"wherever weights are taken:\n  vitkit eval {run.path} {ready.info['data']['spec']}"
        )
    if main and report:
        from vitkit.jobs.report import try_report

        print(try_report(run.path))


def summary(info: dict[str, Any]) -> str:
    """One line that says what is trained on what, and how."""
    data = info["data"]
    return (
        f"{info['recipe_name']}: {info['model'] or info['weights'] or 'its own model'}, "
        f"{info['trained']:,} parameters, on {data['train']:,} images of {len(data['classes'])} classes "
        f"({data['val']:,} for validation), {info['steps']:,} steps of {info['recipe']['batch_size']}, "
        f"{info['settings']['precision']} on {info['device']}"
        + (f" x {info['processes']}" if info["processes"] > 1 else "")
    )


def show_plan(plan: dict[str, Any]) -> None:
    """Print what a run would do."""
    from vitkit.cli.text import print_table

    data, batch, memory = plan["data"], plan["batch"], plan["memory"]
    print_table(
        ["would be", "value"],
        [
            (
                "data",
                f"{data['spec']}: {data['train']:,} to train on, {data['val']:,} to validate, "
                f"{len(data['classes'])} classes",
            ),
            ("recipe", plan["recipe"]),
            ("model", f"{plan['parameters']:,} parameters, {plan['trained']:,} trained, {plan['image_size']} pixels"),
            ("steps", f"{plan['steps']:,} ({plan['epochs']:.1f} epochs)"),
            (
                "batch",
                f"{batch['images']} = {batch['processes']} processes x {batch['accumulated']} micro-batches x "
                f"{batch['micro']}",
            ),
            ("optimiser", f"{plan['optimizer']}, warm-up {plan['warmup']:,} steps"),
            ("learning rate", ", ".join(f"{lr:.3g} at {step:,}" for step, lr in plan["lr"].items())),
            ("device", f"{plan['device']}, {plan['precision']}"),
            ("memory", ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in memory.items() if size)),
            ("time", f"{plan['seconds_per_step']:.2f} s a step, {plan['hours']:.2f} h in all (from one micro-batch)"),
        ],
    )
    for note in plan["notes"]:
        print(f"note: {note}")
