"""`vitkit train`: data and a recipe -> a run folder."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.options import loads_weights, parse_fields, parse_size

of_machine = partial(typer.Option, rich_help_panel="The machine")


def of_recipe(name: str, help: str) -> Any:
    """Declare an option that changes one number of the recipe."""
    text = f"{help.removesuffix('.')} (default: the recipe's)."
    return typer.Option(name, rich_help_panel="Changes to the recipe", help=text)


@loads_weights
def train(
    data: Annotated[
        str | None,
        typer.Argument(
            help="A folder of images (train/CLASS/*.jpg), a .csv, or a name such as digits (default with --resume: the "
            "run's own data)."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the run, which must not exist yet (required).")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", help="A recipe; see `vitkit recipes` (default: finetune with --from, otherwise small-data)."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Variant to train from scratch; see `vitkit models` (default: the recipe's)."),
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Change a field of the new model, such as hidden_size=256; repeat for several (default: none).",
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--from", help="Pre-trained weights: a file, a run or a hub id (default: none).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run at --out.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, without training.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the --dry-run as JSON.")] = False,
    image_size: Annotated[
        str | None,
        typer.Option(
            "--image-size", help="Image size in pixels: 384, or 384x512 (default: the recipe's or the model's)."
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write report.html at the end (default: yes).")
    ] = True,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed (default: 0).")] = None,
    val: Annotated[
        float | None,
        typer.Option(
            "--val", help="Share of train to hold out if there is no val folder; 0 for none (default: the recipe's)."
        ),
    ] = None,
    epochs: Annotated[float | None, of_recipe("--epochs", help="Passes over the training data.")] = None,
    steps: Annotated[int | None, of_recipe("--steps", help="Number of updates, instead of --epochs.")] = None,
    batch_size: Annotated[int | None, of_recipe("--batch-size", help="Images per update, over all processes.")] = None,
    lr: Annotated[float | None, of_recipe("--lr", help="Base learning rate.")] = None,
    lr_rule: Annotated[
        str | None, of_recipe("--lr-rule", help="How lr follows another --batch-size: fixed, linear or sqrt.")
    ] = None,
    warmup: Annotated[
        float | None, of_recipe("--warmup", help="Warm-up steps; a value below 1 is a share of the run.")
    ] = None,
    weight_decay: Annotated[
        float | None, of_recipe("--weight-decay", help="Decoupled weight decay of kernels, relative to lr.")
    ] = None,
    optimizer: Annotated[str | None, of_recipe("--optimizer", help="Optimizer: adamw, adam or sgd.")] = None,
    decay: Annotated[
        str | None, of_recipe("--decay", help="Shape of the lr schedule: linear, cosine or constant.")
    ] = None,
    final_lr: Annotated[float | None, of_recipe("--final-lr", help="Learning rate at the end of the decay.")] = None,
    clip: Annotated[float | None, of_recipe("--clip", help="Largest global norm of the gradient.")] = None,
    ema: Annotated[
        float | None, of_recipe("--ema", help="Decay of the running average of the weights, such as 0.9999.")
    ] = None,
    layer_decay: Annotated[
        float | None, of_recipe("--layer-decay", help="lr of each layer relative to the layer above.")
    ] = None,
    loss: Annotated[str | None, of_recipe("--loss", help="Loss: softmax or sigmoid.")] = None,
    label_smoothing: Annotated[
        float | None, of_recipe("--label-smoothing", help="Share of each target spread over all classes.")
    ] = None,
    class_weights: Annotated[
        str | None,
        of_recipe(
            "--class-weights",
            help="Weights of the classes in the loss: equal, or balanced (an image of a rare class counts more).",
        ),
    ] = None,
    sampling: Annotated[
        str | None,
        of_recipe(
            "--sampling",
            help="How images are drawn: uniform (each once per epoch), or balanced (every class equally often).",
        ),
    ] = None,
    early_stop: Annotated[
        int | None,
        of_recipe("--early-stop", help="Stop after N validations in a row without a better one; the best is kept."),
    ] = None,
    dropout: Annotated[float | None, of_recipe("--dropout", help="Dropout rate of dense layers.")] = None,
    drop_path: Annotated[
        float | None, of_recipe("--drop-path", help="Stochastic-depth rate of the last block.")
    ] = None,
    freeze: Annotated[
        list[str] | None,
        of_recipe("--freeze", help="Parameters to freeze: a name or a pattern such as 'blocks.0.*'. Repeatable."),
    ] = None,
    from_probe: Annotated[
        bool,
        of_recipe("--from-probe", help="Start the head from logistic regression on frozen features, not from zeros."),
    ] = False,
    lora: Annotated[
        int | None,
        of_recipe(
            "--lora",
            help="Rank of low-rank adapters on qkv and MLP, such as 8; only they and the head are trained.",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        of_machine("--precision", help="fp32, or mixed precision: bf16, fp16 or, on CUDA, fp8 (default: fp32)."),
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
    accumulate: Annotated[
        int | None, of_machine("--accumulate", help="Micro-batches per update, instead of --micro-batch (default: 1).")
    ] = None,
    workers: Annotated[
        int | None, of_machine("--workers", help="Worker processes for decoding (default: one per core).")
    ] = None,
    verify_data: Annotated[
        bool, of_machine("--verify-data", help="Record or compare every byte of the images, not just parts of each.")
    ] = False,
    bad_images: Annotated[
        str | None, of_machine("--bad-images", help="What to do about unreadable images: fail or skip (default: fail).")
    ] = None,
    compile_: Annotated[bool, of_machine("--compile", help="Use torch.compile.")] = False,
    deterministic: Annotated[
        bool, of_machine("--deterministic", help="Use only bit-reproducible CUDA kernels, which are slower.")
    ] = False,
    checkpointing: Annotated[
        bool, of_machine("--checkpointing", help="Recompute activations in the backward pass: less memory, more time.")
    ] = False,
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
    """Train a Vision Transformer. A run that is resumed is bit-identical to an uninterrupted one."""
    from vitkit.errors import ConfigError

    if out is None:
        raise ConfigError("Expected a folder for the run; got none. Give --out, such as --out runs/first.")
    if micro_batch is not None and accumulate is not None:
        raise ConfigError("Expected either --micro-batch or --accumulate; got both. Leave one out.")
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
        "final_lr": final_lr,
        "clip": clip,
        "ema": ema,
        "layer_decay": layer_decay,
        "loss": loss,
        "label_smoothing": label_smoothing,
        "class_weights": class_weights,
        "sampling": sampling,
        "early_stop": early_stop,
        "dropout": dropout,
        "drop_path": drop_path,
        "freeze": tuple(freeze) if freeze else None,
        "from_probe": from_probe or None,
        "lora": lora,
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
    if not dry_run and os.environ.get("RANK", "0") == "0":  # importing torch and scanning a large folder take a while
        print(f"preparing {'to resume ' if resume else ''}{out}", flush=True)

    from vitkit.jobs.train import prepare

    ready = prepare(
        data,
        out,
        recipe=recipe,
        model=model,
        fields=parse_fields(fields),
        weights=weights,
        loading=overrides,
        image_size=size,
        resume=resume,
        accumulate=accumulate,
        verify_data=verify_data,
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
    """Carry out a prepared run and show its progress.

    Ctrl-C, SIGTERM and SIGHUP save it; the exit code is 128 plus the number of the signal.
    """
    from vitkit.cli.text import console, printable
    from vitkit.jobs.train import start
    from vitkit.jobs.watch import Watch, summary
    from vitkit.training.objectives import OBJECTIVES

    main = ready.runtime.main
    for note in ready.notes if main else ():
        print(f"note: {note}", file=sys.stderr)
    if main:
        with Watch(console=console(), clean=printable) as watch:
            watch.say(summary(ready.info))
            run, outcome = start(ready, watch)
    else:
        run, outcome = start(ready)
    ready.runtime.close()
    if outcome.stopped:
        if main:
            say_last(
                f"stopped at step {outcome.step:,} of {outcome.total:,}; everything is saved. Resume with: "
                f"vitkit train --out {run.path} --resume"
            )
        raise typer.Exit(128 + outcome.signal)
    if main:
        objective, best = OBJECTIVES[ready.recipe.objective], ""
        if outcome.best is not None:
            by_loss = f"lowest validation loss {outcome.best:.4f}"
            best = ", " + (by_loss if objective.judge == "loss" else f"best on validation {outcome.best:.2%}")
        then = f"eval {run.path} {ready.info['data']['spec']}" if objective.labels else f"train DATA --from {run.path}"
        steps = f"{outcome.step:,} of {outcome.total:,} steps" if outcome.why else f"{outcome.step:,} steps"
        print(
            f"done: {steps} in {outcome.seconds:.0f} s{best}. You can pass the run folder, {run.path}, "
            f"anywhere weights are expected:\n  vitkit {then}"
        )
    if main and report:
        from vitkit.jobs.report import try_report

        print(try_report(run.path))


def say_last(text: str) -> None:
    """Print a line to a terminal that may be gone, as after SIGHUP; the exit code must not depend on it."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_plan(plan: dict[str, Any]) -> None:
    """Print the result of a dry run."""
    from vitkit.cli.text import print_table

    data, batch, memory = plan["data"], plan["batch"], plan["memory"]
    print_table(
        ["dry run", ""],
        [
            (
                "data",
                f"{data['spec']}: {data['train']:,} training images, {data['val']:,} validation images, "
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
            ("optimizer", f"{plan['optimizer']}, warm-up {plan['warmup']:,} steps"),
            ("learning rate", ", ".join(f"{lr:.3g} at {step:,}" for step, lr in plan["lr"].items())),
            ("device", f"{plan['device']}, {plan['precision']}"),
            ("memory", ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in memory.items() if size)),
            ("time", f"{plan['seconds_per_step']:.2f} s per step, {plan['hours']:.2f} h in all (from one micro-batch)"),
        ],
    )
    for note in plan["notes"]:
        print(f"note: {note}")
