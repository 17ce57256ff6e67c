"""What a model says of single images: of files, folders, patterns, bytes, or images in memory."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image

from vitkit.data.base import Source
from vitkit.data.decode import Raw
from vitkit.data.folder import ENDINGS
from vitkit.data.loader import BadImages, EvalLoader
from vitkit.data.string_table import natural
from vitkit.errors import BadImage, DataError, InputError
from vitkit.evaluation.logits import stream
from vitkit.evaluation.names import class_names, outputs_of
from vitkit.model.classifier import Classifier, device_of
from vitkit.types import Array

Given = str | Path | bytes | Image.Image | Array  # one image, or (a string or path) a folder or a pattern


@dataclass(frozen=True)
class Guess:
    """One class and its probability."""

    name: str
    index: int
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image.

    Args:
        image: what the image is called.
        guesses: the likeliest classes, the likeliest first.
    """

    image: str
    guesses: tuple[Guess, ...]

    @property
    def name(self) -> str:
        """The likeliest class."""
        return self.guesses[0].name

    @property
    def probability(self) -> float:
        """Its probability."""
        return self.guesses[0].probability


class Predictions(Sequence[Prediction]):
    """Predictions in the order of the images; `skipped` names those that could not be read.

    Args:
        found: the predictions.
        skipped: (name, sentence) of every image that was left out.
    """

    def __init__(self, found: Iterable[Prediction], skipped: Iterable[tuple[str, str]] = ()) -> None:
        self.found, self.skipped = tuple(found), tuple(skipped)

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, i: Any) -> Any:
        return self.found[i]

    def __repr__(self) -> str:
        return f"Predictions({list(self.found)!r}, skipped={list(self.skipped)!r})"


class Images(Source):
    """Images that were handed over: files, folders and patterns become files; the rest is kept as it is.

    Args:
        given: see `predict`.

    Raises:
        DataError: a folder or a pattern without images; nothing at all.
        InputError: what is no image.
    """

    def __init__(self, given: Given | Iterable[Given]) -> None:
        several = not isinstance(given, str | Path | bytes | Image.Image | np.ndarray)
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
        if not isinstance(item, str):
            return item
        try:
            return Path(item).read_bytes()
        except OSError as error:
            raise BadImage(f"{item}: cannot be read ({error.strerror}).") from error


def files(place: str | Path) -> list[str]:
    """The images that a path means: itself, those below a folder, or those that fit a pattern.

    Args:
        place: a file, a folder, or a pattern.
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
            raise DataError(f"The folder {place} holds no images.")
    elif not os.path.exists(path) and glob.has_magic(path):
        found = [name for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
        if not found:
            raise DataError(f"No file fits {str(place)!r}.")
    else:
        return [str(path)]  # whether it can be read is found out, and said, where it is read
    return sorted(found, key=natural)


def image(given: bytes | Image.Image | Array) -> Raw:
    """An image in memory as `decode` takes it.

    Args:
        given: encoded bytes, a Pillow image, or an array [H, W] or [H, W, C] of uint8.
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
        f"Expected a path, bytes, a Pillow image or an array [height, width, 1, 3 or 4 channels] of "
        f"uint8; got {what}. Pixels that are normalised already go into the model itself."
    )


def predictions(
    model: Classifier,
    images: Given | Iterable[Given] | Images,
    *,
    top: int = 5,
    batch_size: int = 64,
    workers: int | None = 0,
    bad_images: BadImages = "fail",
    on_bad: Callable[[str, str], None] | None = None,
) -> Iterator[Prediction]:
    """`predict`, one image after the other as they are done: for more images than memory should hold.

    Args:
        model: see `predict`.
        images: see `predict`.
        top: see `predict`.
        batch_size: see `predict`.
        workers: see `predict`.
        bad_images: see `predict`.
        on_bad: called with (name, sentence) for every image that is skipped.
    """
    if top < 1:
        raise InputError(f"top must be at least 1; got {top}.")
    names = class_names(model.input_spec, outputs_of(model))
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
    for logits, index in stream(model, loader):
        for p, i in zip(softmax(logits), index):
            best = np.argsort(-p, kind="stable")[:top]
            yield Prediction(source.names[int(i)], tuple(Guess(names[k], int(k), float(p[k])) for k in best))


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
        model: a ViT (`vitkit.load(...)`), or whatever else predicts.
        images: a file, a folder, a pattern such as `photos/*.jpg`, encoded bytes, a Pillow image, an array
            [H, W] or [H, W, C] of uint8, or several of these.
        top: guesses for each image.
        batch_size: images at once.
        workers: processes that decode; None for one a core.
        bad_images: `fail` raises BadImage; `skip` leaves the image out and names it in the result's `skipped`.

    Returns:
        One Prediction for each image, in their order.
    """
    skipped: list[tuple[str, str]] = []
    found = list(
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
    return Predictions(found, skipped)


def softmax(logits: Array) -> Array:
    """Probabilities [B, K] in float64.

    Args:
        logits: [B, K].
    """
    p = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)
