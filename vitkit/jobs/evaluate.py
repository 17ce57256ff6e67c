"""Evaluate a model on a data set, and write the results to files."""

from __future__ import annotations

import csv
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitkit.checkpoints.atomic import staging
from vitkit.data.base import Source, Subset, stratified
from vitkit.data.batch import BadImages, images_per_batch
from vitkit.data.gpu import Decode
from vitkit.data.sources import open_splits, parse
from vitkit.data.table import cells
from vitkit.errors import DataError, UnreadableFile
from vitkit.evaluation.labels import LabelMeasures, joined, measure_labels, sigmoid
from vitkit.evaluation.logits import Outputs, logits_of
from vitkit.evaluation.match import in_order, match_classes
from vitkit.evaluation.measure import Measures, answers, measure
from vitkit.evaluation.names import answer_names
from vitkit.explanations import draw
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import Classifier, Running, device_of
from vitkit.runtime import Runtime
from vitkit.speed.accuracy import Accuracy, compare
from vitkit.speed.engines import ENGINES, chosen
from vitkit.speed.frozen import Way, way
from vitkit.training.run_folder import RunFolder
from vitkit.types import Array, Plotted, Tick


@dataclass(frozen=True, repr=False)
class Evaluation(Plotted):
    """The result of one evaluation; printed, it is a line.

    Args:
        weights: the weights, as the user named them.
        data: the data set, as the user named it.
        part: description of the part of the data that was evaluated.
        measures: all measures; LabelMeasures if an image can have several labels.
        outputs: the logits of every image; a label is the index of an output, or a row of zeros and ones.
        class_names: names of the model's outputs.
        seconds: time for reading, preprocessing and predicting.
        precision: how the logits were computed: a precision, and the engine if it was not the plain model.
        decode: where images were decoded.
    """

    weights: str
    data: str
    part: str
    measures: Measures | LabelMeasures
    outputs: Outputs
    class_names: tuple[str, ...]
    seconds: float
    precision: str = "fp32"
    decode: Decode = "cpu"

    def __str__(self) -> str:
        m = self.measures
        if isinstance(m, LabelMeasures):
            found = f"mAP {m.mean_ap:.1%} of {m.n:,} images"
        else:
            found = f"{round(m.top1 * m.n):,} of {m.n:,} images right ({m.top1:.1%})"
        low, high = m.ci95
        return f"{found}, 95% interval {low:.1%} to {high:.1%}: {self.data}, {self.part}"

    def __repr__(self) -> str:
        return f"<Evaluation: {self}>"

    def plot(self) -> Any:
        """Draw the confusion matrix; of very many classes, none is counted and the recall per class is drawn.

        With several labels per image, draw the average precision per label.
        """
        if isinstance(self.measures, LabelMeasures):
            lowest = sorted((row.ap, row.name) for row in self.measures.per_class if row.ap is not None)[:20]
            title = f"mAP {self.measures.mean_ap:.1%} of {self.measures.n} images"
            return draw.bars([name for _, name in lowest], [ap for ap, _ in lowest], title=title, x="average precision")
        title = f"{self.measures.top1:.1%} of {self.measures.n} images"
        if self.measures.confusion is None:
            worst = sorted(self.measures.per_class, key=lambda row: row.recall)[:20]
            return draw.bars([row.name for row in worst], [row.recall for row in worst], title=title, x="recall")
        counts = np.asarray(self.measures.confusion)
        return draw.matrix(counts, self.class_names, title=title, x="predicted", y="true class")

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the logits as JSON values."""
        return {
            "weights": self.weights,
            "data": self.data,
            "part": self.part,
            "precision": self.precision,
            "decode": self.decode,
            **self.measures.to_dict(),
            "skipped": [{"image": name, "why": why} for name, why in self.outputs.skipped],
            "seconds": round(self.seconds, 3),
        }


def run_of(weights: str | Path) -> RunFolder | None:
    """Return the run folder that weights belong to (`RUN`, `RUN@ema`, `RUN/best.safetensors`), or None."""
    path = Path(str(weights).partition("@")[0]).expanduser()
    try:
        return RunFolder.open(path if path.is_dir() else path.parent)
    except UnreadableFile:
        return None


def part_of(data: str | Path, split: str | None, run: RunFolder | None, *, fitted: bool = False) -> tuple[Source, str]:
    """Choose the part of a data set to evaluate, and describe it.

    That is the test part, or the val part if there is no test part. Data without parts is evaluated as a whole; but if
    the run was fitted to this data, only the images that it held out are.

    Args:
        data: a data set, as `open_splits` takes it.
        split: the user's choice, or None.
        run: the run that the weights belong to, if any.
        fitted: whether images that the run was fitted to will do if it held none out (default: False, an error).
    """
    splits = open_splits(data)
    held = _held_out(run) if run and _same_data(run, data) else None
    own = next((name for name in ("test", "val") if name in splits), None)
    if split is None and own is None and held is not None:
        share, seed = held
        whole = splits["train" if "train" in splits else "all"]()
        if share == 0 and fitted:
            return whole, "all images, which the run was fitted to"
        if share == 0:
            raise DataError(
                f"Expected data that the run was not fitted to; it was fitted to all of {data}. Use other data, or "
                f"pass --split {next(iter(splits))} to measure accuracy on the training images."
            )
        held_out = stratified(whole.labels, share, seed if "train" in splits else 0)[1]
        return Subset(whole, held_out), f"the {share:.0%} that the run held out"
    name = split or own or ("all" if "all" in splits else None)
    if name is None or name not in splits:
        raise DataError(
            f"Expected {data} to have a part called {name or 'test or val'}; it has {', '.join(splits)}. Choose one "
            f"with --split."
        )
    source = splits[name]()
    if not len(source):
        raise DataError(f"Expected images in the {name} part of {data}; it has none.")
    return source, "all images" if name == "all" else f"the {name} part"


def _same_data(run: RunFolder, data: str | Path) -> bool:
    try:
        (kind, place), (other, there) = parse(data), parse(run.data)
    except DataError:
        return False
    return kind == other and (place == there or (place != "" and Path(place).resolve() == Path(there).resolve()))


def _held_out(run: RunFolder) -> tuple[float, int]:
    """Return (share, seed) of the images that a run held out of data without a test or val part."""
    with run.reading():
        if run.info.get("kind") == "train":
            return float(run.info["recipe"]["val"]), int(run.info["settings"]["seed"])
        return float(run.info["data"]["held_share"]), int(run.info["data"]["seed"])


def evaluate(
    model: Classifier,
    source: Source,
    *,
    weights: str = "",
    data: str = "",
    part: str = "",
    same_order: bool = False,
    batch_size: int | None = None,
    workers: int | None = None,
    runtime: Runtime | None = None,
    progress: Tick | None = None,
    bad_images: BadImages = "fail",
    worst: int = 20,
    decode: Decode = "cpu",
    elsewhere: Callable[[], tuple[Outputs, str]] | None = None,
) -> Evaluation:
    """Evaluate a model on a source; with several processes, each of them must call this.

    Args:
        model: a ViT or any other classifier, on its device.
        source: the images.
        weights: name of the weights, for the result.
        data: name of the data, for the result.
        part: description of the part of the data, for the result.
        same_order: whether the data's classes are in the order of the model's outputs, whatever their names.
        batch_size: images per batch in each process (default: see `data.batch.images_per_batch`).
        workers: worker processes for decoding; None for one per core.
        runtime: processes, device and precision.
        progress: called with the number of images finished since the last call.
        bad_images: `fail` or `skip`.
        worst: number of wrong predictions to keep.
        decode: where images are decoded, `cpu` or `gpu`.
        elsewhere: computes the logits on other machines, and names the precision (default: computed here).
    """
    names, to_output = _matched(model, source, data, same_order)
    device = runtime.device if runtime else device_of(model)
    batch_size = images_per_batch(batch_size, model.input_spec, device)
    start = time.perf_counter()
    if elsewhere is not None:
        found, precision = elsewhere()
    else:
        by = way(model, runtime.precision, len(source), batch_size=batch_size) if runtime else Way("fp32")
        precision = f"engine {model.name}" if isinstance(model, ByEngine) else by.name
        found = logits_of(
            Running(by.build, model.input_spec) if by.build else model,
            source,
            batch_size=batch_size,
            workers=workers,
            runtime=runtime,
            progress=progress,
            bad_images=bad_images,
            decode=decode,
        )
    seconds = time.perf_counter() - start
    thresholds = model.input_spec.thresholds
    if thresholds:
        labels = np.zeros((len(found), len(names)), np.int64)
        labels[:, to_output] = found.labels
    else:
        labels = to_output[found.labels]
    found = dataclasses.replace(found, labels=labels)
    measures = measured(found, names, thresholds, worst)
    return Evaluation(weights, data, part, measures, found, names, seconds, precision, decode)


def _matched(model: Classifier, source: Source, data: str, same_order: bool) -> tuple[tuple[str, ...], Array]:
    """Return the names of the model's outputs, and the output of each class of the data.

    Args:
        model: the model.
        source: the images.
        data: name of the data, for the message.
        same_order: whether the data's classes are in the order of the model's outputs, whatever their names.

    Raises:
        DataError: the classes do not match.
    """
    names = answer_names(model)
    _check_kinds(model, source, data)
    if same_order:
        return model.input_spec.class_names or source.class_names, in_order(source.class_names, len(names))
    return names, match_classes(source.class_names, names)


def measured(
    found: Outputs, names: Sequence[str], thresholds: Sequence[float], worst: int = 20
) -> Measures | LabelMeasures:
    """Measure outputs by what they answer: one class, or with thresholds any number of labels per image."""
    return measure_labels(found, names, thresholds, worst=worst) if thresholds else measure(found, names, worst=worst)


def _check_kinds(model: Classifier, source: Source, data: str) -> None:
    """Raise DataError if the model names one class per image and the data has several labels, or the reverse."""
    if model.input_spec.several == source.several:
        return
    one, any_number = "one class per image", "any number of labels per image"
    wanted, got = (any_number, one) if model.input_spec.several else (one, any_number)
    raise DataError(f"Expected data with {wanted}, as the model answers; {data or 'this data'} has {got}.")


class ByEngine:
    """A model whose logits are computed by one of `speed.ENGINES`.

    Args:
        model: the model, on its device.
        name: a row of ENGINES; `self.name` is the engine that actually runs.
    """

    def __init__(self, model: Backbone, name: str) -> None:
        self.model, self.name = model.eval(), chosen(name, model)
        self.config, self.input_spec = model.config, model.input_spec
        self.forward, self.tolerance = ENGINES[self.name].build(model), ENGINES[self.name].tolerance

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits [B, K]."""
        return self.forward(x)

    def against_plain(self, found: Evaluation, source: Source, **how: Any) -> Accuracy:
        """Compare an evaluation by this engine with the plain model, which reads the images again.

        Args:
            found: the evaluation by this engine.
            source: the images that were evaluated.
            how: further arguments of `logits_of`.
        """
        plain = logits_of(self.model, source, **how)
        outputs, thresholds = found.outputs, self.input_spec.thresholds
        return compare(plain.logits, outputs.logits, outputs.labels, self.tolerance, thresholds)


