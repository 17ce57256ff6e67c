"""E_pos at other sizes: the six rules against the libraries' own words for them, and a memory that is never stale."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.model.test_vit import pixels, tiny
from vitkit.errors import UnknownName
from vitkit.model.config import PositionRule
from vitkit.model.parts.positions import RULES, resize


def test_every_rule_of_the_config_exists() -> None:
    from typing import get_args

    assert set(get_args(PositionRule)) == set(RULES)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("new", [(24, 24), (14, 20), (7, 9)])
def test_rules_equal_their_definitions(rule: str, new: tuple[int, int]) -> None:
    from scipy.ndimage import zoom

    table = torch.randn(1, 1 + 14 * 14, 8)
    image = table[:, 1:].mT.unflatten(2, (14, 14))
    definition = {
        "google": lambda: torch.from_numpy(zoom(image[0].numpy(), (1, new[0] / 14, new[1] / 14), order=1))[None],
        "timm-npz": lambda: F.interpolate(image, new, mode="bilinear", align_corners=False),
        "timm": lambda: F.interpolate(image, new, mode="bicubic", antialias=True),
        "huggingface": lambda: F.interpolate(image, new, mode="bicubic", align_corners=False),
        "torchvision": lambda: F.interpolate(image, new, mode="bicubic", align_corners=True),
        "dinov2": lambda: F.interpolate(image, scale_factor=[(n + 0.1) / 14 for n in new], mode="bicubic"),
        "siglip2": lambda: F.interpolate(image, new, mode="bilinear", antialias=True),
    }[rule]()
    result = resize(table, (14, 14), new, rule)
    assert torch.equal(result[:, :1], table[:, :1])  # the class token's row
    assert torch.allclose(result[:, 1:], definition.flatten(2).mT, atol=5e-6)


def test_rules_differ() -> None:
    table = torch.randn(1, 17, 8)
    results = [torch.cat([resize(table, (4, 4), new, rule) for new in ((7, 7), (3, 3))], dim=1) for rule in RULES]
    assert all(not torch.allclose(a, b, atol=1e-3) for i, a in enumerate(results) for b in results[:i])


def test_a_size_of_its_own_is_untouched() -> None:
    table = torch.randn(1, 17, 8)
    assert all(resize(table, (4, 4), (4, 4), rule) is table for rule in RULES)


def test_half_precision_keeps_its_type() -> None:
    assert resize(torch.randn(1, 17, 8).bfloat16(), (4, 4), (5, 6), "timm").dtype == torch.bfloat16


def test_unknown_rule() -> None:
    with pytest.raises(UnknownName, match="did you mean 'google'"):
        resize(torch.zeros(1, 17, 8), (4, 4), (5, 5), "googel")


def test_remembered_size_is_the_live_one() -> None:
    model, x = tiny(), pixels(1, 3, 48, 40)
    with torch.no_grad():
        live = model(x)
        model.remember_size((48, 40))
        assert (6, 5) in model.positions._kept
        assert torch.equal(model(x), live)


@pytest.mark.parametrize("change", ["in place", "load", "train", "data type", "data"])
def test_remembered_size_is_never_stale(change: str) -> None:
    model, other, x = tiny(), tiny(), pixels(1, 3, 48, 40)
    model.remember_size((48, 40))
    with torch.no_grad():
        before = model(x)
        if change == "in place":
            model.positions.table.mul_(2)
        elif change == "load":
            model.load_state_dict(other.state_dict())
        elif change == "train":
            model.train()
            model.positions.table.data.mul_(2)
            model.eval()
        elif change == "data type":
            model.double()
            x = x.double()
        else:
            model.positions.table = nn.Parameter(model.positions.table * 2)
        after = model(x)
        kept = dict(model.positions._kept)
        model.positions._kept.clear()
        assert torch.equal(after, model(x)), kept
    if change != "data type":
        assert not torch.equal(before, after)


def test_remember_inside_inference_mode_then_train() -> None:
    model, x = tiny(), pixels(1, 3, 48, 40)
    with torch.inference_mode():
        model.remember_size((48, 40))
        model(x)
    model.train()
    model(x).sum().backward()
    assert model.positions.table.grad.abs().sum() > 0


def test_gradients_reach_the_trained_table_at_another_size() -> None:
    model, x = tiny(), pixels(1, 3, 48, 40)
    model.remember_size((48, 40))
    model(x).sum().backward()  # in eval mode too: a remembered table would cut the gradient
    assert model.positions.table.grad.abs().sum() > 0


def test_set_image_size_is_what_forward_did_live() -> None:
    model, x = tiny(position_resize="timm"), pixels(1, 3, 48, 40)
    live = model(x)
    model.set_image_size((48, 40))
    assert model.config.image_size == model.input_spec.size == (48, 40)
    assert model.positions.table.shape == (1, 31, 32)
    assert model.positions.table.requires_grad
    assert torch.allclose(model(x), live, atol=1e-5)
    again = type(model)(model.config)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(x), model(x))
