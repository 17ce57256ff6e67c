"""One image -> the pictures of Eq. 1: patches, their embedding, the sequence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from vitkit.checkpoints import load
from vitkit.data.preprocess import preprocess
from vitkit.errors import OutputError
from vitkit.evaluation.predict import Given, Images
from vitkit.explain.patches import draw_all, embedding
from vitkit.jobs.explain import at_size
from vitkit.jobs.figures import sample_photos
from vitkit.model.config import variant
from vitkit.model.create import create


def patches(
    image: Given | None,
    out: Path,
    *,
    model: str = "vit-b/16",
    weights: str | Path | None = None,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | None = None,
    seed: int = 42,
) -> tuple[list[Path], dict[str, tuple[int, ...]], bool]:
    """Draw what Eq. 1 makes of an image.

    Args:
        image: a file, or one of what `vitkit.evaluation.predict` takes; a sample photo when not given.
        out: folder.
        model: a variant, with random weights.
        weights: what `vitkit.load` takes, instead of a variant.
        image_size: pixels; the model's own when not given.
        patch_size: P of a new model; the variant's own when not given.
        seed: of the random weights.

    Returns:
        The files, the shape of each array, and whether the weights are trained ones.
    """
    if weights is not None:
        vit = load(weights)
    else:
        config = variant(model)
        torch.manual_seed(seed)
        P = patch_size or config.patch_size
        vit = create(model, patch_size=P, image_size=image_size or [side // P * P for side in config.image_hw]).eval()
        vit.input_spec = dataclasses.replace(vit.input_spec, resize="crop", interpolation="bicubic")
    source = Images(image) if image is not None else sample_photos()
    spec = at_size(vit.input_spec, image_size)
    picture = source.read(0 if image is not None else 1)[0]
    arrays = embedding(vit, preprocess(picture, spec, source.names[0])[None])
    try:
        files = draw_all(arrays, out)
    except OSError as error:
        raise OutputError(
            f"Expected a folder that can be written to; {out} cannot ({error.strerror}). Choose another with --out."
        ) from error
    return files, {name: values.shape for name, values in arrays.items() if values.ndim > 1}, weights is not None
