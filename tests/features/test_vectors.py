"""The table in docs/features.md that says which vector is which: each row against transformers."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

import vitkit
from tests.peers import peer
from vitkit.features import choose

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
ROWS = re.findall(r"^\| `([^`]+)` \| [^|]+ \| `((?:outputs|model|torch)\.[^`]+)` \|$", PAGE.read_text("utf-8"), re.M)


def test_the_table_has_every_kind_of_feature() -> None:
    assert [name for name, _ in ROWS] == ["cls", "mean", "pre-logits", "patches", "layers:-2", "layers:0,1"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A ViTModel of transformers with its pooler, and the same weights in vitkit."""
    transformers = peer("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViTConfig(image_size=32, patch_size=8, **sizes)
    theirs = transformers.ViTModel(config, add_pooling_layer=True).eval()
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("hf")
    theirs.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the preprocessing is unknown, and not needed
        return theirs, vitkit.load(folder)


@torch.no_grad()
@pytest.mark.parametrize(("name", "expression"), ROWS, ids=[name for name, _ in ROWS])
def test_each_row_is_what_transformers_gives(models, name, expression) -> None:
    model, ours = models
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    outputs = model(pixels, output_hidden_states=True)
    expected = eval(expression, {"torch": torch, "model": model, "outputs": outputs})
    assert torch.allclose(choose(name, ours.config).of(ours, pixels), expected, atol=1e-6)
    if name == "pre-logits":  # which is not what `features` gives
        assert not torch.allclose(ours.features(pixels), expected, atol=0.1)
        assert torch.allclose(ours.features(pixels), outputs.last_hidden_state[:, 0], atol=1e-6)
