"""`vitkit predict`: classify images."""

from __future__ import annotations

import csv
import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitkit.cli.options import BatchOf, Device, On, Precision, Weights, Workers, loads_weights
from vitkit.cli.text import one_line

if TYPE_CHECKING:
    from vitkit.evaluation.predict import Given, Prediction


@loads_weights
def predict(
    weights: Weights,
    images: Annotated[
        list[str],
        typer.Argument(
            help="Images, folders or glob patterns; - reads one image, or a list of files, from standard input.",
            metavar="IMAGE|FOLDER|GLOB|-",
        ),
    ],
    top: Annotated[
        int,
        typer.Option("--top", min=1, help="Classes to show per image; a model of several labels shows all it finds."),
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, one line per image and class.")] = False,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            help="Write one row per image to this .csv file, and print only a summary (default: none).",
        ),
    ] = None,
    batch_size: BatchOf = 64,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = "auto",
    on: On = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Classify images. Files that cannot be read are reported and skipped, and the exit code is 1."""
    from vitkit.errors import ConfigError

    if on is not None:
        from vitkit.cli import on_ray
        from vitkit.jobs.on_ray import images_of

        folder = on_ray.check(on, out, csv=as_csv)
        if precision not in ("auto", "fp32"):
            raise ConfigError(f"On a cluster, predict computes in fp32; got --precision {precision}. Leave it out.")
        about = {"weights": weights, "data": " ".join(images)}
        parts = images_of(images)
        how = {"batch_size": batch_size, "workers": workers, "device": device, "precision": "fp32"}
        on_ray.run("predict", on_ray.load(weights, overrides), parts, folder, as_json, about, **how)
        return
    if as_json and as_csv:
        raise ConfigError("Expected --json or --csv; got both. Leave one out.")
    if out is not None and (as_json or as_csv):
        raise ConfigError(f"Expected --out or --{'json' if as_json else 'csv'}; got both. Leave one out.")
    from vitkit.jobs.answers import check_out, write_answers

    if out is not None:
        check_out(out)
    from vitkit.cli import options as common
    from vitkit.data.table import cells
    from vitkit.evaluation.predict import Images, predictions, runs
    from vitkit.jobs.open_model import open_model
    from vitkit.runtime import Runtime

    source = Images(given for text in images for given in (from_stdin() if text == "-" else [text]))
    runtime = Runtime(device, precision)
    model = open_model(weights, runtime.device, **overrides)
    by = runs(model, len(source), batch_size, runtime)
    skipped: list[tuple[str, str]] = []

    def on_bad(name: str, why: str) -> None:
        skipped.append((name, why))
        print(f"vitkit: skipped {one_line(why)}", file=sys.stderr)

    if out is not None:
        few = len(source) <= batch_size
        with common.counting("predicting", len(source), show=not few) as tick:
            answers = write_answers(
                model,
                source,
                out,
                batch_size=batch_size,
                workers=0 if few and workers is None else workers,
                progress=tick,
                runtime=runtime,
            )
        none = "without a label" if model.input_spec.several else "none of these"
        print(f"wrote {out}: {len(source)} rows, {answers.none} {none}, {answers.bad} could not be read, {by.name}")
        if answers.bad:
            raise typer.Exit(1)
        return
    kept: list[dict[str, object]] = []
    lines = csv.writer(sys.stdout, lineterminator="\n")
    few = len(source) <= batch_size  # too few for worker processes or a progress bar to be worth it
    watched = sys.stdout.isatty() and not as_json  # the lines themselves show the progress
    with common.counting("predicting", len(source), show=not few and not watched) as tick:
        if as_csv:
            lines.writerow(("image", "rank", "class", "index", "probability"))
        for found in predictions(
            model,
            source,
            top=top,
            batch_size=batch_size,
            bad_images="skip",
            on_bad=on_bad,
            workers=0 if few and workers is None else workers,
            runtime=runtime,
        ):
            tick(1)
            if as_json:
                more: dict[str, object] = {}
                if found.distance is not None:
                    more = {"none_of_these": found.none_of_these, "distance": found.distance}
                if found.labels is not None:
                    more = {"labels": [vars(one) for one in found.labels]}
                kept.append({"image": found.image, "guesses": [vars(guess) for guess in found.guesses], **more})
            elif as_csv and (found.none_of_these or found.labels == ()):
                lines.writerow(cells((found.image, 1, found.name, -1, "")))
            elif as_csv:
                lines.writerows(
                    cells((found.image, rank, g.name, g.index, f"{g.probability:.6f}"))
                    for rank, g in enumerate(found.guesses if found.labels is None else found.labels, 1)
                )
            else:
                show(found)
    if as_json:
        print(
            json.dumps(
                {
                    "weights": weights,
                    "precision": by.name,
                    "predictions": kept,
                    "skipped": [{"image": name, "why": why} for name, why in skipped],
                },
                indent=1,
            )
        )
    if skipped:
        print(f"vitkit: {len(skipped)} of {len(source)} images could not be read.", file=sys.stderr)
        raise typer.Exit(1)


def from_stdin() -> list[Given]:
    """Read one encoded image, or a list of files, one per line."""
    from vitkit.errors import DataError

    data = sys.stdin.buffer.read()
    if not data.strip():
        raise DataError("Expected an image or a list of files on standard input; it was empty.")
    try:
        lines = [line.strip() for line in data.decode("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        return [data]
    files: list[Given] = [*lines]
    return files if os.path.exists(lines[0]) else [data]


def show(found: Prediction) -> None:
    """Print one prediction on one line.

    Args:
        found: the prediction.
    """
    if found.none_of_these:
        nearest = found.guesses[0]
        print(f"{found.image}: {found.name} (nearest: {nearest.name})", flush=sys.stdout.isatty())
        return
    if found.labels == ():
        nearest = found.guesses[0]
        print(f"{found.image}: {found.name} (nearest: {nearest.name} {nearest.probability:.1%})")
        return
    shown = found.guesses if found.labels is None else found.labels
    guesses = "  ".join(f"{guess.name} {guess.probability:.1%}" for guess in shown)
    print(f"{found.image}: {guesses}", flush=sys.stdout.isatty())
