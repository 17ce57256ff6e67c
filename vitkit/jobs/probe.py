"""Weights and data -> a classifier over frozen features: one pass of the backbone, any number of heads, one run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.linear_model  # now, so that its import is not taken for work
import sklearn.model_selection  # noqa: F401

from vitkit.data.base import Source, Subset, stratified
from vitkit.data.loader import BadImages
from vitkit.data.sources import open_splits
from vitkit.errors import DataError
from vitkit.evaluation.logits import Outputs
from vitkit.evaluation.measure import measure
from vitkit.features.cache import FeatureCache
from vitkit.features.choice import choose
from vitkit.features.embed import Embedded, Filled, fill
from vitkit.features.head import attach, checked
from vitkit.features.probe import Fitted, Options, fit, tables, trainable
from vitkit.jobs.evaluate import Evaluation, write
from vitkit.model.vit import ViT
from vitkit.runtime import Runtime
from vitkit.training.run_folder import RunFolder
from vitkit.types import Tick

HELD = 0.1  # share that is held out of data that has no part for it


@dataclass(frozen=True)
class Parts:
    """The images that heads are fitted to, and those that they are judged on.

    Args:
        train: fitted to.
        held: judged on, once.
        words: what `held` is.
        share: of train that was held out; 0 where the data has a part for it.
    """

    train: Source
    held: Source
    words: str
    share: float


@dataclass(frozen=True)
class Result:
    """One method's result.

    Args:
        fitted: what was fitted.
        top1: accuracy of the method on the held-out images.
        correct: images of them that it named right.
        head_top1: accuracy of its linear head, which is what a checkpoint holds.
        more: the tables of its protocol.
        seconds: of fitting.
    """

    fitted: Fitted
    top1: float
    correct: int
    head_top1: float
    more: dict[str, Any]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "method": self.fitted.method,
            "top1": self.top1,
            "correct": self.correct,
            "head_top1": self.head_top1,
            "chosen": self.fitted.chosen,
            **self.more,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Probe:
    """What a probe left behind.

    Args:
        run: its folder.
        model: the backbone with the first method's head.
        results: one for each method, in their order.
        evaluation: all numbers of the saved model on the held-out images.
        train: the training features in the cache.
        held: the held-out features.
        seconds: {"embed": ..., "fit": ..., "work": all of it after imports and loading}.
    """

    run: RunFolder
    model: ViT
    results: tuple[Result, ...]
    evaluation: Evaluation
    train: Filled
    held: Filled
    seconds: dict[str, float]


def parts_of(data: str | Path, seed: int) -> Parts:
    """What to fit to and what to judge on: train and test (else val), or a stratified tenth that is held out.

    Args:
        data: what `open_splits` takes.
        seed: of the held-out part.

    Raises:
        DataError: nothing to fit to, one class only, a class without training images, or one that only test has.
    """
    splits = open_splits(data)
    if "train" not in splits and "all" not in splits:
        raise DataError(f"{data} has no training part; it has: {', '.join(splits)}.")
    whole = splits["train" if "train" in splits else "all"]()
    own = next((name for name in ("test", "val") if name in splits), None)
    if own is None or "train" not in splits:
        trainable(whole.labels, whole.class_names)
        if (least := min(whole.counts().items(), key=lambda item: item[1]))[1] < 2:
            raise DataError(
                f"{data} has no test part, and the class {least[0]!r} has one image: nothing of it can be "
                f"held out. Add images, or a test part."
            )
        # Data without any parts has the same images held out whatever the seed: `vitkit eval` finds them again.
        kept, out = stratified(whole.labels, HELD, seed if "train" in splits else 0)
        return Parts(Subset(whole, kept), Subset(whole, out), f"the {HELD:.0%} that was held out", HELD)
    held = splits[own]()
    if not len(held):
        raise DataError(f"{data} holds no images in {own!r}.")
    held = _aligned(whole, held, own)
    trainable(whole.labels, whole.class_names)
    return Parts(whole, held, f"the {own} part", 0.0)


def _aligned(train: Source, held: Source, own: str) -> Source:
    """The held-out part, if its classes are those of train; else a sentence."""
    counts = train.counts()
    only = [name for name, count in held.counts().items() if count and not counts.get(name)]
    if only:
        raise DataError(
            f"The class {only[0]!r} is in the {own} part ({held.counts()[only[0]]} images) but has no "
            f"training images; add some, or remove it from {own}."
        )
    if held.class_names != train.class_names:
        raise DataError(f"The classes of train and {own} stand in another order; name them alike in both.")
    return held


def probe(
    model: ViT,
    data: str | Path,
    out: str | Path,
    cache: FeatureCache,
    *,
    methods: Sequence[str] = ("logistic",),
    options: Options | None = None,
    features: str | None = None,
    weights: str = "",
    batch_size: int = 64,
    workers: int | None = None,
    runtime: Runtime | None = None,
    progress: Tick | None = None,
    bad_images: BadImages = "fail",
    parts: Parts | None = None,
) -> Probe:
    """Fit heads to the frozen features of a data set, and leave a run folder with the first one in a checkpoint.

    Args:
        model: the backbone, on its device.
        data: what `open_splits` takes.
        out: the run's folder; nothing may be there.
        cache: where features are kept.
        methods: rows of METHODS; the first one's head is saved, the others are reported beside it.
        options: how to fit.
        features: which vector, see `vitkit.features.choose`.
        weights: what the backbone is called, for the record.
        batch_size: images at once in each process.
        workers: processes that decode; None for one a core.
        runtime: processes, device, precision.
        progress: called with the number of images done since the last call.
        bad_images: `fail` or `skip`.
        parts: what `parts_of(data, seed)` returned, where it was asked already.
    """
    start = time.perf_counter()
    options = options or Options()
    RunFolder.check_place(out)
    checked(choose(features, model.config), model)
    parts = parts or parts_of(data, options.seed)
    train, held = (
        fill(
            model,
            source,
            cache,
            features=features,
            batch_size=batch_size,
            workers=workers,
            runtime=runtime,
            progress=progress,
            bad_images=bad_images,
        )
        for source in (parts.train, parts.held)
    )
    embedded = time.perf_counter()
    A, B, names = train.read(), held.read(), parts.train.class_names
    results = tuple(_result(method, A, B, names, options) for method in methods)
    best = attach(model, results[0].fitted.head, names, train.choice)
    # The checkpoint's own numbers: its head in float32, over the features it will compute again.
    W, b = (best.state_dict()[f"head.{name}"].cpu().float().numpy() for name in ("weight", "bias"))
    logits = B.features @ W.T + b
    outputs = Outputs(logits.astype(np.float32), B.labels, B.index, B.names, held.skipped)
    fitted = time.perf_counter()
    seconds = {"embed": embedded - start, "fit": fitted - embedded, "work": fitted - start}
    found = Evaluation(weights, str(data), parts.words, measure(outputs, names), outputs, tuple(names), seconds["work"])
    info = {
        "kind": "probe",
        "recipe_name": f"probe-{results[0].fitted.method}",
        "weights": weights,
        "methods": list(methods),
        "features": train.choice.name,
        "settings": {"seed": options.seed},
        "input_spec": best.input_spec.to_dict(),
        "config": best.config.to_dict(),
        "parameters": sum(p.numel() for p in best.parameters()),
        "trained": int(W.size + b.size),
        "data": {
            "spec": str(data),
            "train": len(A.labels),
            "test": len(B.labels),
            "classes": list(names),
            "counts": parts.train.counts(),
            "held": parts.words,
            "held_share": parts.share,
            "seed": options.seed,
            "fingerprint": parts.train.fingerprint(),
        },
        "cache": {"computed": train.computed + held.computed, "reused": train.reused + held.reused},
        "notes": [note for result in results for note in result.fitted.notes],
    }

    def save() -> RunFolder:
        run = RunFolder.create(out, info)
        for result in results:
            run.log(
                {
                    "event": "probe",
                    **{k: v for k, v in result.to_dict().items() if k != "seconds"},
                    "time": {"seconds": result.seconds},
                }
            )
        run.log({"event": "val", "step": 0, "weights": "last", "top1": found.measures.top1, "n": found.measures.n})
        for name, why in (*train.skipped, *held.skipped):
            run.log({"event": "skipped", "name": name, "why": why})
        write(run.path, found, {"methods": [result.to_dict() for result in results]})
        run.save(best, "best", {"probe": results[0].fitted.method, "features": train.choice.name})
        return run

    run = runtime.on_main(save) if runtime else save()
    seconds["work"] = time.perf_counter() - start
    return Probe(run, best, results, found, train, held, seconds)


def _result(method: str, A: Embedded, B: Embedded, names: Sequence[str], options: Options) -> Result:
    start = time.perf_counter()
    found = fit(method, A.features, A.labels, names, options)
    seconds = time.perf_counter() - start
    right = found.scores(B.features).argmax(1) == B.labels
    head = found.head.logits(B.features).argmax(1) == B.labels
    more = tables(method, A.features, A.labels, B.features, B.labels, len(names))
    return Result(found, float(right.mean()), int(right.sum()), float(head.mean()), more, seconds)