def write(folder: str | Path, found: Evaluation, more: dict[str, Any] | None = None) -> list[Path]:
    """Write evaluation.json, predictions.csv, per_class.csv and confusion.csv; an interrupted write leaves no part.

    With several labels per image there is no confusion.csv.

    Args:
        folder: created if it does not exist.
        found: the evaluation.
        more: additional keys for evaluation.json.
    """
    folder = Path(folder).expanduser()
    m = found.measures
    tables = _label_tables(found, m) if isinstance(m, LabelMeasures) else _class_tables(found, m)
    with staging(folder) as beside:
        text = json.dumps(found.to_dict() | (more or {}), indent=1)
        (beside / "evaluation.json").write_text(text + "\n", encoding="utf-8")
        for name, (header, rows) in tables.items():
            with open(beside / name, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                csv.writer(file).writerow(cells(header))
                csv.writer(file).writerows(map(cells, rows))
    return [folder / name for name in ("evaluation.json", *tables)]


Tables = dict[str, tuple[Sequence[str], Any]]  # file -> its header and its rows


def _class_tables(found: Evaluation, m: Measures) -> Tables:
    names = found.class_names
    predicted, rank, confidence, truth = answers(found.outputs.logits, found.outputs.labels)
    tables: Tables = {
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
    return tables


def _label_tables(found: Evaluation, m: LabelMeasures) -> Tables:
    names, p = found.class_names, sigmoid(found.outputs.logits)
    said = p >= np.array([row.threshold for row in m.per_class])
    return {
        "predictions.csv": (
            ("image", "truth", "predicted", *names),
            (
                (image, joined(names, y), joined(names, s), *(f"{one:.6f}" for one in row))
                for image, y, s, row in zip(found.outputs.names, found.outputs.labels, said, p)
            ),
        ),
        "per_class.csv": (
            ("label", "average_precision", "threshold", "precision", "recall", "f1", "support", "predicted"),
            (
                (
                    s.name,
                    "" if s.ap is None else f"{s.ap:.6f}",
                    *(f"{one:.6f}" for one in (s.threshold, s.precision, s.recall, s.f1)),
                    s.support,
                    s.predicted,
                )
                for s in m.per_class
            ),
        ),
    }
