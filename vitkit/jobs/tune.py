"""Photos and weights -> the best classifier that a stated time allows, as a run folder with a page that says why."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitkit.checkpoints.atomic import staging
from vitkit.data.base import Subset, need_one_class
from vitkit.data.batch import BadImages
from vitkit.evaluation.measure import Measures
from vitkit.explanations import draw
from vitkit.features.cache import FeatureCache
from vitkit.features.embed import fill
from vitkit.jobs.evaluate import Evaluation, evaluate, write
from vitkit.jobs.probe import Parts, parts_of
from vitkit.jobs.splits import absolute
from vitkit.jobs.tuning import CANDIDATES, FOLDS, Found, Mirrored, Say, Search
from vitkit.model import checks
from vitkit.model.backbone import Backbone
from vitkit.reports import tune_page
from vitkit.runtime import Runtime
from vitkit.training.lock import locked
from vitkit.training.recipes import RECIPES
from vitkit.training.run_folder import RunFolder
from vitkit.training.settings import Settings
from vitkit.types import Plotted

PAGE = "tune.html"


@dataclass(frozen=True)
class Tuned(Plotted):
    """The result of `tune`.

    Args:
        run: its run folder.
        found: the chosen model, and everything that was tried.
        evaluation: the evaluation of the chosen model on the held-out images, which were read once.
        skipped: (name, reason) of images that could not be read.
        seconds: time of everything except imports and loading.
    """

    run: RunFolder
    found: Found
    evaluation: Evaluation
    skipped: tuple[tuple[str, str], ...]
    seconds: float

    def plot(self) -> Any:
        """Draw the gain of every candidate over the probe, with its standard error."""
        return gains(self.found)


def gains(found: Found) -> Any:
    """Draw the cross-validated gain of every candidate over the probe; None if nothing was compared with it."""
    rows = [row for row in found.tried if row.gain is not None]
    if not rows:
        return None
    values, spreads = [100 * (row.gain or 0.0) for row in rows], [100 * (row.error or 0.0) for row in rows]
    names = [f"{row.name} (chosen)" if row.chosen else row.name for row in rows]
    return draw.dots(
        ["probe (chosen)" if found.name == "probe" else "probe", *names],
        {"gain": ([0.0, *values], [None, *spreads])},
        title="Gain over the probe on held-out training images",
        x=f"points of {found.judge}; the line is one standard error each way",
    )


def tune(
    model: Backbone,
    data: str | Path,
    out: str | Path,
    cache: FeatureCache,
    *,
    minutes: float = 10.0,
    seed: int = 0,
    folds: int = FOLDS,
    candidates: Sequence[str] = CANDIDATES,
    weights: str = "",
    batch_size: int | None = None,
    workers: int | None = None,
    runtime: Runtime | None = None,
    say: Say = print,
    bad_images: BadImages = "fail",
    parts: Parts | None = None,
) -> Tuned:
    """Choose the best classifier by cross-validation on the training images, and write a run folder with it.

    Args:
        model: the backbone, on its device.
        data: a data set, as `open_splits` takes it.
        out: the run folder; it must not hold a run yet.
        cache: the feature cache.
        minutes: time limit; the probe is fitted even if it takes longer (default: 10).
        seed: seed of the folds, the trainings and the held-out images (default: 0).
        folds: folds of the cross-validation; fewer if a class has fewer images (default: FOLDS).
        candidates: recipes to try after the probe (default: CANDIDATES).
        weights: name of the backbone, for the record.
        batch_size: images per batch where nothing is trained (default: see `data.batch.images_per_batch`).
        workers: worker processes for decoding; None for one per core.
        runtime: device and precision; one process.
        say: called with a sentence at every stage.
        bad_images: `fail` or `skip`.
        parts: the result of `parts_of(data, seed)`, if it is known already.
    """
    checks.number("minutes", minutes, 0, open_low=True)
    checks.whole("folds", folds, 2)
    start, runtime = time.perf_counter(), runtime or Runtime()
    RunFolder.check_place(out)
    parts = parts or parts_of(data, seed)
    need_one_class(parts.train, "vitkit tune")
    settings = Settings(
        seed=seed,
        device=str(runtime.device),
        precision=runtime.precision,
        workers=workers,
        bad_images=bad_images,
        trackers=(),
    )
    how: dict[str, Any] = {"batch_size": batch_size, "workers": workers, "runtime": runtime, "bad_images": bad_images}
    say(f"probe: features of {len(parts.train)} training images")
    filled = fill(model, parts.train, cache, **how)
    features = filled.read()
    source = Subset(parts.train, features.index)
    mirrored = fill(model, Mirrored(source), cache, **how).read().features
    search = Search(
        model=model,
        source=source,
        features=features,
        mirrored=mirrored,
        deadline=start + 60 * minutes,
        runtime=runtime,
        settings=settings,
        candidates=candidates,
        folds=folds,
        say=say,
    )
    found = search()
    say(f"{found.name}: {len(parts.held)} images that nothing was chosen by")
    evaluation = evaluate(found.model, parts.held, weights=str(out), data=str(data), part=parts.words, **how)
    m = evaluation.measures
    assert isinstance(m, Measures)  # `need_one_class` has seen to it
    seconds = time.perf_counter() - start
    info = _info(found, evaluation, parts, data, weights, seed, minutes, len(features.labels))

    def save() -> RunFolder:
        run = RunFolder.create(out, info)
        for row in found.metrics:
            run.log(row)
        tried = [dataclasses.asdict(row) for row in found.tried]
        for values in tried:
            run.log(
                {
                    "event": "tune",
                    **{k: v for k, v in values.items() if k != "seconds"},
                    "time": {"seconds": values["seconds"]},
                }
            )
        step = max((row.get("step", 0) for row in found.metrics), default=0)
        run.log({"event": "val", "step": step, "weights": "last", "top1": m.top1, "n": m.n})
        for name, why in (*filled.skipped, *evaluation.outputs.skipped):
            run.log({"event": "skipped", "name": name, "why": why})
        run.save(found.model, "best", {"tune": found.name})
        # After the weights: results older than the weights are taken for those of other weights.
        write(run.path, evaluation)
        with staging(run.path) as private:
            text = tune_page(info, evaluation.to_dict(), tried, gains(found), seconds)
            (private / PAGE).write_text(text, encoding="utf-8", errors="surrogateescape")
        return run

    with locked(out):
        run = save()
    return Tuned(run, found, evaluation, (*filled.skipped, *evaluation.outputs.skipped), seconds)


def _info(
    found: Found,
    evaluation: Evaluation,
    parts: Parts,
    data: str | Path,
    weights: str,
    seed: int,
    minutes: float,
    images: int,
) -> dict[str, Any]:
    """Return the contents of run.json."""
    recipe, model = RECIPES.get(found.name), found.model
    head = sum(p.numel() for p in model.head.parameters())
    every = sum(p.numel() for p in model.parameters())
    return {
        "kind": "tune",
        "recipe_name": found.name if recipe is None else f"tune: {found.name}",
        "weights": weights,
        "minutes": minutes,
        "chosen": found.name,
        "judge": found.judge,
        "flip": found.flip,
        "strength": found.strength,
        "calibration": {"factor": found.factor, "nll": found.nll},
        "tried": [{k: v for k, v in vars(row).items() if k != "seconds"} for row in found.tried],
        "settings": {"seed": seed},
        "input_spec": model.input_spec.to_dict(),
        "config": model.config.to_dict(),
        "parameters": every,
        "trained": head if recipe is None else every,
        "licence": model.licence,
        "data": {
            "spec": str(data),
            "path": absolute(data),
            "train": images,
            "test": evaluation.measures.n,
            "classes": list(parts.train.class_names),
            "counts": parts.train.counts(),
            "held": parts.words,
            "held_share": parts.share,
            "seed": seed,
            "fingerprint": parts.train.fingerprint(),
        },
        "notes": [f"{row.name}: {row.verdict}" for row in found.tried],
    }
