"""Suggest which photos to label next."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vitkit.checkpoints.atomic import writing
from vitkit.checkpoints.outputs import check_file
from vitkit.data.table import cells
from vitkit.errors import ConfigError, Occupied
from vitkit.evaluation.names import class_names
from vitkit.evaluation.predict import Given, Images
from vitkit.features.cache import FeatureCache
from vitkit.features.embed import fill
from vitkit.features.suggest import margins
from vitkit.features.suggest import suggest as choose_photos
from vitkit.jobs.tables import check_replaced
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import evaluating
from vitkit.runtime import Runtime
from vitkit.types import Tick

COLUMNS = ("path", "guess", "margin", "label")


@dataclass(frozen=True)
class Suggestion:
    """A photo to label.

    Args:
        image: its name.
        guess: the class that the model finds most probable.
        margin: difference between its two highest probabilities; small if it is unsure.
    """

    image: str
    guess: str
    margin: float


@dataclass(frozen=True)
class Suggestions:
    """Photos to label, the most useful first, and (name, reason) of every photo that could not be read."""

    photos: tuple[Suggestion, ...]
    skipped: tuple[tuple[str, str], ...]


def suggest(
    model: Backbone,
    images: Given | Iterable[Given] | Images,
    cache: FeatureCache,
    *,
    count: int = 50,
    batch_size: int | None = None,
    workers: int | None = None,
    runtime: Runtime | None = None,
    progress: Tick | None = None,
) -> Suggestions:
    """Suggest photos that the model is unsure about, and that differ from each other.

    Args:
        model: the classifier so far, on its device.
        images: the unlabelled photos: anything that `predict` accepts.
        cache: the feature cache.
        count: number of photos to suggest.
        batch_size: images per batch (default: see `data.batch.images_per_batch`).
        workers: worker processes for decoding; None for one per core.
        runtime: device and precision.
        progress: called with the number of images finished since the last call.

    Raises:
        ConfigError: the model has no classes.
    """
    if model.config.num_classes < 2:
        raise ConfigError("Expected a model with at least two classes; train one first, for example with vitkit probe.")
    if model.input_spec.several:
        raise ConfigError("Suggestions need a model that names one class per image; this one gives several labels.")
    source = images if isinstance(images, Images) else Images(images)
    filled = fill(
        model,
        source,
        cache,
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
        progress=progress,
        bad_images="skip",
    )
    found = filled.read()
    with evaluating(model):
        y = torch.from_numpy(found.features).to(next(model.parameters()))
        logits = model.classify(y).double().cpu().numpy()
    names, margin = class_names(model), margins(logits)
    chosen = choose_photos(found.features, logits, count)
    photos = tuple(Suggestion(found.names[i], names[int(logits[i].argmax())], float(margin[i])) for i in chosen)
    return Suggestions(photos, filled.skipped)


def check_list(path: str | Path) -> Path:
    """Refuse a list that cannot be written or would replace labels, before any work is done; return it expanded.

    Args:
        path: the file.

    Raises:
        Occupied: labels are filled in there, or it is not a list of suggestions.
    """
    file = check_file(path, (".csv",), "--out")
    check_replaced(file, COLUMNS)
    if not file.is_file():
        return file
    with open(file, newline="", encoding="utf-8-sig", errors="replace") as text:
        filled = sum(bool((row["label"] or "").strip()) for row in csv.DictReader(text))
    if filled:
        raise Occupied(
            f"Expected a new file, or a list without labels to replace; {path} has {filled} "
            f"label{'s' if filled > 1 else ''} filled in. Give another name, and keep this one as training data."
        )
    return file


def write_list(found: Suggestions, path: str | Path) -> Path:
    """Write a .csv list with the columns path, guess, margin and an empty column label, to be filled in.

    With its labels filled in, the file is a data set: `vitkit probe LIST.csv`.

    Args:
        found: the suggestions.
        path: the file.
    """
    path = check_list(path)
    with (
        writing(path) as private,
        open(private, "w", encoding="utf-8", errors="surrogateescape", newline="") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for one in found.photos:
            row = asdict(one)
            image = str(Path(row["image"]).absolute()) if Path(row["image"]).exists() else row["image"]
            writer.writerow(cells((image, one.guess, f"{one.margin:.4f}", "")))
    return path
