"""One image -> the pictures of Eq. 1: patches, their embeddings, the sequence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from vitkit.checkpoints import load
from vitkit.data.preprocess import preprocess
from vitkit.errors import ConfigError, OutputError
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
    **overrides: Any,
) -> tuple[list[Path], dict[str, tuple[int, ...]], bool]:
    """Draw every step of Eq. 1 for one image.

    Args:
        image: a file, or any image that `vitkit.predict` accepts (default: a sample photo).
        out: folder to write to.
        model: variant to create with random weights (default: vit-b/16).
        weights: trained weights to use instead: anything that `vitkit.load` accepts.
        image_size: image size in pixels (default: the model's).
        patch_size: patch size P of a new model (default: the variant's).
        seed: random seed of a new model (default: 42).
        overrides: other arguments of `vitkit.load`, for trained weights.

    Returns:
        The files written, the shape of each array, and whether trained weights were used.
    """
    if weights is not None:
        vit = load(weights, **overrides)
    elif overrides:
        raise ConfigError(f"{', '.join(overrides)} change how weights are loaded; give weights with --from.")
    else:
        config = variant(model)
        torch.manual_seed(seed)
        P = patch_size or config.patch_size
        vit = create(model, patch_size=P, image_size=image_size or [side // P * P for side in config.image_hw]).eval()
        vit.input_spec = dataclasses.replace(vit.input_spec, resize="crop", interpolation="bicubic")
    source = Images(image) if image is not None else sample_photos()
    spec = at_size(vit.input_spec, image_size)
    i = 0 if image is not None else 1  # the second sample photo shows its patches better
    arrays = embedding(vit, preprocess(source.read(i)[0], spec, source.names[i])[None])
    try:
        files = draw_all(arrays, out)
    except OSError as error:
        raise OutputError(
            f"Expected a writable folder; cannot write to {out} ({error.strerror}). Choose another one with --out."
        ) from error
    return files, {name: values.shape for name, values in arrays.items() if values.ndim > 1}, weights is not None
