"""Which vector is the feature: each against the model's own tokens."""

from __future__ import annotations

import pytest
import torch

from tests.features.samples import CONFIG, tiny
from vitkit.errors import ConfigError, InputError
from vitkit.features.choice import choose

X = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_each_choice_is_what_it_says() -> None:
    model = tiny(pre_logits=True, num_register_tokens=2)
    c, z = model.config, model.tokens(X)
    assert torch.allclose(choose("cls", c).of(model, X), z[:, 0], atol=1e-5)
    assert torch.equal(choose("mean", c).of(model, X), z[:, 3:].mean(1))
    y = torch.tanh(model.pre_logits(model.features(X)))
    assert torch.equal(choose("pre-logits", c).of(model, X), y)
    assert torch.equal(model.head(y), model(X))
    states = model.hidden_states(X)
    both = choose("layers:0,-1", c)
    assert (both.name, both.width) == ("layers:0,1", 64)
    assert torch.equal(both.of(model, X), torch.cat([model.norm(states[1][:, 0]), model.norm(states[2][:, 0])], 1))
    for name in ("cls", "mean", "pre-logits", "layers:1"):
        assert choose(name, c).of(model, X).shape == (3, choose(name, c).width)


@torch.no_grad()
@pytest.mark.parametrize("norm_after_pool", [False, True])
def test_models_that_pool_keep_their_own_way(norm_after_pool) -> None:
    model = tiny(pool="mean", norm_after_pool=norm_after_pool, class_token=False)
    assert choose(None, model.config).name == "mean"
    assert torch.equal(choose(None, model.config).of(model, X), model.features(X))
    last = choose("layers:-1", model.config)
    assert torch.allclose(last.of(model, X), model.norm(model.encode(X).mean(1)))


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("clas", ConfigError, "did you mean 'cls'"),
        ("layers:2", InputError, "between 0 and 1"),
        ("layers:", ConfigError, "layers:-2,-1"),
        ("pre-logits", ConfigError, "does not have"),
    ],
)
def test_what_there_is_not(text, error, words) -> None:
    with pytest.raises(error, match=words):
        choose(text, CONFIG)


def test_no_class_token() -> None:
    with pytest.raises(ConfigError, match="--features mean"):
        choose("cls", tiny(pool="mean", class_token=False).config)


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_scale": 0.3},
        {"num_register_tokens": 2},
        {"pool": "mean"},
        {"num_hidden_layers": 1},
        {"qkv_bias": False},
        {"image_size": (32, 48)},
        {"pruned_heads": ((1, (0,)),)},
        {"chunk_size_feed_forward": 3},
    ],
)
def test_the_short_way_through_the_last_block_is_exact(changes) -> None:
    """In float64, so that nothing but rounding could hide a difference."""
    model = tiny(**changes).double()
    x = torch.randn(2, 3, *model.config.image_hw, dtype=torch.float64)
    short = choose("cls", model.config).of(model, x)
    assert torch.allclose(short, model.tokens(x)[:, 0], rtol=1e-12, atol=1e-12)
