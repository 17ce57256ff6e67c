"""Weights -> another runtime's file, and a report of what that costs on the user's images."""

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
from vitkit.data.loader import BadImages, EvalLoader
from vitkit.data.sources import open_splits
from vitkit.errors import ConfigError, DataError, pick
from vitkit.evaluation.logits import logits_of
from vitkit.evaluation.match import match_classes
from vitkit.evaluation.names import class_names
from vitkit.evaluation.predict import Images
from vitkit.jobs.evaluate import part_of, run_of
from vitkit.model.vit import ViT
from vitkit.speed.accuracy import Accuracy, compare
from vitkit.speed.exported import EXPORTS, Card, Exported, export, open_exported
from vitkit.types import Array, Tick

NOISE = 8  # random images that a file is checked with where there are no others


@dataclass(frozen=True)
class Shown:
    """Images for an export.

    Args:
        calibration: what int8's ranges are measured on; None where nothing is calibrated.
        report: what the file is compared with the plain model on; None for random pixels.
        words: what that is, for the report.
        labelled: whether the labels are right answers.
    """

    calibration: Source | None
    report: Source | None
    words: str
    labelled: bool = False


@dataclass(frozen=True)
class ExportedFile:
    """What `export_file` did.

    Args:
        path: the file.
        card: what it says of itself.
        report: against the plain model.
        on: what the report is about, in words.
        calibrated: images that it was calibrated on.
        megabytes: of all its files.
        seconds: of exporting, without the report.
    """

    path: Path
    card: Card
    report: Accuracy
    on: str
    calibrated: int
    megabytes: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
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
    """Where a file goes when nobody says: into the run, else beside nothing, under the weights' name.

    Args:
        weights: what is exported.
        to: a row of EXPORTS.
        merge: tokens to merge in each block.
    """
    row, run = pick(EXPORTS, to, "export"), run_of(weights)
    name = "model" if run else Path(str(weights).partition("@")[0]).stem or "model"
    extra = ("-int8" if to.endswith("int8") else "") + (f"-merge{merge}" if merge else "")
    return (run.path if run else Path()) / f"{name}{extra}{row.ending}"


def images_for(
    data: str | Path | None,
    weights: str | Path,
    model: ViT,
    calibrate: int,
    report: int,
    split: str | None = None,
    seed: int = 0,
) -> Shown:
    """Choose images to calibrate on and others to report on.

    Calibration takes the training part where there is one; else some of the images, and the report is about the rest.

    Args:
        data: what `open_splits` takes, or a folder of images without classes; the run's own data when not given.
        weights: what is exported; a run knows its data.
        model: its classes are looked for in the data's.
        calibrate: images to calibrate on, at most; 0 for none.
        report: images to report on, at most.
        split: part of the data to report on.
        seed: chooses them.
    """
    run = run_of(weights)
    if data is None and run is not None:
        data = run.info.get("data", {}).get("spec")
    if data is None:
        if calibrate:
            raise DataError("int8 is calibrated on images like those it will see; give some with --images DATA.")
        return Shown(None, None, f"{NOISE} images of random pixels (give --images DATA for your own)")
    if Path(data).expanduser().is_dir() and not any(one.is_dir() for one in Path(data).expanduser().iterdir()):
        whole: Source = Images(data)  # photos without classes
        part, labelled, train = "all images", False, None
    else:
        whole, part = part_of(data, split, run)
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
            raise DataError(f"{data} holds {len(whole)} image; int8 needs some to calibrate on and others to check.")
        cut = min(calibrate, len(whole) // 2)
        calibration = Subset(whole, np.sort(order[:cut]))
    rest = np.sort(order[cut : cut + report])
    words = f"{len(rest)} images of {data} ({part}{', none of them calibrated on' if calibrate else ''})"
    return Shown(calibration, Subset(whole, rest), words, labelled)


def names_match(source: Source, model: ViT) -> bool:
    """Whether the data's classes are the model's."""
    try:
        match_classes(source.class_names, class_names(model))
    except DataError:
        return False
    return True


def export_file(
    model: ViT,
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
    """Write a file, open it again, and compare it with the model; a report is written beside it.

    Args:
        model: any ViT with a head.
        to: a row of EXPORTS.
        out: the file.
        images: what `images_for` chose.
        merge: tokens to merge in each block.
        source: what the weights are called.
        batch_size: images at once.
        workers: processes that decode; None for one a core.
        progress: called with the number of images done since the last call, of twice as many as are reported on.
        bad_images: `fail` or `skip`.
    """
    row, out = pick(EXPORTS, to, "export"), Path(out).expanduser()
    if not model.config.num_classes:
        raise ConfigError(
            "These weights have no head, so that they predict nothing; give them one with `vitkit probe "
            "DATA --from WEIGHTS`."
        )
    loader = (
        ()
        if images.calibration is None
        else EvalLoader(
            images.calibration, model.input_spec, batch_size=batch_size, workers=workers, bad_images=bad_images
        )
    )
    start = time.perf_counter()
    with staging(out.parent) as beside:
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
        (beside / f"{out.stem}.report.json").write_text(json.dumps(done.to_dict(), indent=1) + "\n", encoding="utf-8")
    return done


def reported(
    model: ViT,
    fast: Exported,
    images: Shown,
    tolerance: float | None,
    batch_size: int,
    workers: int | None,
    progress: Tick | None,
    bad_images: BadImages,
) -> Accuracy:
    """The plain model and its exported form on the same images."""
    if images.report is None:
        spec = model.input_spec
        x = torch.randn(NOISE, len(spec.mean), *spec.size, generator=torch.Generator().manual_seed(0))
        first = next(model.parameters())
        with torch.inference_mode():
            return compare(model(x.to(first)).float().cpu().numpy(), fast(x).numpy(), None, tolerance)
    plain, other = (
        logits_of(one, images.report, batch_size=batch_size, workers=workers, progress=progress, bad_images=bad_images)
        for one in (model, fast)
    )
    labels: Array | None = None
    if images.labelled:
        labels = match_classes(images.report.class_names, class_names(model))[plain.labels]
    return compare(plain.logits, other.logits, labels, tolerance)
