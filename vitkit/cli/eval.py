"""`vitkit eval`: how good a model is, and how sure one can be of that."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitkit.cli.options import ENGINES, BadImages, BatchSize, Device, ImageSize, Mean, Precision, Std, Weights, Workers

if TYPE_CHECKING:
    from vitkit.jobs.evaluate import Evaluation

CLASSES = 30  # rows of the table of classes; the files hold all


def evaluate(
    weights: Weights,
    data: Annotated[str, typer.Argument(help="A folder, a .csv, .parquet or .tar file, or kind:place.")],
    split: Annotated[
        str | None, typer.Option("--split", help="Part of the data; test, else val, when not given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html into a run.")] = True,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for evaluation.json and the CSV files; that of the run when not given."),
    ] = None,
    in_order: Annotated[
        bool,
        typer.Option(
            "--in-order", help="The data's classes stand in the order of the model's outputs, whatever they are called."
        ),
    ] = False,
    worst: Annotated[int, typer.Option("--worst", min=0, help="Wrong answers to list, the surest first.")] = 5,
    bad_images: BadImages = "fail",
    batch_size: BatchSize = 64,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help=f"Another way to run the model: {ENGINES}; says how far its answers are from the plain model's.",
        ),
    ] = None,
    mean: Mean = None,
    std: Std = None,
    image_size: ImageSize = None,
) -> None:
    """Evaluate: accuracy with its uncertainty, per class, confusion, calibration, worst errors."""
    from vitkit.cli import options as common
    from vitkit.errors import ConfigError
    from vitkit.jobs import evaluate as job
    from vitkit.runtime import Runtime

    if engine is not None and precision != "fp32":
        raise ConfigError(f"An engine has its own precision; leave --precision {precision} or --engine {engine} out.")
    run = job.run_of(weights)
    source, part = job.part_of(data, split, run)
    place = Runtime(device, precision)
    fast = job.ByEngine(common.load(weights, place, mean, std, image_size), engine) if engine is not None else None
    model = fast or common.load_classifier(weights, place, mean, std, image_size)
    how: dict[str, Any] = {"runtime": place, "batch_size": batch_size, "workers": workers, "bad_images": bad_images}
    with common.counting("evaluating", len(source) * (1 if fast is None else 2), show=place.main) as tick:
        found = job.evaluate(
            model,
            source,
            weights=weights,
            data=data,
            part=part,
            same_order=in_order,
            progress=tick,
            worst=max(worst, 20),
            **how,
        )
        beside = fast.against_plain(found, source, progress=tick, **how) if fast is not None else None
    more = {"engine": fast.name, "against_plain": beside.to_dict()} if fast is not None and beside is not None else {}
    folder = out or (run.path if run else None)
    if place.main:
        written = job.write(folder, found, more) if folder else []
        if as_json:
            print(json.dumps(found.to_dict() | more, indent=1))
        else:
            show(found, worst)
            for line in beside.sentences() if beside is not None else ():
                print(line)
            print(f"wrote {', '.join(map(str, written))}" if written else "(--out DIR writes all of it: JSON, CSV)")
        if report and run and folder == run.path:
            from vitkit.jobs.report import try_report

            print(try_report(run.path), file=sys.stderr if as_json else sys.stdout)
        for _, why in found.outputs.skipped:
            print(f"vitkit: skipped {why}", file=sys.stderr)
    place.close()
    if found.outputs.skipped or (beside is not None and not beside.within):
        raise typer.Exit(1)


def show(found: Evaluation, worst: int) -> None:
    """Print an evaluation for people.

    Args:
        found: the evaluation.
        worst: wrong answers to list.
    """
    from vitkit.cli.text import print_table

    m = found.measures
    print(f"{found.weights} on {found.part} of {found.data}: {m.n:,} images, {m.n / found.seconds:,.1f} images/s")
    print(
        f"top-1     {m.top1:.4f}   95% between {m.ci95[0]:.4f} and {m.ci95[1]:.4f}   ({round(m.top1 * m.n)} of {m.n})"
    )
    if len(m.per_class) > 5:
        print(f"top-5     {m.top5:.4f}   95% between {m.top5_ci95[0]:.4f} and {m.top5_ci95[1]:.4f}")
    print(f"macro F1  {m.macro_f1:.4f}")
    print(f"ECE       {m.ece:.4f}   mean confidence against accuracy; NLL {m.nll:.4f}")
    seen = sorted((score for score in m.per_class if score.support), key=lambda score: score.f1)
    rows = [[s.name, f"{s.precision:.3f}", f"{s.recall:.3f}", f"{s.f1:.3f}", s.support] for s in seen]
    if len(m.per_class) <= CLASSES and m.confusion is not None:
        names = [s.name for s in m.per_class]
        print_table(
            ["truth \\ said", *(f"{name}#" for name in names)],
            [[name, *row] for name, row in zip(names, m.confusion.tolist())],
        )
    print_table(["class (worst first)", "precision#", "recall#", "F1#", "images#"], rows[:CLASSES])
    if len(rows) > CLASSES:
        print(f"({len(rows) - CLASSES} more classes are better)")
    if m.worst and worst:
        print("Surest errors:")
        for wrong in m.worst[:worst]:
            print(f"  {wrong.image}: {wrong.truth}, said {wrong.predicted} ({wrong.confidence:.1%})")
