"""A new model by name."""

from __future__ import annotations

from typing import Any

from vitkit.model.config import InputSpec, variant
from vitkit.model.vit import ViT


def create(
    name: str = "vit-b/16", *, numerics: str | None = None, input_spec: InputSpec | None = None, **fields: Any
) -> ViT:
    """Create a new model with random weights.

    Args:
        name: a variant: `vit-b/16`, `ViT-Base`, or timm's `vit_base_patch16_224` (default: vit-b/16; see `vitkit
            models`).
        numerics: a row of NUMERICS; `google` gives the tanh GELU (default: the paper's).
        input_spec: how images are prepared for it (default: see `InputSpec.of`).
        fields: any field of ViTConfig, for a model of your own (hidden_size=256, num_hidden_layers=6, num_classes=3).
    """
    return ViT(variant(name, numerics=numerics, **fields), input_spec)
