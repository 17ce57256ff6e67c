"""Dense features: maps of patch tokens, the cache's row for them, and CLIP's projected features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import tiny
from tests.peers import peer
from vitkit.checkpoints import from_dialect
from vitkit.data.base import Subset
from vitkit.data.sources import open_source
from vitkit.errors import ConfigError, InputError
from vitkit.features.cache import FeatureCache, space_of
from vitkit.features.choice import choose
from vitkit.features.embed import embed
from vitkit.features.head import Head, attach, check_attachable


@torch.no_grad()
def test_maps_are_the_patch_tokens_in_their_places() -> None:
    model = tiny.model(num_register_tokens=3)
    x = torch.randn(2, 3, 48, 32)
    found = model.maps(x, (0, -1))
    assert list(found) == [0, 1]
    assert {tuple(m.shape) for m in found.values()} == {(2, 32, 6, 4)}
    tokens = model.tokens(x)[:, 4:]
    assert torch.equal(found[1][:, :, 2, 3], tokens[:, 2 * 4 + 3])
    assert torch.equal(model.maps(x)[1], found[1])
    first = model.norm(model.hidden_states(x)[1])[:, 4:]
    assert torch.equal(found[0].flatten(2).mT, first)
    with pytest.raises(InputError, match="layers must lie between 0 and 1"):
        model.maps(x, 2)


@torch.no_grad()
def test_maps_equal_the_backbone_of_transformers() -> None:
    library = peer("transformers")
    config = library.Dinov2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        mlp_ratio=2,
        image_size=32,
        patch_size=8,
        out_indices=[1, 2],
    )
    theirs = library.Dinov2Backbone(config).eval()
    model = tiny.model(num_classes=0, layer_scale=1.0, layer_norm_eps=1e-6, position_resize="dinov2")
    model.load_state_dict(from_dialect(theirs.state_dict(), "dinov2-hf", model.config))
    x = torch.randn(2, 3, 32, 32)
    for ours, other in zip(model.maps(x, (0, 1)).values(), theirs(x).feature_maps, strict=True):
        assert tiny.difference(ours, other) <= 5e-6


def test_the_cache_holds_patches(tmp_path: Path) -> None:
    model = tiny.model(num_channels=1, image_size=8, patch_size=4, num_classes=0)
    source = Subset(open_source("digits", "test"), range(6))
    found = embed(model, source, FeatureCache(tmp_path), features="patches", workers=0)
    assert found.features.shape[1] == 4 * 32
    with torch.no_grad():
        x = torch.zeros(1, 1, 8, 8)
        row = choose("patches", model.config).of(model, x)[0]
        assert torch.equal(row.view(2, 2, 32).permute(2, 0, 1), model.maps(x)[1][0])


def test_a_probe_cannot_be_fitted_to_all_patches() -> None:
    with pytest.raises(ConfigError, match="export the patches with vitkit embed"):
        check_attachable(choose("patches", tiny.config()))


def test_projected_features() -> None:
    """A head on CLIP's projection becomes one head on its features; other projections are another space."""
    model, x = tiny.model(**tiny.CLIP), torch.randn(3, 3, 32, 32)
    choice = choose("projected", model.config)
    assert choice.width == 5
    with torch.no_grad():
        P = choice.of(model, x)
        assert torch.equal(P, model(x))
        rng = np.random.default_rng(0)
        head = Head(rng.normal(size=(4, 5)), rng.normal(size=4))
        fitted = attach(model, head, ("a", "b", "c", "d"), choice)
        expected = torch.from_numpy(head.logits(P.double().numpy()))
        assert tiny.difference(fitted(x).double(), expected) < 1e-5
    assert (fitted.config.num_classes, fitted.config.without_bias) == (4, ("patches",))
    other = tiny.model(**tiny.CLIP)
    with torch.no_grad():
        other.head.weight += 1
    assert space_of(model, choice) != space_of(other, choice)
    assert space_of(model, choose("cls", model.config)) == space_of(other, choose("cls", model.config))
    with pytest.raises(ConfigError, match="needs a projection"):
        choose("projected", tiny.config())
