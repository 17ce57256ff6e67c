"""`vitkit eval`: measure a model's accuracy, with its uncertainty."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitkit.cli.options import (
    ENGINES,
    BadImagesOrRows,
    BatchSize,
    Decode,
    Device,
    On,
    Precision,
    Weights,
    Workers,
    loads_weights,
)
from vitkit.cli.text import one_line

if TYPE_CHECKING:
    from vitkit.evaluation.labels import LabelMeasures
    from vitkit.jobs.evaluate import Evaluation

CLASSES = 30  # rows of the printed table; the files hold every class


@loads_weights
def evaluate(
    weights: Weights,
    data: Annotated[str, typer.Argument(help="Data: a folder, a .csv, .parquet or .tar file, or kind:place.")],
    split: Annotated[
        str | None, typer.Option("--split", help="Part of the data (default: test, or val if there is no test part).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Update the run's report.html.")] = True,
    out: Annotated[
        str | None,
        typer.Option("--out", help="Folder for evaluation.json and the CSV files (default: the run folder)."),
    ] = None,
    in_order: Annotated[
        bool,
        typer.Option(
            "--in-order", help="Match the data's classes to the model's outputs by position instead of by name."
        ),
    ] = False,
    worst: Annotated[
        int, typer.Option("--worst", min=0, help="Wrong predictions to list, highest confidence first.")
    ] = 5,
    bad_images: BadImagesOrRows = None,
    batch_size: BatchSize = None,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = "auto",
    decode: Decode = "cpu",
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help=f"Engine to run the model with: {ENGINES}. Its outputs are compared with the plain model's (default: "
            "the plain model).",
        ),
    ] = None,
    on: On = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Evaluate a model: accuracy with its uncertainty, scores per class, confusion, calibration, worst errors."""
    from vitkit.checkpoints.outputs import check_folder
    from vitkit.cli import options as common
    from vitkit.errors import ConfigError
    from vitkit.jobs import evaluate as job
    from vitkit.jobs.open_model import open_model
    from vitkit.runtime import Runtime

    if engine is not None and precision != "auto":
        raise ConfigError(
            f"Expected --precision or --engine, not both, because an engine has its own precision; got {precision} and "
            f"{engine}. Leave one out."
        )
    run = job.run_of(weights)
    source, part = job.part_of(data, split, run)
    about: dict[str, Any] = {
        "weights": weights,
        "data": data,
        "part": part,
        "same_order": in_order,
        "worst": max(worst, 20),
    }
    how: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    if on is not None:
        from vitkit.cli import on_ray

        shards = on_ray.check(on, out, engine=engine, decode=decode != "cpu")
        how |= {"device": device, "precision": precision, "bad_images": bad_images or "skip"}
        found = on_ray.evaluate(on_ray.load(weights, overrides), source, shards, about, how)
        if as_json:
            print(json.dumps(found.to_dict(), indent=1))
        else:
            show(found, worst)
            print(f"wrote {shards}")
        on_ray.tell(found.outputs.skipped, len(source))
        return
    if out:
        check_folder(out)
    runtime = Runtime(device, "fp32" if engine is not None else precision)
    fast = job.ByEngine(common.load(weights, runtime, overrides), engine) if engine is not None else None
    model = fast or open_model(weights, runtime.device, **overrides)
    how |= {"runtime": runtime, "bad_images": bad_images or "fail", "decode": decode}
    with common.counting("evaluating", len(source) * (1 if fast is None else 2), show=runtime.main) as tick:
        found = job.evaluate(model, source, progress=tick, **about, **how)
        against = fast.against_plain(found, source, progress=tick, **how) if fast is not None else None
    more = {"engine": fast.name, "against_plain": against.to_dict()} if fast is not None and against is not None else {}
    folder = Path(out) if out else run.path if run else None
    if runtime.main:
        written = job.write(folder, found, more) if folder else []
        if as_json:
            print(json.dumps(found.to_dict() | more, indent=1))
        else:
            show(found, worst)
            for line in against.sentences() if against is not None else ():
                print(line)
            print(
                f"wrote {', '.join(map(str, written))}" if written else "(pass --out DIR to write JSON and CSV files)"
            )
        if report and run and folder == run.path:
            from vitkit.jobs.report import try_report

            print(try_report(run.path), file=sys.stderr if as_json else sys.stdout)
        for _, why in found.outputs.skipped:
            print(f"vitkit: skipped {one_line(why)}", file=sys.stderr)
    runtime.close()
    if found.outputs.skipped or (against is not None and not against.within):
        raise typer.Exit(1)


