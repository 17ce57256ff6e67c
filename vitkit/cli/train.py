"""`vitkit train`: data and a recipe -> a run folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vitkit.cli.config_file import takes_config
from vitkit.cli.options import loads_weights, parse_fields, parse_size
from vitkit.cli.run_options import LABELLED, DryRun, Fields, Out, Resume, RunReport, RunSize, of_machine, run_options

PICTURES = (".png", ".svg", ".pdf")
UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6}


@takes_config
@loads_weights
@run_options(LABELLED)
def train(
    data: Annotated[
        str | None,
        typer.Argument(
            help="A folder of images (train/CLASS/*.jpg), a .csv, or a name such as digits (default with --resume: the "
            "run's own data)."
        ),
    ] = None,
    out: Out = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="A recipe; see `vitkit recipes` (default: finetune with --from, otherwise small-data, which "
            "needs --model).",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Variant to train from scratch; see `vitkit models` (default: the recipe's)."),
    ] = None,
    fields: Fields = None,
    weights: Annotated[
        str | None, typer.Option("--from", help="Pre-trained weights: a file, a run or a hub id (default: none).")
    ] = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", help="With --dry-run, also show what this many GPUs would need (default: none)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the --dry-run as JSON.")] = False,
    show_augmentations: Annotated[
        Path | None,
        typer.Option(
            "--show-augmentations",
            metavar="FILE",
            help="Draw the first batch as the model sees it, next to the originals, and stop (default: train).",
        ),
    ] = None,
    image_size: RunSize = None,
    report: RunReport = True,
    accumulate: Annotated[
        int | None, of_machine("--accumulate", help="Micro-batches per update, instead of --micro-batch (default: 1).")
    ] = None,
    verify_data: Annotated[
        bool, of_machine("--verify-data", help="Record or compare every byte of the images, not just parts of each.")
    ] = False,
    *,
    changes: dict[str, Any],
    settings: dict[str, Any],
    overrides: dict[str, Any],
    more: dict[str, Any],
) -> None:
    """Train a Vision Transformer. A run that is resumed is bit-identical to an uninterrupted one."""
    from vitkit.errors import ConfigError

    if show_augmentations is not None:
        out = out or show_augmentations.with_name(f".vitkit-{show_augmentations.stem}")  # nothing is written there
    out = folder_of(out, dry_run, "vitkit train --resume" if resume else "", data)
    if "micro_batch" in settings and accumulate is not None:
        raise ConfigError("Expected either --micro-batch or --accumulate; got both. Leave one out.")
    if gpus is not None and (gpus < 1 or not dry_run):
        raise ConfigError(f"--gpus must be a positive whole number, and needs --dry-run; got {gpus}.")
    size = parse_size(image_size)
    quick = dry_run or show_augmentations is not None
    if not quick and os.environ.get("RANK", "0") == "0":  # importing torch and scanning a large folder take a while
        print(f"preparing {'to resume ' if resume else ''}{out}", flush=True)

    from vitkit.jobs.train import prepare

    if show_augmentations is not None and show_augmentations.suffix.lower() not in PICTURES:
        raise ConfigError(f"--show-augmentations must end in {', '.join(PICTURES)}; got {show_augmentations}.")
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
        changes=more | changes,
        settings=settings,
    )
    if show_augmentations is not None:
        from vitkit.explanations import draw
        from vitkit.jobs.augmentations import picture

        if ready.runtime.main:
            print(f"picture: {draw.save(picture(ready), show_augmentations)}")
        return
    if dry_run:
        from vitkit.jobs.dry_run import dry_run as describe

        if ready.runtime.main:
            plan = describe(ready, gpus)
            print(json.dumps(plan, indent=1)) if as_json else show_plan(plan)
        return
    carry_out(ready, report)


def folder_of(out: Path | None, dry_run: bool, resume: str = "", data: str | None = None) -> Path:
    """Return the run's folder; for a new run that is only planned, one that nothing is written to if none is given.

    Args:
        out: the value of --out.
        dry_run: whether the run is only planned.
        resume: the command that resumes a run, if one is to be resumed (default: none is).
        data: the data as given, which may be the run that was meant.
    """
    from vitkit.errors import ConfigError
    from vitkit.training.run_folder import RunFolder

    if out is None and resume:
        run = data if data and RunFolder.exists(Path(data).expanduser()) else "RUN"
        raise ConfigError(f"Expected a folder for the run; got none. To continue a run: {resume} --out {run}")
    if out is None and not dry_run:
        raise ConfigError("Expected a folder for the run; got none. Give --out, such as --out runs/first.")
    return out or Path(".vitkit-plan")


def carry_out(ready: Any, report: bool = True) -> None:
    """Carry out a prepared run and show its progress.

    Ctrl-C, SIGTERM and SIGHUP save it; the exit code is 128 plus the number of the signal.
    """
    from vitkit.cli.text import console, printable, say_last
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
            word = "mAP " if objective.judge == "mean_ap" else ""
            best = ", " + (by_loss if objective.judge == "loss" else f"best {word}on validation {outcome.best:.2%}")
        then = f"eval {run.path} {ready.info['data']['spec']}" if objective.labels else f"train DATA --from {run.path}"
        steps = f"{outcome.step:,} of {outcome.total:,} steps" if outcome.why else f"{outcome.step:,} steps"
        print(
            f"done: {steps} in {outcome.seconds:.0f} s{best}. You can pass the run folder, {run.path}, "
            f"anywhere weights are expected:\n  vitkit {then}"
        )
    if main and report:
        from vitkit.jobs.report import try_report

        print(try_report(run.path))


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
                f"{'' if batch['even'] else 'at most '}{batch['micro']}",
            ),
            ("optimizer", f"{plan['optimizer']}, warm-up {plan['warmup']:,} steps"),
            ("learning rate", ", ".join(f"{lr:.3g} at {step:,}" for step, lr in plan["lr"].items())),
            ("device", f"{plan['device']}, {plan['precision']}"),
            ("memory", ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in memory.items() if size)),
            (
                "time",
                f"{plan['seconds_per_step']:.2f} s per step, {plan['hours']:.2f} h in all "
                f"(measured with {plan['measured_images']} images)",
            ),
        ],
    )
    if "scale" in plan:
        print()
        show_scale(plan["scale"])
    for note in plan["notes"]:
        print(f"note: {note}")


def show_scale(found: dict[str, Any]) -> None:
    """Print what a run would need on several GPUs."""
    from vitkit.cli.text import print_table

    def size(count: float) -> str:
        unit = next(unit for unit in ("TB", "GB", "MB") if count >= UNITS[unit] or unit == "MB")
        return f"{count / UNITS[unit]:,.{1 if count < 100 * UNITS[unit] else 0}f} {unit}"

    memory = ", ".join(f"{name} {size(value)}" for name, value in found["memory"].items() if value and name != "all")
    source = "measured here" if found["measured_here"] else "estimated from measurements on an H200"
    why = {
        "images": "beyond, each GPU has fewer than 32 images per step, where its speed was not measured",
        "link": f"beyond, the network takes longer than the backward pass, at {size(found['link'])}/s per GPU",
    }
    print_table(
        [f"{found['gpus']:,} GPUs", ""],
        [
            ("each", f"{found['gpu']}, {found['speed_of_one']:,.0f} images/s in bf16 ({source})"),
            (
                "time",
                f"{found['seconds_per_step']:.3g} s per step of {found['images_per_gpu']:,.0f} images each, "
                f"{found['images_per_second']:,.0f} images/s, {found['hours']:,.1f} h in all, {found['waiting']:.0%} "
                f"waiting for the network at {size(found['link'])}/s per GPU",
            ),
            ("memory of each", f"{size(found['memory']['all'])}: {memory}"),
            (
                "cores",
                f"{found['cores']:,} to decode ({found['cores_per_gpu']} per GPU), at the {found['decode']:,.0f} "
                "images/s of one core here",
            ),
            (
                "disk",
                f"{size(found['data'])} of images, read at {size(found['read_per_second'])}/s; "
                f"{size(found['disk'])} for the run, {size(found['state'])} per save",
            ),
            (
                "network",
                f"{size(found['sent_per_step'])} sent per GPU and step; {size(found['link_needed'])}/s would hide it",
            ),
            ("scales to", f"about {found['most_gpus']:,} at this batch size; {why[found['limit']]}"),
        ],
    )
