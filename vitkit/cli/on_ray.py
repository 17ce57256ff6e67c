"""`--on ray` of embed, predict and eval: check the options, run the job on the cluster, print what it did."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from vitkit.cli.text import one_line

if TYPE_CHECKING:
    from vitkit.data.base import Source
    from vitkit.jobs.evaluate import Evaluation
    from vitkit.model.backbone import Backbone

SHOWN = 20  # unreadable images to list; the shards hold all of them


def check(on: str, out: str | None, **unused: Any) -> str:
    """Return `--out`, or raise ConfigError if an option does not fit `--on`.

    Args:
        on: the value of --on.
        out: the value of --out.
        unused: {option that has no meaning on a cluster: whether it was given}.
    """
    from vitkit.errors import ConfigError

    if on != "ray":
        raise ConfigError(f"Expected --on ray; got --on {on}. Leave it out to run on this machine.")
    if out is None:
        raise ConfigError("--on ray needs --out FOLDER: a folder that all machines share, or an s3:// address.")
    for option, given in unused.items():
        if given:
            raise ConfigError(f"--{option.replace('_', '-')} has no meaning with --on ray; leave it out.")
    return out


def load(weights: str, overrides: Mapping[str, Any]) -> Backbone:
    """Load a model onto the CPU of this machine; the cluster gets it from here."""
    from vitkit.cli import options as common
    from vitkit.runtime import Runtime

    return common.load(weights, Runtime("cpu"), overrides)


def run(
    task: str,
    model: Backbone,
    sources: Mapping[str, Source],
    out: str,
    as_json: bool,
    about: dict[str, Any],
    **how: Any,
) -> None:
    """Run `embed` or `predict`, and print where the results are; exit with code 1 if images could not be read.

    Args:
        task: `embed` or `predict`.
        model: the model.
        sources: {part: its images}.
        out: the folder of results.
        as_json: whether to print one JSON object.
        about: what `job.json` and the JSON object say besides.
        how: further arguments of `jobs.on_ray.run`.
    """
    from vitkit.cli import options as common
    from vitkit.jobs import on_ray

    words = {"embed": "embedding", "predict": "predicting"}
    with common.counting(words[task], sum(map(len, sources.values()))) as tick:
        job = on_ray.run(task, model, sources, out, about=about, progress=tick, **how)
    rate = f", {job.computed / job.seconds:.1f} images/s" if job.computed else ""
    if as_json:
        skipped = [{"image": name, "why": why} for name, why in job.skipped]
        print(
            json.dumps(
                about
                | {
                    "out": out,
                    "images": job.images,
                    "computed": job.computed,
                    "shards": len(job.shards),
                    "precision": job.precision,
                    "seconds": round(job.seconds, 3),
                    "skipped": skipped,
                },
                indent=1,
            )
        )
    else:
        print(
            f"{job.images:,} images, {job.computed:,} computed now, {job.seconds:.2f} s{rate}, {job.precision}\n"
            f"wrote {len(job.shards)} shards to {out}, listed in manifest.jsonl"
        )
    tell(job.skipped, job.images)


def evaluate(model: Backbone, source: Source, out: str, about: dict[str, Any], how: dict[str, Any]) -> Evaluation:
    """Evaluate a model on the cluster, and write evaluation.json and the CSV files next to the shards.

    Args:
        model: the model.
        source: the images.
        out: the folder of results; at an s3:// address only shards are written.
        about: arguments of `jobs.evaluate.evaluate`: what is evaluated.
        how: further arguments of `jobs.on_ray.run`: how it is computed.
    """
    from vitkit.cli import options as common
    from vitkit.data.remote import is_remote
    from vitkit.jobs import evaluate as job
    from vitkit.jobs import on_ray

    with common.counting("evaluating", len(source)) as tick:
        said = {name: about[name] for name in ("weights", "data", "part")}
        elsewhere = partial(on_ray.logits, model, source, out, about=said, progress=tick, **how)
        found = job.evaluate(model, source, **about, elsewhere=elsewhere)
    if not is_remote(out):
        job.write(out, found)
    return found


def tell(skipped: Sequence[tuple[str, str]], images: int) -> None:
    """Name the images that could not be read, and exit with code 1 if there are any.

    Args:
        skipped: (name, reason) of each.
        images: number of all images.
    """
    for _, why in skipped[:SHOWN]:
        print(f"vitkit: skipped {one_line(why)}", file=sys.stderr)
    if skipped:
        print(f"vitkit: {len(skipped)} of {images} images could not be read.", file=sys.stderr)
        raise typer.Exit(1)
