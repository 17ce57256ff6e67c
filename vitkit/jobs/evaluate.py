"""Weights and data -> every number of evaluation, on the screen and in files."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitkit.checkpoints.atomic import staging
from vitkit.data.base import Source, Subset, stratified
from vitkit.data.loader import BadImages
from vitkit.data.sources import open_splits, parse
from vitkit.errors import DataError, UnreadableFile
from vitkit.evaluation.logits import Outputs, logits_of
from vitkit.evaluation.match import in_order, match_classes
from vitkit.evaluation.measure import Measures, answers, measure
from vitkit.evaluation.names import class_names, outputs_of
from vitkit.model.classifier import Classifier
from vitkit.model.vit import ViT
from vitkit.runtime import Runtime
from vitkit.speed.accuracy import Accuracy, compare
from vitkit.speed.engines import ENGINES, chosen
from vitkit.training.run_folder import RunFolder
from vitkit.types import Tick


@dataclass(frozen=True)
class Evaluation:
    """What came of one evaluation.

    Args:
        weights: what was evaluated.
        data: on what.
        part: which part of the data, in words.
        measures: the numbers.
        outputs: logits of every image; labels count the model's outputs.
        class_names: of the model's outputs.
        seconds: of reading, preprocessing and predicting.
    """

    weights: str
    data: str
    part: str
    measures: Measures
    outputs: Outputs
    class_names: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Everything but the logits, as JSON can hold it."""
        return {
            "weights": self.weights,
            "data": self.data,
            "part": self.part,
            **self.measures.to_dict(),
            "skipped": [{"image": name, "why": why} for name, why in self.outputs.skipped],
            "seconds": round(self.seconds, 3),
        }


def run_of(weights: str | Path) -> RunFolder | None:
    """The run folder that weights belong to (`RUN`, `RUN@ema`, `RUN/best.safetensors`), or None."""
    path = Path(str(weights).partition("@")[0]).expanduser()
    try:
        return RunFolder.open(path if path.is_dir() else path.parent)
    except UnreadableFile:
        return None


def part_of(data: str | Path, split: str | None, run: RunFolder | None) -> tuple[Source, str]:
    """The part of a data set that an evaluation is about, and what it is in words.

    Test, else val. Data without parts is evaluated whole, unless it is what the run was fitted to: then on what the
    run held out.

    Args:
        data: what `open_splits` takes.
        split: the user's choice.
        run: the run that the weights belong to.
    """
    splits = open_splits(data)
    held = _held_out(run) if run and _same_data(run, data) else None
    own = next((name for name in ("test", "val") if name in splits), None)
    if split is None and own is None and held is not None:
        share, seed = held
        whole = splits["train" if "train" in splits else "all"]()
        if share == 0:
            raise DataError(
                f"The run was fitted to all of {data} and held nothing out; give other data, or --split "
                f"{next(iter(splits))} to measure what it has learnt by heart."
            )
        return Subset(
            whole, stratified(whole.labels, share, seed if "train" in splits else 0)[1]
        ), f"the {share:.0%} that the run held out"
    name = split or own or ("all" if "all" in splits else None)
    if name is None or name not in splits:
        raise DataError(
            f"{data} has no part {name or 'test or val'!r}; it has: {', '.join(splits)}. Choose one with --split."
        )
    source = splits[name]()
    if not len(source):
        raise DataError(f"{data} holds no images in {name!r}.")
    return source, "all images" if name == "all" else f"the {name} part"


def _same_data(run: RunFolder, data: str | Path) -> bool:
    spec = run.info.get("data", {}).get("spec")
    try:
        (kind, place), (other, there) = parse(data), parse(spec)
    except (DataError, TypeError):
        return False
    return kind == other and (place == there or (place != "" and Path(place).resolve() == Path(there).resolve()))


def _held_out(run: RunFolder) -> tuple[float, int]:
    """(share, seed) of what a run held out of data that had no part for it."""
    if run.info.get("kind") == "train":
        return float(run.info["recipe"]["val"]), int(run.info["settings"]["seed"])
    return float(run.info["data"]["held_share"]), int(run.info["data"]["seed"])


