"""One image -> the pictures of Eq. 1: patches, their embeddings, the sequence."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoints import load
from vitkit.data.preprocess import preprocess
from vitkit.errors import ConfigError, OutputError, pick
from vitkit.evaluation.predict import Given, Images
from vitkit.explanations import draw
from vitkit.explanations.common import Arrays
from vitkit.explanations.patches import PICTURES, draw_all, embedding
from vitkit.jobs.explain import at_size
from vitkit.jobs.figures import sample_photos
from vitkit.model.config import variant
from vitkit.model.create import need_vit
from vitkit.model.vit import ViT
from vitkit.types import Plotted


@dataclass(frozen=True)
class Patches(Plotted):
    """Every step of Eq. 1 for one image.

    Args:
        arrays: what `vitkit.explanations.patches.embedding` returns.
    """

    arrays: Arrays

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array."""
        return {name: values.shape for name, values in self.arrays.items() if values.ndim > 1}

    def plot(self, name: str | None = None) -> draw.Figure:
        """Draw one picture, or all of them, one below the other.

        Args:
            name: image, row, grid, feature_maps, flattened, embedding, positions or sequence (default: all).
        """
        if name is not None:
            return pick(PICTURES, name, "picture")(self.arrays)
        return draw.stacked([picture(self.arrays) for picture in PICTURES.values()])

    def save(self, out: Path) -> list[Path]:
        """Write each picture, and the arrays as `arrays.npz`; return the paths.

        Args:
            out: folder to write to.
        """
        try:
            return draw_all(self.arrays, out)
        except OSError as error:
            raise OutputError(
                f"Expected a writable folder; cannot write to {out} ({error.strerror}). Choose another one with --out."
            ) from error

    def __repr__(self) -> str:
        return "\n".join(f"{name:10} {list(shape)}" for name, shape in self.shapes.items())


def model_for(
    model: str,
    weights: str | Path | None = None,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | None = None,
    seed: int = 42,
    **overrides: Any,
) -> ViT:
    """Load trained weights, or create a variant with random ones, which sees the centre of a photo.

    Args:
        model: variant to create with random weights.
        weights: trained weights to use instead: anything that `vitkit.load` accepts.
        image_size: image size of a new model in pixels (default: the variant's).
        patch_size: patch size P of a new model (default: the variant's).
        seed: random seed of a new model (default: 42).
        overrides: other arguments of `vitkit.load`, for trained weights.
    """
    if weights is not None:
        return need_vit(load(weights, **overrides), "Cutting an image into patches")
    if overrides:
        raise ConfigError(
            f"Expected --from with {', '.join(overrides)}, which only applies to weights; got none. Give weights."
        )
    config = variant(model)
    torch.manual_seed(seed)
    P = patch_size or config.patch_size
    size = image_size or (config.image_hw[0] // P * P, config.image_hw[1] // P * P)
    vit = ViT(variant(model, patch_size=P, image_size=size)).eval()
    vit.input_spec = dataclasses.replace(vit.input_spec, resize="crop", interpolation="bicubic")
    return vit


def pixels_of(model: ViT, image: Given | None, image_size: int | tuple[int, int] | None = None) -> Tensor:
    """Prepare one image for a model, [1, C, H, W].

    Args:
        model: a ViT.
        image: any image that `vitkit.predict` accepts (default: a sample photo).
        image_size: image size in pixels (default: the model's).
    """
    source = Images(image) if image is not None else sample_photos()
    i = 0 if image is not None else 1  # the second sample photo shows its patches better
    return preprocess(source.read(i)[0], at_size(model.input_spec, image_size), source.names[i])[None]


def patches(model: ViT, image: Given | None = None, image_size: int | tuple[int, int] | None = None) -> Patches:
    """Compute every step of Eq. 1 for one image.

    Args:
        model: a ViT.
        image: any image that `vitkit.predict` accepts (default: a sample photo).
        image_size: image size in pixels (default: the model's).
    """
    return Patches(embedding(model, pixels_of(model, image, image_size)))
