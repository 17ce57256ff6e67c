"""Every kind of part trains: the loss moves every parameter, and a run that was cut resumes to the same bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.families import FAMILIES
from tests.training.tiny import CONFIG, TINY, bytes_of, run
from vitkit import ViT, load
from vitkit.training.build import new_head

SETTINGS = {"evaluate_every": 10, "save_every": 1}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_trains_and_resumes(name: str, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, **FAMILIES[name])
    recipe = dataclasses.replace(TINY, config=config, batch_size=4, steps=2, epochs=None, warmup=0)
    run(tmp_path / "whole", recipe, settings=SETTINGS)

    class Cut(Exception):
        pass

    def cut(event: dict) -> None:
        if event["event"] == "step" and event["step"] == 2:
            raise Cut

    with pytest.raises(Cut):
        run(tmp_path / "cut", recipe, settings=SETTINGS, watch=cut)
    run(tmp_path / "cut", recipe, settings=SETTINGS, resume=True)
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")
    assert load(tmp_path / "whole").config.relative == config.relative


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_reach_every_parameter(name: str) -> None:
    model = ViT(dataclasses.replace(CONFIG, **FAMILIES[name])).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model(torch.randn(2, 1, 8, 8)).square().mean().backward()
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not still
    x, found = torch.randn(2, 1, 8, 8), []
    for model.gradient_checkpointing in (False, True):
        model.zero_grad()
        model(x).square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_a_new_head_has_the_form_of_the_pool() -> None:
    for name in ("deit", "sincos-shared", "siglip"):
        model = ViT(dataclasses.replace(CONFIG, **FAMILIES[name], without_bias=("head",)))
        new_head(model, ["a", "b", "c"], -2.0)
        assert torch.equal(model(torch.randn(2, 1, 8, 8)), torch.full((2, 3), -2.0))
        assert set(model.state_dict()) == set(ViT(model.config).state_dict())