def evaluate(
    predictor: Classifier,
    source: Source,
    *,
    weights: str = "",
    data: str = "",
    part: str = "",
    same_order: bool = False,
    batch_size: int = 64,
    workers: int | None = None,
    runtime: Runtime | None = None,
    progress: Tick | None = None,
    bad_images: BadImages = "fail",
    worst: int = 20,
) -> Evaluation:
    """Evaluate a predictor on a source; all processes call this.

    Args:
        predictor: on its device.
        source: the images.
        weights: what the predictor is called, for the result.
        data: what the data is called.
        part: which part of it, in words.
        same_order: whether the data's classes stand in the order of the model's outputs, whatever they are called.
        batch_size: images at once in each process.
        workers: processes that decode; None for one a core.
        runtime: processes, device, precision.
        progress: called with the number of images done since the last call.
        bad_images: `fail` or `skip`.
        worst: wrong answers that are kept.
    """
    K = outputs_of(predictor)
    names = class_names(predictor.input_spec, K)
    if same_order:
        to_output = in_order(source.class_names, K)
        names = predictor.input_spec.class_names or source.class_names
    else:
        to_output = match_classes(source.class_names, predictor.input_spec, K)
    start = time.perf_counter()
    found = logits_of(
        predictor,
        source,
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
        progress=progress,
        bad_images=bad_images,
    )
    seconds = time.perf_counter() - start
    found = Outputs(found.logits, to_output[found.labels], found.index, found.names, found.skipped)
    return Evaluation(weights, data, part, measure(found, names, worst=worst), found, names, seconds)


class ByEngine:
    """A model whose logits come from one of `speed.ENGINES`.

    Args:
        model: on its device.
        name: a row of ENGINES; `self.name` is the one that runs.
    """

    def __init__(self, model: ViT, name: str) -> None:
        self.model, self.name = model.eval(), chosen(name, model)
        self.config, self.input_spec = model.config, model.input_spec
        self.forward, self.tolerance = ENGINES[self.name].build(model), ENGINES[self.name].tolerance

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [B, K]."""
        return self.forward(x)

    def against_plain(self, found: Evaluation, source: Source, **how: Any) -> Accuracy:
        """How far an evaluation by this engine is from one by the plain model, which reads the images once more.

        Args:
            found: the evaluation.
            source: the images that it was of.
            how: what `logits_of` takes beside them.
        """
        plain = logits_of(self.model, source, **how)
        return compare(plain.logits, found.outputs.logits, found.outputs.labels, self.tolerance)


def write(folder: str | Path, found: Evaluation, more: dict[str, Any] | None = None) -> list[Path]:
    """Write evaluation.json, predictions.csv, per_class.csv and confusion.csv; whole or not at all.

    Args:
        folder: made when it is not there.
        found: the evaluation.
        more: further keys of evaluation.json.
    """
    folder, m, names = Path(folder).expanduser(), found.measures, found.class_names
    predicted, rank, confidence, truth = answers(found.outputs.logits, found.outputs.labels)
    tables: dict[str, tuple[Sequence[str], Any]] = {
        "predictions.csv": (
            ("image", "truth", "predicted", "confidence", "truth_probability", "truth_rank"),
            (
                (image, names[y], names[p], f"{c:.6f}", f"{np.exp(t):.6f}", r + 1)
                for image, y, p, c, t, r in zip(
                    found.outputs.names, found.outputs.labels, predicted, confidence, truth, rank
                )
            ),
        ),
        "per_class.csv": (
            ("class", "precision", "recall", "f1", "support"),
            ((s.name, f"{s.precision:.6f}", f"{s.recall:.6f}", f"{s.f1:.6f}", s.support) for s in m.per_class),
        ),
    }
    if m.confusion is not None:
        tables["confusion.csv"] = (("truth", *names), ((name, *row) for name, row in zip(names, m.confusion)))
    with staging(folder) as beside:
        text = json.dumps(found.to_dict() | (more or {}), indent=1)
        (beside / "evaluation.json").write_text(text + "\n", encoding="utf-8")
        for name, (header, rows) in tables.items():
            with open(beside / name, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                csv.writer(file).writerow(header)
                csv.writer(file).writerows(rows)
    return [folder / name for name in ("evaluation.json", *tables)]
