"""Products by oneDNN are torch's, with gradients; they run where they should and nowhere else."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vitkit
from tests.model.test_vit import pixels
from tests.model.test_vit import tiny as tiny_model
from tests.speed.test_fused import KINDS, relative
from tests.training.tiny import apart, run, tiny
from vitkit import cpu_features, cpu_products
from vitkit.cpu_products import fp32_products, linear, linear_gelu
from vitkit.features import choose
from vitkit.features.embed import forward
from vitkit.runtime import Runtime
from vitkit.speed.frozen import Way
from vitkit.speed.fused import Fused, OneDNN

CPUINFO = "processor\t: 0\nvendor_id\t: {}\ncpu family\t: 26\nflags\t\t: fpu avx512f\n"


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A CPU on which oneDNN computes every product; returns the shapes of those that it computed."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this build of torch has no oneDNN")
    computed: list[tuple[int, ...]] = []
    plain = cpu_products._by_onednn

    def by_onednn(x: torch.Tensor, W: torch.Tensor, *how: object) -> torch.Tensor:
        computed.append((*x.shape, len(W)))
        return plain(x, W, *how)

    monkeypatch.setattr(cpu_products, "onednn_is_wider", lambda: True)
    monkeypatch.setattr(cpu_products, "LEAST", 0)
    monkeypatch.setattr(cpu_products, "ROWS", 0)
    monkeypatch.setattr(cpu_products, "_by_onednn", by_onednn)
    return computed


def inputs() -> dict[str, torch.Tensor]:
    x = torch.randn(6, 5, 24)
    return {"matrix": x[0], "batch": x, "rows far apart": x[:, 0], "turned": torch.randn(24, 7).mT}


@pytest.mark.parametrize("name", inputs())
@pytest.mark.parametrize("biased", [True, False])
def test_results_and_gradients_are_those_of_torch(wide, name, biased) -> None:
    x, W = inputs()[name].requires_grad_(), torch.randn(40, 24)[8:].requires_grad_()
    bias = torch.randn(32, requires_grad=True) if biased else None
    found = []
    for by in (linear, F.linear):
        y = by(x, W, bias)
        given = [t for t in (x, W, bias) if t is not None]
        torch.manual_seed(0)
        found.append([y, *torch.autograd.grad((y * torch.randn_like(y)).sum(), given)])
    for mine, torchs in zip(*found, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=1e-5)
    assert len(wide) == 3
    with torch.no_grad():
        torch.testing.assert_close(linear(x, W, bias), F.linear(x, W, bias), rtol=1e-5, atol=1e-5)
    assert len(wide) == 4


def test_frozen_weights_get_no_gradient(wide) -> None:
    x, W, bias = torch.randn(5, 24, requires_grad=True), torch.randn(32, 24), torch.randn(32)
    linear(x, W, bias).sum().backward()
    assert x.grad is not None
    assert len(wide) == 2  # the result, and one gradient
    W.requires_grad_()
    linear(x.detach(), W, bias).sum().backward()
    assert len(wide) == 4


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_part_of_the_product(wide, approximate, monkeypatch) -> None:
    x, W, bias = torch.randn(9, 24), torch.randn(32, 24), torch.randn(32)
    want = F.gelu(F.linear(x, W, bias), approximate=approximate)
    torch.testing.assert_close(linear_gelu(x, W, bias, approximate), want, rtol=1e-5, atol=1e-5)
    assert len(wide) == 1
    monkeypatch.setattr(cpu_products, "onednn_is_wider", lambda: False)
    assert torch.equal(linear_gelu(x, W, bias, approximate), want)
    assert len(wide) == 1


class Special(torch.Tensor):
    """A kind of tensor of its own, as sharded parameters are."""


def test_everything_else_is_left_to_torch(wide, monkeypatch) -> None:
    x, W = torch.randn(9, 24), torch.randn(32, 24)
    for a, b in ((x.double(), W.double()), (x.bfloat16(), W.bfloat16()), (x.to("meta"), W.to("meta"))):
        assert linear(a, b).shape == (9, 32)
    assert linear(x.as_subclass(Special), W).shape == (9, 32)
    monkeypatch.setattr(cpu_products, "LEAST", 9 * 24 * 32 + 1)
    assert torch.equal(linear(x, W), F.linear(x, W))
    monkeypatch.setattr(cpu_products, "LEAST", 9 * 24 * 32)
    monkeypatch.setattr(cpu_products, "ROWS", 10)
    assert torch.equal(linear(x, W), F.linear(x, W))
    assert not wide
    monkeypatch.setattr(cpu_products, "ROWS", 9)
    linear(x, W)
    assert len(wide) == 1


def test_a_context_changes_linear_layers_of_its_thread(wide, monkeypatch) -> None:
    layer, x, elsewhere = nn.Linear(24, 32), torch.randn(9, 24), []
    with fp32_products("cuda"):
        layer(x)
    assert not wide
    with fp32_products("cpu"), torch.no_grad():
        layer(x)
        assert len(wide) == 1
        thread = threading.Thread(target=lambda: elsewhere.append(layer(x)))
        thread.start()
        thread.join()
        torch.relu(x)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        layer(x)  # a compiler chooses its own products
    layer(x)
    assert len(wide) == 1
    torch.testing.assert_close(elsewhere[0], layer(x))


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_the_fused_engine_equals_the_plain_model(wide, changes) -> None:
    model = tiny_model(**changes)
    x = pixels(3, model.config.num_channels, 32, 32)
    engine = Fused(model)
    assert {type(by) for by in engine.plain} == {OneDNN}
    with torch.no_grad():
        want = model(x)
        assert not wide
        assert relative(engine(x), want) < 5e-6
    assert len(wide) >= 4 * len(engine.layers)
    assert {type(by) for by in Fused(model, dtype=torch.bfloat16).plain} != {OneDNN}


def test_a_run_ends_with_the_weights_of_torchs_products(wide, tmp_path: Path, monkeypatch) -> None:
    run(tmp_path / "onednn", tiny(steps=6))
    assert len(wide) > 6 * 2 * 4 * 3  # steps, blocks, layers, and two gradients for each
    count = len(wide)
    run(tmp_path / "recomputed", tiny(steps=6), settings={"checkpointing": True})  # outside of such a context
    assert len(wide) == count
    monkeypatch.setattr(cpu_products, "onednn_is_wider", lambda: False)
    run(tmp_path / "torch", tiny(steps=6))
    assert len(wide) == count
    for name in ("onednn", "recomputed"):
        assert apart(tmp_path / name, tmp_path / "torch") < 1e-5


def test_the_runtime_uses_it_in_fp32_alone(wide) -> None:
    layer, x = nn.Linear(24, 32), torch.randn(9, 24)
    with torch.no_grad():
        with Runtime("cpu", "fp32").autocast():
            layer(x)
        assert len(wide) == 1
        with Runtime("cpu", "bf16").autocast():
            assert layer(x).dtype == torch.bfloat16
    assert len(wide) == 1


def test_predictions_and_features_use_it_too(wide) -> None:
    model, photo = tiny_model(), np.zeros((40, 40, 3), np.uint8)
    vitkit.predict(model, photo)
    assert len(wide) >= 4 * len(model.blocks)
    wide.clear()
    forward(model, choose(None, model.config), Way("fp32"), None)(pixels())
    assert len(wide) >= 4 * len(model.blocks)


@pytest.mark.parametrize(
    ("vendor", "capability", "mkl", "wider"),
    [
        ("AuthenticAMD", "AVX512", True, True),
        ("AuthenticAMD", "AVX512_VNNI", True, True),
        ("GenuineIntel", "AVX512", True, False),  # MKL uses it too
        ("AuthenticAMD", "AVX2", True, False),
        ("AuthenticAMD", "AVX512", False, False),
        ("", "AVX512", True, False),
    ],
)
def test_where_onednn_is_wider(vendor, capability, mkl, wider, monkeypatch) -> None:
    monkeypatch.setattr(cpu_products, "vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        assert cpu_products.onednn_is_wider.__wrapped__() == wider


def test_vendors(monkeypatch) -> None:
    for name in ("GenuineIntel", "AuthenticAMD", "HygonGenuine"):
        monkeypatch.setattr(cpu_features, "_cpuinfo", lambda name=name: CPUINFO.format(name))
        assert cpu_features.vendor() == name
    monkeypatch.setattr(cpu_features, "_cpuinfo", lambda: "")
    for text, name in (
        ("AMD64 Family 25 Model 33 Stepping 2, AuthenticAMD", "AuthenticAMD"),  # Windows
        ("Intel64 Family 6 Model 154 Stepping 3, GenuineIntel", "GenuineIntel"),
        ("arm", ""),
        ("", ""),
    ):
        monkeypatch.setattr(cpu_features.platform, "processor", lambda text=text: text)
        assert cpu_features.vendor() == name
