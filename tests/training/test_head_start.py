"""A head that starts from the probe: the same head, trained from there, resumed without fitting it again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import vitkit
from tests.training.test_loop import stop_at
from tests.training.tiny import CONFIG, SETTINGS, bytes_of, run, tiny
from vitkit.features.probe import fit
from vitkit.jobs import train as job
from vitkit.jobs.train import prepare

RECIPE = tiny(config=None, from_probe=True)


@pytest.fixture
def backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    return vitkit.save(vitkit.ViT(CONFIG), tmp_path / "backbone.safetensors")


def test_the_head_is_the_probes(tmp_path: Path, backbone: Path) -> None:
    ready = prepare("digits", tmp_path / "r", recipe=RECIPE, weights=backbone, settings=SETTINGS)
    model = vitkit.load(backbone)
    index = ready.train.indices.numpy()  # type: ignore[attr-defined]
    whole = vitkit.embed(model, "digits", cache=tmp_path / "cache", workers=0)["all"]
    X, y = whole.features[index], whole.labels[index]
    expected = fit("logistic", X, y, whole.class_names).head
    head = ready.model.head.state_dict()
    np.testing.assert_allclose(head["weight"].numpy(), expected.W, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(head["bias"].numpy(), expected.b, rtol=1e-5, atol=1e-6)
    changed = [
        name for name, value in ready.model.state_dict().items() if not torch.equal(value, model.state_dict()[name])
    ]
    assert set(changed) == {"head.weight", "head.bias"}


def test_a_resumed_run_does_not_fit_again(tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "whole", RECIPE, weights=backbone)
    run(tmp_path / "cut", RECIPE, weights=backbone, watch=stop_at(5))
    monkeypatch.setattr(job, "head_from_probe", None)
    run(tmp_path / "cut", RECIPE, weights=backbone, resume=True)
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "cut")


def test_a_model_of_ones_own_keeps_its_object(tmp_path: Path, backbone: Path) -> None:
    model = vitkit.load(backbone)
    head = model.head.weight.detach().clone()  # type: ignore[union-attr,operator]
    vitkit.train("digits", tmp_path / "r", model=model, recipe=RECIPE, report=False, progress=False, **SETTINGS)
    last = vitkit.load(f"{tmp_path / 'r'}@last")
    assert torch.equal(model.head.weight, last.head.weight)  # type: ignore[union-attr,arg-type]
    assert not torch.equal(model.head.weight, head)  # type: ignore[union-attr,arg-type]
