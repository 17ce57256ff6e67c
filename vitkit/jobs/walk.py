"""A photo through Eqs. 1-4, one step at a time."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitkit.data.preprocess import preprocess
from vitkit.data.samples import sample_photo
from vitkit.evaluation.predict import Given, Images
from vitkit.explain import draw
from vitkit.explain.patches import cut
from vitkit.model.create import create
from vitkit.model.vit import ViT


@dataclass(frozen=True)
class Step:
    """One step of the walk: the equation, what it does, and the tensor that comes out."""

    equation: str
    words: str
    value: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.value.shape)

    @property
    def few(self) -> str:
        """Its first values."""
        return ", ".join(f"{value:.3g}" for value in self.value.flatten()[:3].tolist()) + ", ..."


def square_photo(name: str, size: tuple[int, int]) -> Image.Image:
    """The centre square of a sample photo (`china`, `flower`), resized to (height, width)."""
    photo = sample_photo(name)
    side = min(photo.size)
    left, top = (photo.width - side) // 2, (photo.height - side) // 2
    return photo.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))


class Walk(list[Step]):
    """The steps of one photo; shown as a table with a few values of each tensor."""

    def __str__(self) -> str:
        rows = [(step.equation, str(list(step.shape)), step.few, step.words) for step in self]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{step.equation}</td><td><code>{list(step.shape)}</code></td><td><code>{step.few}</code></td>"
            f"<td>{html.escape(step.words)}</td></tr>"
            for step in self
        )
        return f"<table><tr><th></th><th>shape</th><th>first values</th><th></th></tr>{rows}</table>"


def walk_of(model: ViT, image: Given | None = None) -> Walk:
    """Take one photo through a model.

    Args:
        model: a ViT in eval mode.
        image: any image that `vitkit.predict` accepts (default: a sample photo).
    """
    source = Images(image if image is not None else sample_photo("flower"))
    x = preprocess(source.read(0)[0], model.input_spec, source.names[0])[None]
    return Walk(steps(model, x.to(next(model.parameters()))))


def walk(variant: str, out: Path, seed: int = 42) -> Iterator[Step | Path]:
    """Yield each step of one photo's way through a new model, and the picture of its patches.

    Args:
        variant: a row of VARIANTS.
        out: folder for the picture.
        seed: seed of the random weights (default: 42).
    """
    torch.manual_seed(seed)
    model = create(variant).eval()
    c = model.config
    photo = np.asarray(square_photo("flower", c.image_hw))  # [H, W, C]
    parts = cut(photo, c.patch_size)
    yield draw.patches(photo, parts, out / "patches.png", f"What {variant} is fed: a sequence of patches")
    x = (torch.from_numpy(photo.copy()).permute(2, 0, 1)[None] / 255 - 0.5) / 0.5  # [1, C, H, W]
    yield from steps(model, x)


@torch.no_grad()
def steps(model: ViT, x: Tensor) -> Iterator[Step]:
    """Yield every step of Eqs. 1-4 for one image, with its tensor; the last one is the model's own answer.

    Args:
        model: a ViT in eval mode.
        x: pixels [1, C, H, W], normalised as the model's InputSpec says.
    """
    c, L = model.config, model.config.num_hidden_layers
    yield Step("", "the photo, as normalised pixels", x)
    flat = F.unfold(x, c.patch_size, stride=c.patch_size).mT  # [1, N, C P P]
    yield Step(
        "", f"cut into {x.shape[2] // c.patch_size} x {x.shape[3] // c.patch_size} patches, each flattened", flat
    )
    yield Step("Eq. 1", "x_p E: every patch projected to the model's width", model.patch_embedding(x)[0])
    z = model.embed(x)
    yield Step("Eq. 1", "z_0: the class token in front, positions added", z)
    yield Step("Eq. 6", "A: what each token of the first block looks at, per head", model.blocks[0].attention(z))
    for layer, block in enumerate(model.blocks, start=1):
        z = block.attend(z)
        if layer == 1:
            yield Step("Eq. 2", "z'_1 = MSA(LN(z_0)) + z_0", z)
        z = block.feed_forward(z)
        if layer in (1, L):
            yield Step("Eq. 3", f"z_{layer} = MLP(LN(z'_{layer})) + z'_{layer}", z)
    y = model.read(z)
    what = "the class token" if c.pool == "cls" else "the mean of the patches"
    yield Step("Eq. 4", f"y = LN(z_{L}^0): {what} sums up the photo", y)
    yield Step("", "logits: one number per class", model.classify(y))
