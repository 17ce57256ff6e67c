"""A new model by name."""

from __future__ import annotations

from typing import Any

from vitkit.model.config import InputSpec, variant
from vitkit.model.vit import ViT


def create(name: str, *, numerics: str | None = None, input_spec: InputSpec | None = None, **overrides: Any) -> ViT:
    """Create a new model with random weights.

    Args:
        name: a variant: `vit-b/16`, `ViT-B/16`, or timm's `vit_base_patch16_224` (see `vitkit models`).
        numerics: a row of NUMERICS; `google` gives the tanh GELU.
        input_spec: what the model expects to be fed.
        overrides: any field of ViTConfig (num_classes=3, image_size=384, num_channels=1, ...).
    """
    return ViT(variant(name, numerics=numerics, **overrides), input_spec)
