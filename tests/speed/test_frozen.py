"""How a frozen model runs: the fused engine gives the plain model's features, and only where it computes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import vitkit
from vitkit.model.vit import ViT
from vitkit.speed import frozen
from vitkit.speed.frozen import FEW, FUSED, filled_up, way
from vitkit.speed.fused import Fused

SMALL = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def small(**changes: object) -> ViT:
    torch.manual_seed(0)
    model = vitkit.create("vit-ti/16", num_classes=5, intermediate_size=64, **SMALL | changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


@pytest.mark.parametrize(
    "changes",
    [{}, {"pool": "mean", "class_token": False}, {"pre_logits": True}, {"norm_after_pool": True, "pool": "mean"}],
)
def test_the_fused_engine_without_its_head_gives_features(changes: dict[str, object]) -> None:
    model = small(**changes)
    x = torch.randn(3, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(Fused(model, head=False)(x), model.features(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(Fused(model)(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_plain_model_runs_unless_the_engine_computes_the_same_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    assert way(model, "bf16", 5000).build is None  # on the CPU
    assert way(model, "bf16", 5000).name == "bf16"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert way(model, "bf16", 5000).name == way(model, "bf16", 5000, "cls").name == FUSED
    assert way(model, "bf16", 5000, "cls").build is not None
    assert way(model, "bf16", FEW).build is None  # starting it would take longer
    assert way(model, "fp32", 5000).name == "fp32"
    assert way(model, "fp16", 5000).build is None
    assert way(model, "bf16", 5000, "mean").build is None  # not what the model's own pool gives
    odd = ViT(replace(model.config, hidden_act="relu"))
    assert way(odd, "bf16", 5000).build is None
    assert way(object(), "bf16", 5000).build is None
    monkeypatch.setattr(frozen, "run_on", lambda device: False)
    assert way(model, "bf16", 5000).build is None  # without Triton, as on Windows


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_features_agree_with_fp32() -> None:
    model = small().cuda()
    x = torch.randn(16, 3, 32, 32, device="cuda")
    build = way(model, "bf16", 5000, "cls").build
    assert build is not None
    with torch.inference_mode():
        expected, found = model.features(x), build()(x)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_smaller_batch_is_filled_up() -> None:
    sizes: list[int] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return x * 2

    call = filled_up(run, 4)
    for count in (4, 3, 6):
        x = torch.arange(float(count))
        assert torch.equal(call(x), x * 2)
    assert sizes == [4, 4, 6]
