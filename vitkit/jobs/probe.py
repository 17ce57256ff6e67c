"""Fit classifiers to the frozen features of a data set: one pass of the backbone, any number of heads, one run."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.linear_model  # imported here so that the import does not count as fitting time
import sklearn.model_selection  # noqa: F401

from vitkit.data.base import Source, Subset, counts_of, stratified
from vitkit.data.batch import BadImages, images_per_batch
from vitkit.data.sources import open_splits
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.labels import LabelMeasures, mean_average_precision, sigmoid
from vitkit.evaluation.logits import Outputs
from vitkit.features import unknown
from vitkit.features.cache import FeatureCache
from vitkit.features.choice import choose
from vitkit.features.embed import fill
from vitkit.features.filled import Embedded, Filled
from vitkit.features.head import attach, check_attachable
from vitkit.features.probe import Fitted, Options, check_labels, check_trainable, fit, tables
from vitkit.jobs.evaluate import Evaluation, measured, write
from vitkit.jobs.splits import absolute
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import device_of
from vitkit.runtime import Runtime
from vitkit.speed.frozen import way
from vitkit.training.lock import locked
from vitkit.training.run_folder import RunFolder
from vitkit.types import Tick

HELD = 0.1  # share of the images that is held out if the data has no test or val part


@dataclass(frozen=True)
class Parts:
    """The images to fit to and the images to evaluate on.

    Args:
        train: images to fit to.
        held: images to evaluate on.
        words: description of `held`.
        share: share of the training images that was held out; 0 if the data has a part to evaluate on.
    """

    train: Source
    held: Source
    words: str
    share: float


@dataclass(frozen=True)
class Result:
    """The result of one method.

    Args:
        fitted: the fitted method.
        top1: accuracy of the method on the held-out images.
        correct: number of held-out images that the method classifies correctly.
        head_top1: accuracy of its linear head, which is what a checkpoint holds.
        more: further tables of its protocol.
        seconds: time for fitting.
        mean_ap: mAP of the method on the held-out images, if images have several labels; then the accuracies are NaN.
    """

    fitted: Fitted
    top1: float
    correct: int
    head_top1: float
    more: dict[str, Any]
    seconds: float
    mean_ap: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        accuracy = {"top1": self.top1, "correct": self.correct, "head_top1": self.head_top1}
        return {
            "method": self.fitted.method,
            **(accuracy if self.mean_ap is None else {"mean_ap": self.mean_ap}),
            "chosen": self.fitted.chosen,
            **self.more,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Probe:
    """The result of a probe.

    Args:
        run: its run folder.
        model: the backbone with the first method's head.
        results: one for each method, in order.
        evaluation: the evaluation of the saved model on the held-out images.
        train: the training features in the cache.
        held: the held-out features in the cache.
        seconds: {"embed": ..., "fit": ..., "work": everything except imports and loading}.
    """

    run: RunFolder
    model: Backbone
    results: tuple[Result, ...]
    evaluation: Evaluation
    train: Filled
    held: Filled
    seconds: dict[str, float]


def parts_of(data: str | Path, seed: int) -> Parts:
    """Choose the images to fit to and to evaluate on: train and test (or val), or else a stratified tenth held out.

    Args:
        data: a data set, as `open_splits` takes it.
        seed: seed of the held-out images.

    Raises:
        DataError: no training images, fewer than two classes, or a class without training images.
    """
    splits = open_splits(data)
    if "train" not in splits and "all" not in splits:
        raise DataError(f"Expected {data} to have a part called train; it has {', '.join(splits)}.")
    whole = splits["train" if "train" in splits else "all"]()
    own = next((name for name in ("test", "val") if name in splits), None)
    if own is None or "train" not in splits:
        check_trainable(whole.labels, whole.class_names)
        if (least := min(whole.counts().items(), key=lambda item: item[1]))[1] < 2:
            raise DataError(
                f"Expected at least 2 images of each class, so that one can be held out; {least[0]!r} has 1, and "
                f"{data} has no test part. Add images, or a test part."
            )
        # Without any parts, the held-out images do not depend on the seed, so that `vitkit eval` finds them again.
        kept, out = stratified(whole.labels, HELD, seed if "train" in splits else 0)
        return Parts(Subset(whole, kept), Subset(whole, out), f"the {HELD:.0%} that was held out", HELD)
    held = splits[own]()
    if not len(held):
        raise DataError(f"Expected images in the {own} part of {data}; it has none.")
    _check_classes(whole, held, own)
    check_trainable(whole.labels, whole.class_names)
    return Parts(whole, held, f"the {own} part", 0.0)


def _check_classes(train: Source, held: Source, own: str) -> None:
    """Raise DataError if the classes of the held-out part are not those of the training part."""
    counts = train.counts()
    only = [name for name, count in held.counts().items() if count and not counts.get(name)]
    if only:
        raise DataError(
            f"Expected training images of every class of the {own} part; {only[0]!r} has none, but "
            f"{held.counts()[only[0]]} images in {own}. Add some, or remove the class from {own}."
        )
    if held.class_names != train.class_names:
        raise DataError(f"Expected the same classes in train and {own}, in the same order; they differ.")


def probe(
    model: Backbone,
    data: str | Path,
    out: str | Path,
    cache: FeatureCache,
    *,
    methods: Sequence[str] = ("logistic",),
    options: Options | None = None,
    features: str | None = None,
    weights: str = "",
    batch_size: int | None = None,
    workers: int | None = None,
    runtime: Runtime | None = None,
    progress: Tick | None = None,
    bad_images: BadImages = "fail",
    parts: Parts | None = None,
    accept: float | None = None,
) -> Probe:
    """Fit heads to the frozen features of a data set, and write a run folder with the first head in a checkpoint.

    Args:
        model: the backbone, on its device.
        data: a data set, as `open_splits` takes it.
        out: the run folder; it must not hold a run yet.
        cache: the feature cache.
        methods: rows of METHODS; the first one's head is saved, the others are only reported.
        options: how to fit.
        features: the feature, as `vitkit.features.choose` takes it (default: the model's own pooling).
        weights: name of the backbone, for the record.
        batch_size: images per batch in each process (default: see `data.batch.images_per_batch`).
        workers: worker processes for decoding; None for one per core.
        runtime: processes, device and precision.
        progress: called with the number of images finished since the last call.
        bad_images: `fail` or `skip`.
        parts: the result of `parts_of(data, seed)`, if it is known already.
        accept: share of images of the known classes that the model should accept; it answers "none of these" for
            images farther away (default: None, every image gets a class).
    """
    start = time.perf_counter()
    options = options or Options()
    RunFolder.check_place(out)
    choice = choose(features, model.config)
    check_attachable(choice)
    parts = parts or parts_of(data, options.seed)
    if parts.train.several:
        for method in methods:
            check_labels(method)
        if accept is not None:
            raise ConfigError(
                f'"None of these" (--accept) needs one class per image; {data} has several labels per image, and an '
                f"image may have none of them."
            )
    images = len(parts.train) + len(parts.held)
    device = runtime.device if runtime else device_of(model)
    batch_size = images_per_batch(batch_size, model.input_spec, device)
    by = way(model, runtime.precision if runtime else "fp32", images, choice.name, batch_size)  # the same for both
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
            by=by,
        )
        for source in (parts.train, parts.held)
    )
    embedded = time.perf_counter()
    A, B, names = train.read(), held.read(), parts.train.class_names
    results = tuple(_result(method, A, B, names, options) for method in methods)
    best = attach(model, results[0].fitted.head, names, train.choice, results[0].fitted.thresholds)
    accepted = None
    if accept is not None:
        best.known = unknown.fit(A.features, A.labels, best.input_spec, accept, options.seed)
        accepted = float((unknown.distances(best.known, B.features) <= best.known.limit).mean())
    # The evaluation is that of the checkpoint, whose head is float32.
    W, b = (best.state_dict()[f"head.{name}"].cpu().float().numpy() for name in ("weight", "bias"))
    logits = B.features @ W.T + b
    outputs = Outputs(logits.astype(np.float32), B.labels, B.index, B.names, held.skipped)
    fitted = time.perf_counter()
    seconds = {"embed": embedded - start, "fit": fitted - embedded, "work": fitted - start}
    found = Evaluation(
        str(out),
        str(data),
        parts.words,
        measured(outputs, names, best.input_spec.thresholds),
        outputs,
        tuple(names),
        seconds["work"],
        by.name,
    )
    info: dict[str, Any] = {
        "kind": "probe",
        "recipe_name": f"probe-{results[0].fitted.method}",
        "weights": weights,
        "methods": list(methods),
        "features": train.choice.name,
        "precision": by.name,
        "settings": {"seed": options.seed},
        "input_spec": best.input_spec.to_dict(),
        "config": best.config.to_dict(),
        "parameters": sum(p.numel() for p in best.parameters()),
        "trained": int(W.size + b.size),
        "data": {
            "spec": str(data),
            "path": absolute(data),
            "train": len(A.labels),
            "test": len(B.labels),
            "classes": list(names),
            "counts": counts_of(A.labels, names),  # of the images that could be read
            "held": parts.words,
            "held_share": parts.share,
            "seed": options.seed,
            "fingerprint": parts.train.fingerprint(),
            **({"several": True} if parts.train.several else {}),
        },
        **({} if accept is None else {"accept": accept, "accepted": accepted}),
        "cache": {"computed": train.computed + held.computed, "reused": train.reused + held.reused},
        "notes": [note for result in results for note in result.fitted.notes],
    }
    if results[0].fitted.method == "knn":
        info["notes"].append(
            f"k-NN has no weights that a checkpoint could hold, so the nearest-class-mean classifier is saved instead: "
            f"top-1 {results[0].head_top1:.4f}, k-NN {results[0].top1:.4f}."
        )

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
        m = found.measures
        score = {"mean_ap": m.mean_ap} if isinstance(m, LabelMeasures) else {"top1": m.top1}
        run.log({"event": "val", "step": 0, "weights": "last", **score, "n": m.n})
        for name, why in (*train.skipped, *held.skipped):
            run.log({"event": "skipped", "name": name, "why": why})
        run.save(best, "best", {"probe": results[0].fitted.method, "features": train.choice.name})
        # After the weights: results older than the weights are taken for those of other weights.
        write(run.path, found, {"methods": [result.to_dict() for result in results]})
        return run

    def alone() -> RunFolder:
        with locked(out):
            return save()

    run = runtime.on_main(alone) if runtime else alone()
    seconds["work"] = time.perf_counter() - start
    return Probe(run, best, results, found, train, held, seconds)


def _result(method: str, A: Embedded, B: Embedded, names: Sequence[str], options: Options) -> Result:
    start = time.perf_counter()
    found = fit(method, A.features, A.labels, names, options)
    seconds = time.perf_counter() - start
    if A.labels.ndim == 2:
        score = mean_average_precision(sigmoid(found.scores(B.features)), B.labels)
        return Result(found, math.nan, 0, math.nan, {}, seconds, score)
    right = found.scores(B.features).argmax(1) == B.labels
    head = found.head.logits(B.features).argmax(1) == B.labels
    more = tables(method, A.features, A.labels, B.features, B.labels, len(names))
    return Result(found, float(right.mean()), int(right.sum()), float(head.mean()), more, seconds)