def show(found: Evaluation, worst: int) -> None:
    """Print the result of an evaluation.

    Args:
        found: the result.
        worst: number of wrong predictions to list.
    """
    from vitkit.cli.text import print_table
    from vitkit.evaluation.labels import LabelMeasures

    m = found.measures
    print(
        f"{found.weights} on {found.part} of {found.data}: {m.n:,} images, {m.n / found.seconds:,.1f} images/s, "
        f"{found.precision}{', decoded on the GPU' if found.decode == 'gpu' else ''}"
    )
    if isinstance(m, LabelMeasures):
        show_labels(m, worst)
        return
    print(
        f"top-1     {m.top1:.4f}   95% interval {m.ci95[0]:.4f} to {m.ci95[1]:.4f}   ({round(m.top1 * m.n)} of {m.n})"
    )
    if len(m.per_class) > 5:
        print(f"top-5     {m.top5:.4f}   95% interval {m.top5_ci95[0]:.4f} to {m.top5_ci95[1]:.4f}")
    print(f"macro F1  {m.macro_f1:.4f}")
    print(f"NLL       {m.nll:.4f}")
    print(f"ECE       {m.ece:.4f}   mean gap between confidence and accuracy")
    seen = sorted((score for score in m.per_class if score.support), key=lambda score: score.f1)
    rows = [[s.name, f"{s.precision:.3f}", f"{s.recall:.3f}", f"{s.f1:.3f}", s.support] for s in seen]
    if len(m.per_class) <= CLASSES and m.confusion is not None:
        names = [s.name for s in m.per_class]
        print_table(
            ["true \\ predicted", *(f"{name}#" for name in names)],
            [[name, *row] for name, row in zip(names, m.confusion.tolist())],
        )
    print_table(["class (worst first)", "precision#", "recall#", "F1#", "images#"], rows[:CLASSES])
    if len(rows) > CLASSES:
        print(f"({len(rows) - CLASSES} more classes with a higher F1)")
    if m.worst and worst:
        print("Most confident errors:")
        for wrong in m.worst[:worst]:
            print(f"  {wrong.image}: {wrong.truth}, predicted {wrong.predicted} ({wrong.confidence:.1%})")


def show_labels(m: LabelMeasures, worst: int) -> None:
    """Print the measures of a model that gives an image any number of labels.

    Args:
        m: the measures.
        worst: number of mistakes to list.
    """
    from vitkit.cli.text import print_table

    print(f"mAP       {m.mean_ap:.4f}   95% interval {m.ci95[0]:.4f} to {m.ci95[1]:.4f}")
    low, high = m.micro_f1_ci95
    print(f"micro F1  {m.micro_f1:.4f}   95% interval {low:.4f} to {high:.4f}   at the model's thresholds")
    print(f"macro F1  {m.macro_f1:.4f}")
    print(f"exact     {m.exact:.4f}   images that get exactly their labels ({round(m.exact * m.n)} of {m.n})")
    print(f"NLL       {m.nll:.4f}   binary cross-entropy, summed over the labels")
    seen = sorted(m.per_class, key=lambda score: (score.ap is None, score.ap))
    rows: list[list[object]] = [
        [
            s.name,
            "" if s.ap is None else f"{s.ap:.3f}",
            "" if s.ap_ci95 is None else f"{s.ap_ci95[0]:.3f} to {s.ap_ci95[1]:.3f}",
            *(f"{value:.3f}" for value in (s.threshold, s.precision, s.recall, s.f1)),
            s.support,
            s.predicted,
        ]
        for s in seen
    ]
    print_table(
        [
            "label (worst first)",
            "AP#",
            "95% interval#",
            "threshold#",
            "precision#",
            "recall#",
            "F1#",
            "images#",
            "predicted#",
        ],
        rows[:CLASSES],
    )
    if len(rows) > CLASSES:
        print(f"({len(rows) - CLASSES} more labels with a higher AP)")
    if m.without:
        print(
            f"{len(m.without)} of the {len(m.per_class)} labels have no image here, so mAP leaves them out: "
            f"{', '.join(m.without[:5])}{', ...' if len(m.without) > 5 else ''}"
        )
    if m.worst and worst:
        print("Mistakes farthest from their thresholds:")
        for one in m.worst[:worst]:
            what = "missed" if one.present else "invented"
            print(
                f"  {one.image}: {what} {one.label} ({one.probability:.1%}, threshold {one.threshold:.1%}; "
                f"truth {one.truth}, predicted {one.predicted})"
            )
