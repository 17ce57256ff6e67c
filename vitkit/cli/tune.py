"""`vitkit tune`: the best classifier that a stated time allows."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitkit.cli.options import BadImages, BatchSize, Cache, Device, From, Precision, Workers, loads_weights
from vitkit.cli.text import one_line

if TYPE_CHECKING:
    from vitkit.jobs.tune import Tuned


@loads_weights
def tune(
    data: Annotated[str, typer.Argument(help="Data: a folder, a .csv, .parquet or .tar file, or kind:place.")],
    weights: From,
    out: Annotated[Path, typer.Option("--out", help="Run folder to create.")],
    minutes: Annotated[
        float, typer.Option("--minutes", help="Time limit. The probe is fitted even if it takes longer.")
    ] = 10.0,
    folds: Annotated[int, typer.Option("--folds", help="Folds of the cross-validation.")] = 3,
    cache: Cache = None,
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
    """Choose the best classifier for a folder of photos within a time limit: a probe, fine-tuning or adapters."""
    from vitkit.cli import options as common
    from vitkit.jobs import embed
    from vitkit.jobs import tune as job
    from vitkit.jobs.probe import parts_of
    from vitkit.runtime import Runtime
    from vitkit.training.run_folder import RunFolder

    RunFolder.check_place(out)
    parts = parts_of(data, seed)
    runtime = Runtime(device, precision)
    model = common.load(weights, runtime, overrides)
    kept = embed.open_cache(cache, lambda sentence: print(f"vitkit: {sentence}", file=sys.stderr))
    found = job.tune(
        model,
        data,
        out,
        kept,
        minutes=minutes,
        seed=seed,
        folds=folds,
        weights=weights,
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
        say=partial(print, file=sys.stderr, flush=True),
        bad_images=bad_images,  # type: ignore[arg-type]
        parts=parts,
    )
    if as_json:
        keys = ("chosen", "judge", "flip", "strength", "calibration", "tried")
        more = {"run": str(found.run.path), "work_seconds": found.seconds} | {k: found.run.info[k] for k in keys}
        print(json.dumps(found.evaluation.to_dict() | more, indent=1))
    else:
        show(found, data)
    if report:
        from vitkit.jobs.report import try_report

        print(try_report(found.run.path), file=sys.stderr if as_json else sys.stdout)
    for _, why in found.skipped:
        print(f"vitkit: skipped {one_line(why)}", file=sys.stderr)
    if found.skipped:
        raise typer.Exit(1)


def show(tuned: Tuned, data: str) -> None:
    """Print the result.

    Args:
        tuned: the result.
        data: the data set, as the user named it.
    """
    from vitkit.cli.text import print_table
    from vitkit.evaluation.measure import Measures
    from vitkit.jobs.tune import PAGE

    found, m, run = tuned.found, tuned.evaluation.measures, tuned.run
    assert isinstance(m, Measures)  # images have one class each
    print_table(
        ["candidate", f"{found.judge}#", "images#", "seconds#", "verdict"],
        [
            (
                row.name,
                "" if row.accuracy is None else f"{row.accuracy:.4f}",
                str(row.images or ""),
                f"{row.seconds:.0f}",
                row.verdict,
            )
            for row in found.tried
        ],
    )
    print(
        f"{found.name}: {tuned.evaluation.part}, read once: top-1 {m.top1:.4f} of {m.n} images, 95% interval "
        f"{m.ci95[0]:.4f} to {m.ci95[1]:.4f}, ECE {m.ece:.4f}"
    )
    print(
        f"{tuned.seconds:.0f} s, not counting imports and loading\nwrote {run.path}; {run.path / PAGE} says why\n"
        f"next: vitkit predict {run.path} IMAGE    vitkit serve {run.path}"
    )
