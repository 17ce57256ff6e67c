"""Names of answers: a head whose outputs are not classes has none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from vitkit import ViTConfig, create, predict
from vitkit.errors import InputError

TINY = ViTConfig(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    image_size=32,
    without_bias=("head",),
).to_dict(whole=True)


def test_a_projection_has_no_classes() -> None:
    """CLIP's projection is a head without a bias; its outputs are a point in the space of images and texts."""
    fields = {name: value for name, value in TINY.items() if name != "format"}
    photo = np.zeros((32, 32, 3), np.uint8)
    with pytest.raises(InputError, match="its outputs are not classes"):
        predict(create(**fields | {"num_classes": 512}), photo)
    named = create(**fields | {"num_classes": 2})
    named.input_spec = dataclasses.replace(named.input_spec, class_names=("cat", "dog"))
    assert {guess.name for guess in predict(named, photo)[0].guesses} == {"cat", "dog"}
