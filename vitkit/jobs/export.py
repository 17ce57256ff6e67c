"""Weights -> a file for another runtime, and a report of what that costs on the user's images."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.checkpoints.atomic import staging
from vitkit.data.base import Source, Subset
from vitkit.data.batch import BadImages
from vitkit.data.eval_loader import EvalLoader
from vitkit.data.sources import open_splits
from vitkit.errors import ConfigError, DataError, pick
from vitkit.evaluation.logits import logits_of
from vitkit.evaluation.match import match_classes
from vitkit.evaluation.names import class_names
from vitkit.evaluation.predict import Images
from vitkit.jobs.evaluate import part_of, run_of
from vitkit.model.backbone import Backbone
from vitkit.speed.accuracy import Accuracy, compare
from vitkit.speed.exported import EXPORTS, Card, Exported, export, open_exported
from vitkit.types import Array, Tick

NOISE = 8  # random images to compare on when no others are given


@dataclass(frozen=True)
class Shown:
    """Images for an export.

    Args:
        calibration: images to calibrate int8 on; None if nothing is calibrated.
        report: images to compare the file with the plain model on; None for random pixels.
        words: description of those images, for the report.
        labelled: whether their labels are classes of the model.
    """

    calibration: Source | None
    report: Source | None
    words: str
    labelled: bool = False


@dataclass(frozen=True)
class ExportedFile:
    """Result of `export_file`.

    Args:
        path: the file.
        card: the file's metadata.
        report: comparison with the plain model.
        on: description of the images in the report.
        calibrated: number of images it was calibrated on.
        megabytes: size of all its files.
        seconds: duration of the export, without the report.
    """

    path: Path
    card: Card
    report: Accuracy
    on: str
    calibrated: int
    megabytes: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "file": str(self.path),
            "form": self.card.form,
            "merge": self.card.merge,
            "any_size": self.card.any_size,
            "calibrated_on": self.calibrated,
            "report_on": self.on,
            **self.report.to_dict(),
            "megabytes": round(self.megabytes, 1),
            "seconds": round(self.seconds, 1),
        }


def default_place(weights: str | Path, to: str, merge: int = 0) -> Path:
    """Return the default path of an exported file: in the run folder, or in the current folder under the weights' name.

    Args:
        weights: the weights to export.
        to: a row of EXPORTS.
        merge: tokens to merge per block.
    """
    row, run = pick(EXPORTS, to, "export"), run_of(weights)
    name = "model" if run else Path(str(weights).partition("@")[0]).stem or "model"
    extra = ("-int8" if to.endswith("int8") else "") + (f"-merge{merge}" if merge else "")
    return (run.path if run else Path()) / f"{name}{extra}{row.ending}"


def images_for(
    data: str | Path | None,
    weights: str | Path,
    model: Backbone,
    calibrate: int,
    report: int,
    split: str | None = None,
    seed: int = 0,
) -> Shown:
    """Choose images to calibrate on and others to report on.

    Calibration uses the training part if there is one; otherwise some of the images, and the report covers the rest.

    Args:
        data: anything `open_splits` accepts, or a folder of images without classes (default: the run's own data).
        weights: the weights to export; a run knows its data.
        model: the model, whose classes are matched with the data's.
        calibrate: maximum number of images to calibrate on; 0 for none.
        report: maximum number of images to report on.
        split: part of the data to report on.
        seed: random seed of the choice.

    Raises:
        DataError: there are too few images to calibrate on.
    """
    run = run_of(weights)
    if data is None and run is not None:
        data = run.data or None
    if data is None:
        if calibrate:
            raise DataError(
                "int8 must be calibrated on images like those the model will see; got none. Give some with --images "
                "DATA."
            )
        return Shown(None, None, f"{NOISE} images of random pixels (give --images DATA for your own)")
    if Path(data).expanduser().is_dir() and not any(one.is_dir() for one in Path(data).expanduser().iterdir()):
        whole: Source = Images(data)  # photos without classes
        part, labelled, train = "all images", False, None
    else:
        whole, part = part_of(data, split, run, fitted=True)
        splits = open_splits(data)
        train = splits["train"]() if "train" in splits and "the train part" not in part else None
        labelled = names_match(whole, model)
    order = np.random.default_rng(seed).permutation(len(whole))
    if not calibrate:
        cut, calibration = 0, None
    elif train is not None and len(train):
        chosen = np.random.default_rng(seed).permutation(len(train))[:calibrate]
        cut, calibration = 0, Subset(train, np.sort(chosen))
    else:
        if len(whole) < 2:
            raise DataError(
                f"int8 needs at least two images, some to calibrate on and others to check; {data} holds {len(whole)}."
            )
        cut = min(calibrate, len(whole) // 2)
        calibration = Subset(whole, np.sort(order[:cut]))
    rest = np.sort(order[cut : cut + report])
    words = f"{len(rest)} images of {data} ({part}{', none of them calibrated on' if calibrate else ''})"
    return Shown(calibration, Subset(whole, rest), words, labelled)


def names_match(source: Source, model: Backbone) -> bool:
    """Return whether the data's classes are the model's."""
    try:
        match_classes(source.class_names, class_names(model))
    except DataError:
        return False
    return True


def export_file(
    model: Backbone,
    to: str,
    out: str | Path,
    images: Shown,
    *,
    merge: int = 0,
    source: str = "",
    batch_size: int = 32,
    workers: int | None = 0,
    progress: Tick | None = None,
    bad_images: BadImages = "fail",
) -> ExportedFile:
    """Write a file, open it again, and compare it with the model; a report is written next to it.

    Args:
        model: any ViT with a head.
        to: a row of EXPORTS.
        out: the file.
        images: the result of `images_for`.
        merge: tokens to merge per block.
        source: name of the weights, kept in the file.
        batch_size: images per batch.
        workers: worker processes for decoding; None for one per core.
        progress: called with the number of images done since the last call; the total is twice the report's images.
        bad_images: `fail` or `skip`.

    Raises:
        ConfigError: the weights have no head.
    """
    row, out = pick(EXPORTS, to, "export"), Path(out).expanduser()
    if not model.config.num_classes:
        raise ConfigError(
            "Expected weights with a classification head; these have none. Train one with `vitkit probe DATA --from "
            "WEIGHTS`."
        )
    loader = (
        ()
        if images.calibration is None
        else EvalLoader(
            images.calibration, model.input_spec, batch_size=batch_size, workers=workers, bad_images=bad_images
        )
    )
    start = time.perf_counter()
    with staging(out.parent, named=out) as beside:
        card = export(
            model,
            to,
            beside / out.name,
            merge=merge,
            pixels=(batch.pixels for batch in loader),
            words={"source": source},
        )
        seconds = time.perf_counter() - start
        size = sum(file.stat().st_size for file in beside.iterdir()) / 2**20
        promised = None if merge else row.tolerance
        report = reported(
            model, open_exported(beside / out.name), images, promised, batch_size, workers, progress, bad_images
        )
        done = ExportedFile(
            out, card, report, images.words, 0 if images.calibration is None else len(images.calibration), size, seconds
        )
        (beside / f"{out.name}.report.json").write_text(json.dumps(done.to_dict(), indent=1) + "\n", encoding="utf-8")
    return done


def reported(
    model: Backbone,
    fast: Exported,
    images: Shown,
    tolerance: float | None,
    batch_size: int,
    workers: int | None,
    progress: Tick | None,
    bad_images: BadImages,
) -> Accuracy:
    """Compare the plain model and its exported form on the same images."""
    if images.report is None:
        spec = model.input_spec
        x = torch.randn(NOISE, len(spec.mean), *spec.size, generator=torch.Generator().manual_seed(0))
        first = next(model.parameters())
        with torch.inference_mode():
            plain_logits = model(x.to(first)).float().cpu().numpy()
            return compare(plain_logits, fast(x).numpy(), None, tolerance, spec.thresholds)
    plain, other = (
        logits_of(one, images.report, batch_size=batch_size, workers=workers, progress=progress, bad_images=bad_images)
        for one in (model, fast)
    )
    labels: Array | None = None
    if images.labelled and not images.report.several:
        labels = match_classes(images.report.class_names, class_names(model))[plain.labels]
    return compare(plain.logits, other.logits, labels, tolerance, model.input_spec.thresholds)
