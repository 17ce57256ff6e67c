"""`vitkit probe`: fit a classifier to frozen features."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitkit.cli.options import BadImages, BatchSize, Cache, Device, Features, From, Precision, Workers, loads_weights
from vitkit.cli.text import one_line

if TYPE_CHECKING:
    from vitkit.jobs.probe import Probe


@loads_weights
def probe(
    data: Annotated[str, typer.Argument(help="Data: a folder, a .csv, .parquet or .tar file, or kind:place.")],
    weights: From,
    out: Annotated[Path, typer.Option("--out", help="Run folder to create.")],
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="logistic, sgd (for many images or classes), ridge (the paper's few-shot regression) or knn. With "
            "several, separated by commas, the first is saved.",
        ),
    ] = "logistic",
    features: Features = None,
    cache: Cache = None,
    strength: Annotated[
        float | None,
        typer.Option(
            "--strength", help="C of logistic regression; smaller is stronger (default: chosen by cross-validation)."
        ),
    ] = None,
    folds: Annotated[int, typer.Option("--folds", help="Folds of the cross-validation.")] = 5,
    accept: Annotated[
        float | None,
        typer.Option(
            "--accept",
            help="Share of images of the known classes to accept, such as 0.95; images farther away are answered with "
            "'none of these' (default: every image gets a class).",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html to the run folder.")] = True,
    bad_images: BadImages = "fail",
    batch_size: BatchSize = None,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = "auto",
    *,
    overrides: dict[str, Any],
) -> None:
    """Fit a classifier to frozen features; the backbone runs once, and not at all if the features are cached."""
    from vitkit.cli import options as common
    from vitkit.features.probe import Options, parse_methods
    from vitkit.jobs import embed
    from vitkit.jobs import probe as job
    from vitkit.model import checks
    from vitkit.runtime import Runtime
    from vitkit.training.run_folder import RunFolder

    if accept is not None:
        checks.number("accept", accept, 0, 1, open_low=True)
    options, methods = Options(folds=folds, strength=strength, seed=seed), parse_methods(method)
    RunFolder.check_place(out)
    parts = job.parts_of(data, seed)
    runtime = Runtime(device, precision)
    model = common.load(weights, runtime, overrides)
    kept = embed.open_cache(cache, lambda sentence: print(f"vitkit: {sentence}", file=sys.stderr))
    with common.counting("embedding", len(parts.train) + len(parts.held), show=runtime.main) as tick:
        found = job.probe(
            model,
            data,
            out,
            kept,
            methods=methods,
            options=options,
            features=features,
            weights=weights,
            batch_size=batch_size,
            workers=workers,
            runtime=runtime,
            progress=tick,
            parts=parts,
            bad_images=bad_images,  # type: ignore[arg-type]
            accept=accept,
        )
    skipped = (*found.train.skipped, *found.held.skipped)
    if runtime.main:
        if as_json:
            print(
                json.dumps(
                    found.evaluation.to_dict()
                    | {
                        "run": str(found.run.path),
                        "features": found.train.choice.name,
                        "accept": accept,
                        "accepted": found.run.info.get("accepted"),
                        "work_seconds": found.seconds["work"],
                        "computed": found.train.computed + found.held.computed,
                        "methods": [result.to_dict() for result in found.results],
                    },
                    indent=1,
                )
            )
        else:
            show(found, data)
        if report:
            from vitkit.jobs.report import try_report

            print(try_report(found.run.path), file=sys.stderr if as_json else sys.stdout)
        for _, why in skipped:
            print(f"vitkit: skipped {one_line(why)}", file=sys.stderr)
    runtime.close()
    if skipped:
        raise typer.Exit(1)


def show(found: Probe, data: str) -> None:
    """Print the result of a probe.

    Args:
        found: the result.
        data: the data set, as the user named it.
    """
    from vitkit.cli.text import print_table
    from vitkit.evaluation.labels import LabelMeasures

    m, train, held = found.evaluation.measures, found.train, found.held
    print(
        f"{int(train.readable.sum())} training images, {m.n} to evaluate on ({found.evaluation.part}); feature "
        f"{train.choice.name}: {train.computed + held.computed} computed, {train.reused + held.reused} from the "
        f"cache, {found.seconds['embed']:.2f} s"
    )
    several = isinstance(m, LabelMeasures)
    print_table(
        ["method", *(["mAP#"] if several else ["top-1#", "correct#"]), "settings", "seconds#"],
        [
            [
                r.fitted.method,
                *([f"{r.mean_ap:.4f}"] if several else [f"{r.top1:.4f}", f"{r.correct} of {m.n}"]),
                ", ".join(f"{k} {v:.4g}" for k, v in r.fitted.chosen.items() if isinstance(v, int | float)),
                f"{r.seconds:.2f}",
            ]
            for r in found.results
        ],
    )
    for result in found.results:
        for row in result.more.get("few_shot", ()):
            print(
                f"  ridge, {row['shots']} {'image' if row['shots'] == 1 else 'images'} per class: {row['mean']:.4f} "
                f"({', '.join(f'{a:.4f}' for a in row['accuracies'])})"
            )
        for row in result.more.get("neighbours", ()):
            print(f"  k-NN, k = {row['k']}: {row['top1']:.4f}")
    for note in found.run.info["notes"]:
        print(f"note: {note}")
    method = found.results[0].fitted.method
    interval = f"95% interval {m.ci95[0]:.4f} to {m.ci95[1]:.4f}"
    if isinstance(m, LabelMeasures):
        print(
            f"saved: {method}, one question per label; mAP {m.mean_ap:.4f}, {interval}; micro F1 {m.micro_f1:.4f} at "
            f"thresholds chosen on the training images by cross-validation"
        )
    else:
        saved = "nearest class mean" if method == "knn" else method
        print(f"saved: {saved}, top-1 {m.top1:.4f}, {interval}, ECE {m.ece:.4f}")
    if "accept" in found.run.info:
        print(
            f"none of these: accepts {found.run.info['accepted']:.1%} of the held-out images "
            f"(asked for {found.run.info['accept']:.1%})"
        )
    print(f"{found.seconds['work']:.2f} s, not counting imports and loading")
    print(f"wrote {found.run.path}\nnext: vitkit eval {found.run.path} {data}    vitkit predict {found.run.path} IMAGE")
