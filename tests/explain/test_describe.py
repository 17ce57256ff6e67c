"""Rows of `describe`, drawings, and patches."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from vitkit import ViTConfig
from vitkit.errors import InputError
from vitkit.explain.describe import describe
from vitkit.explain.diagram import DIAGRAMS
from vitkit.explain.patches import cut
from vitkit.model.config import VARIANTS
from vitkit.model.count import parameters

ODD = ViTConfig(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=100,
    image_size=(64, 32),
    patch_size=8,
    num_channels=1,
    num_classes=0,
    num_register_tokens=2,
    pre_logits=True,
)


def test_rows_follow_an_image() -> None:
    rows = {row.name: row for row in describe(VARIANTS["vit-b/16"], batch=2)}
    assert rows[""].parameters == parameters(VARIANTS["vit-b/16"])
    assert rows["patch_embedding"].output == (2, 196, 768)
    assert rows["blocks.11.mlp.fc1"].output == (2, 197, 3072)
    assert rows["head"].input == (2, 768)
    names = list(rows)
    assert names.index("blocks.0.msa") < names.index("blocks.0.norm2") < names.index("blocks.1")
    leaves = [row for row in rows.values() if not any(name.startswith(row.name + ".") for name in names) and row.name]
    assert sum(row.parameters for row in leaves) + 768 == rows[""].parameters  # and the class token


@pytest.mark.parametrize("config", [VARIANTS["vit-b/16"], ODD], ids=["b/16", "odd"])
@pytest.mark.parametrize("diagram", DIAGRAMS)
def test_drawings_are_svg_with_the_models_own_shapes(diagram: str, config: ViTConfig) -> None:
    drawing = DIAGRAMS[diagram](config)
    words = " ".join(node.text or "" for node in ElementTree.fromstring(drawing).iter())
    assert str(config.num_prefix_tokens + config.num_patches) in words
    assert str(config.intermediate_size) in words


def test_cut_is_row_by_row() -> None:
    image = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
    parts = cut(image, 2)
    assert parts.shape == (3, 2, 2, 2, 3)
    assert np.array_equal(parts[2, 1], image[4:6, 2:4])
    with pytest.raises(InputError, match="multiples of the patch size 4; got 6 x 4"):
        cut(image, 4)
