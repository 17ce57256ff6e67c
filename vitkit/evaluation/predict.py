"""Classify single images: files, folders, glob patterns, encoded bytes, or images in memory."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

from vitkit.data.base import NO_LABEL, SEPARATOR, Source
from vitkit.data.batch import BadImages
from vitkit.data.decode import Raw, decode
from vitkit.data.eval_loader import EvalLoader
from vitkit.data.files import ENDINGS, read_file
from vitkit.data.string_table import natural
from vitkit.errors import DataError, InputError
from vitkit.evaluation.logits import stream
from vitkit.evaluation.names import answer_names
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import Classifier, Running, device_of, probabilities
from vitkit.model.config import InputSpec
from vitkit.model.known import NONE, Judged
from vitkit.runtime import Runtime
from vitkit.speed.frozen import Way, way
from vitkit.types import Array, Plotted

Given = str | Path | bytes | Image.Image | Array  # one image; a string or path may also be a folder or a glob pattern


@dataclass(frozen=True)
class Guess:
    """A class and its probability."""

    name: str
    index: int
    probability: float


@dataclass(frozen=True)
class Prediction(Plotted):
    """The prediction for one image.

    Args:
        image: the image's path, or "image 0", "image 1", ... for images in memory.
        guesses: the most probable classes, best first.
        raw: the image itself, if it was in memory.
        distance: distance to the known classes, as a share of what is accepted; None if the model accepts everything.
        labels: for a model that gives an image any number of labels, those that it gives, most probable first; they
            reach their thresholds. None for a model that names one class.
    """

    image: str
    guesses: tuple[Guess, ...]
    raw: Raw | None = field(default=None, repr=False, compare=False)
    distance: float | None = None
    labels: tuple[Guess, ...] | None = None

    def __str__(self) -> str:
        return f"{self.image}: {self._words()}"

    def _words(self) -> str:
        """The answer with its probabilities."""
        if self.labels is not None:
            return ", ".join(f"{one.name} {one.probability:.1%}" for one in self.labels) or NO_LABEL
        return NONE if self.none_of_these else f"{self.name} {self.probability:.1%}"

    def plot(self) -> Any:
        """Draw the photo with its class and probability as the title."""
        from vitkit.explanations import draw

        raw = self.raw if self.raw is not None else read_file(self.image, self.image)
        return draw.photo(np.asarray(decode(raw, self.image).convert("RGB")), self._words())

    @property
    def none_of_these(self) -> bool:
        """Whether the image is farther from every known class than the model accepts."""
        return self.distance is not None and self.distance > 1

    @property
    def name(self) -> str:
        """The most probable class, or "none of these"; of several labels, all: `cat|dog`, or "no label"."""
        if self.labels is not None:
            return SEPARATOR.join(one.name for one in self.labels) or NO_LABEL
        return NONE if self.none_of_these else self.guesses[0].name

    @property
    def probability(self) -> float:
        """The probability of the most probable class."""
        return self.guesses[0].probability


def answer(image: str, p: Array, names: Sequence[str], spec: InputSpec, top: int, **more: Any) -> Prediction:
    """Return the prediction that probabilities mean: the most probable classes, and the labels that are there.

    Args:
        image: the image's name.
        p: [K] probabilities, see `classifier.probabilities`.
        names: names of the K outputs.
        spec: the model's, with the thresholds of labels.
        top: number of guesses.
        more: further fields of Prediction.
    """
    order = np.argsort(-p, kind="stable")
    guesses = tuple(Guess(names[k], int(k), float(p[k])) for k in order[:top])
    labels = None
    if spec.several:
        labels = tuple(Guess(names[k], int(k), float(p[k])) for k in order if p[k] >= spec.thresholds[k])
    return Prediction(image, guesses, labels=labels, **more)


class Predictions(list[Prediction]):
    """Predictions in the order of the images; `skipped` holds (name, reason) of every image that could not be read."""

    skipped: tuple[tuple[str, str], ...] = ()


class Images(Source):
    """Unlabelled images as a source: folders and patterns become files, anything else is kept as it is.

    Args:
        given: see `predict`.

    Raises:
        DataError: there are no images, or none in a folder or for a pattern.
        InputError: something is not an image.
    """

    def __init__(self, given: Given | Iterable[Given]) -> None:
        several = not isinstance(given, str | Path | bytes | Image.Image | np.ndarray)
        if several and not isinstance(given, Iterable):
            raise InputError(f"Expected an image, a file, a folder, or several of these; got {type(given).__name__}.")
        self.items: list[str | Raw] = []
        names: list[str] = []
        for one in cast("Iterable[Given]", given if several else [given]):
            found: list[str] | list[Raw] = files(one) if isinstance(one, str | Path) else [image(one)]
            names += [item if isinstance(item, str) else f"image {len(names)}" for item in found]
            self.items += found
        if not self.items:
            raise DataError("Expected at least one image; got none.")
        super().__init__(np.zeros(len(names), np.int32), ["unknown"], names)

    def raw(self, i: int) -> Raw:
        """See Source."""
        item = self.items[i]
        return read_file(item, item) if isinstance(item, str) else item


def files(place: str | Path) -> list[str]:
    """Return the images that a path stands for: itself, all images below a folder, or all matches of a pattern.

    Args:
        place: a file, a folder, or a glob pattern.
    """
    path = os.path.expanduser(place)
    if os.path.isdir(path):
        found = [
            os.path.join(folder, name)
            for folder, _, names in os.walk(path)
            for name in names
            if name.lower().endswith(ENDINGS) and not name.startswith(".")
        ]
        if not found:
            raise DataError(f"Expected images in the folder {place}; it has none.")
    elif not os.path.exists(path) and glob.has_magic(path):
        found = [name for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
        if not found:
            raise DataError(f"Expected files that match {str(place)!r}; there are none.")
    else:
        return [str(path)]  # a file that cannot be read is reported when it is read
    return sorted(found, key=natural)


def image(given: bytes | Image.Image | Array) -> Raw:
    """Return an image in memory in a form that `decode` takes.

    Args:
        given: encoded bytes, a Pillow image, or a uint8 array [H, W] or [H, W, C].
    """
    if isinstance(given, bytes | Image.Image):
        return given
    if (
        isinstance(given, np.ndarray)
        and given.dtype == np.uint8
        and (given.ndim == 2 or (given.ndim == 3 and given.shape[2] in (1, 3, 4)))
    ):
        return Image.fromarray(given[:, :, 0] if given.ndim == 3 and given.shape[2] == 1 else given)
    what = f"{given.dtype}{list(given.shape)}" if hasattr(given, "dtype") else type(given).__name__
    raise InputError(
        f"Expected a path, bytes, a Pillow image or a uint8 array [height, width, 1, 3 or 4 channels]; got {what}. "
        f"If the pixels are normalised already, call the model itself."
    )


def runs(model: Classifier, images: int, batch_size: int, runtime: Runtime | None) -> Way:
    """Return how a model runs that classifies images.

    An exported one runs as it was exported, and one that tells which images are none of its classes in fp32, in which
    its limit was measured.

    Args:
        model: the model, on its device.
        images: how many there are.
        batch_size: images per batch.
        runtime: sets the precision of any other model (default: fp32).
    """
    if not isinstance(model, Backbone):
        return Way("as exported")
    if runtime is None or _judged(model):
        return Way("fp32")
    return way(model, runtime.precision, images, batch_size=batch_size)


def _judged(model: Classifier) -> bool:
    return isinstance(model, Backbone) and model.known is not None


def predictions(
    model: Classifier,
    images: Given | Iterable[Given] | Images,
    *,
    top: int = 5,
    batch_size: int = 64,
    workers: int | None = 0,
    bad_images: BadImages = "fail",
    on_bad: Callable[[str, str], None] | None = None,
    runtime: Runtime | None = None,
) -> Iterator[Prediction]:
    """Yield what `predict` returns, as soon as each batch is done; all predictions need never be in memory at once.

    Args:
        model: see `predict`.
        images: see `predict`.
        top: see `predict`.
        batch_size: see `predict`.
        workers: see `predict`.
        bad_images: see `predict`.
        on_bad: called with (name, reason) for every image that is skipped.
        runtime: sets the precision, as far as the model has a choice: see `runs` (default: fp32).
    """
    if top < 1:
        raise InputError(f"top must be at least 1; got {top}.")
    names = answer_names(model)
    source = images if isinstance(images, Images) else Images(images)
    loader = EvalLoader(
        source,
        model.input_spec,
        batch_size=batch_size,
        workers=workers,
        device=device_of(model),
        bad_images=bad_images,
        on_bad=on_bad,
    )
    judged, by = _judged(model), runs(model, len(source), batch_size, runtime)
    run: Classifier = Running(by.build, model.input_spec) if by.build else model
    if judged:
        run = Judged(cast("Backbone", model))
    for logits, index in stream(run, loader, None if by.name == "fp32" else runtime):
        far = logits[:, -1].tolist() if judged else [None] * len(logits)
        own = torch.from_numpy(logits[:, : len(names)])
        for p, i, distance in zip(probabilities(own, model.input_spec).numpy(), index, far, strict=True):
            item = source.items[int(i)]
            more = {"raw": None if isinstance(item, str) else item, "distance": distance}
            yield answer(source.names[int(i)], p, names, model.input_spec, top, **more)


def predict(
    model: Classifier,
    images: Given | Iterable[Given],
    *,
    top: int = 5,
    batch_size: int = 64,
    workers: int | None = 0,
    bad_images: BadImages = "fail",
) -> Predictions:
    """Classify images.

    Args:
        model: a ViT (`vitkit.load(...)`) or any other classifier.
        images: a file, a folder, a glob pattern such as `photos/*.jpg`, encoded bytes, a Pillow image, a uint8 array
            [H, W] or [H, W, C], or several of these.
        top: number of classes to return per image.
        batch_size: images per batch.
        workers: worker processes for decoding; None for one per core.
        bad_images: `fail` raises BadImage; `skip` leaves the image out and lists it in the result's `skipped`.

    Returns:
        One Prediction per image, in the order of the images. With several labels per image, its `labels` are those
        that reach their thresholds, whatever `top` is.
    """
    skipped: list[tuple[str, str]] = []
    found = Predictions(
        predictions(
            model,
            images,
            top=top,
            batch_size=batch_size,
            workers=workers,
            bad_images=bad_images,
            on_bad=lambda name, why: skipped.append((name, why)),
        )
    )
    found.skipped = tuple(skipped)
    return found
