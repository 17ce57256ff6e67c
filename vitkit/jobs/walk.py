"""A photo through Eqs. 1-4, one step at a time: what `vitkit demo` shows until a model has been trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitkit.data.samples import sample_photo
from vitkit.explain import draw
from vitkit.explain.patches import cut
from vitkit.model.create import create


@dataclass(frozen=True)
class Step:
    """One step of the walk: the equation, what it does, the shape that comes out."""

    equation: str
    words: str
    shape: tuple[int, ...]


def square_photo(name: str, size: tuple[int, int]) -> Image.Image:
    """One of scikit-learn's two photos (`china`, `flower`), its centre cut square and resized to (height, width)."""
    photo = sample_photo(name)
    side = min(photo.size)
    left, top = (photo.width - side) // 2, (photo.height - side) // 2
    return photo.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))


def walk(variant: str, out: Path, seed: int = 42) -> Iterator[Step | Path]:
    """Yield each step of one photo's way through a new model, and the picture of its patches.

    Args:
        variant: a row of VARIANTS.
        out: folder of the picture.
        seed: of the random weights.
    """
    torch.manual_seed(seed)
    model = create(variant).eval()
    c = model.config
    photo = np.asarray(square_photo("flower", c.image_hw))  # [H, W, C]
    parts = cut(photo, c.patch_size)
    yield draw.patches(photo, parts, out / "patches.png", f"What {variant} is fed: a sequence of patches")
    x = (torch.from_numpy(photo.copy()).permute(2, 0, 1)[None] / 255 - 0.5) / 0.5  # [1, C, H, W]
    yield Step("", "the photo, as pixels between -1 and 1", tuple(x.shape))
    yield Step(
        "",
        f"cut into {c.grid[0]} x {c.grid[1]} patches, each flattened",
        (1, c.num_patches, c.patch_size**2 * c.num_channels),
    )
    with torch.no_grad():
        z, _ = model.patch_embedding(x)
        yield Step("Eq. 1", "x_p E: every patch projected to the model's width", tuple(z.shape))
        z = model.embed(x)
        yield Step("Eq. 1", "z_0: class token in front, positions added", tuple(z.shape))
        A = model.attention(x, layers=0)[0]
        yield Step("Eq. 6", "A: who looks at whom in the first block, per head", tuple(A.shape))
        for layer, block in enumerate(model.blocks, start=1):
            z = block.msa(block.norm1(z)) + z
            if layer == 1:
                yield Step("Eq. 2", "z'_1 = MSA(LN(z_0)) + z_0", tuple(z.shape))
            z = block.mlp(block.norm2(z)) + z
            if layer in (1, c.num_hidden_layers):
                yield Step("Eq. 3", f"z_{layer} = MLP(LN(z'_{layer})) + z'_{layer}", tuple(z.shape))
        y = model.norm(z[:, 0])
        yield Step("Eq. 4", f"y = LN(z_{c.num_hidden_layers}^0): the class token sums the photo up", tuple(y.shape))
        yield Step("", "logits: one number a class", tuple(model.head(y).shape))
