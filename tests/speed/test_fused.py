"""The fused engines compute what the plain model computes. Their algebra is tested here, without a CUDA device, where
the kernels' plain versions run; benchmarks/check.py holds the kernels themselves to the plain model on a device."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
import threading
import types
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend

import vitkit
from tests.model.test_vit import pixels, tiny
from vitkit.errors import ConfigError, InputError
from vitkit.speed import choices, cublas, fused, kernels, training
from vitkit.speed.differentiable import MLP, AttendFirst, mlp
from vitkit.speed.differentiable.attention import rest
from vitkit.speed.differentiable.products import bound, small_product
from vitkit.speed.dropping import Dropout, kept
from vitkit.speed.engines import ENGINES
from vitkit.speed.fp8 import Fp8
from vitkit.speed.fused import Fused
from vitkit.speed.kernels import (
    FP8,
    FP8_MAX,
    add_norm,
    attends_by,
    first_of,
    linear_int8,
    rows_to_fp8,
    run_on,
    to_int8,
)
from vitkit.speed.training import TrainingForward, dropouts, fused_forward, refuse_fp8

KINDS = {
    "paper": {},
    "all extras": {"layer_scale": 0.5, "num_register_tokens": 2, "pre_logits": True},
    "mean": {"pool": "mean"},
    "mean then norm": {"pool": "mean", "norm_after_pool": True},
    "no class token": {"pool": "mean", "class_token": False},
    "no qkv bias, no head": {"qkv_bias": False, "num_classes": 0},
    "pruned": {"pruned_heads": {0: [1], 1: [0, 2]}},
    "tanh, gray": {"hidden_act": "gelu_tanh", "num_channels": 1},
    "padded": {"pad_input": True, "image_size": 30},
}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def kernels_of_torch() -> list[bool]:
    """Which kernels torch may choose for attention, in this process."""
    cuda = torch.backends.cuda
    return [
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    ]


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    there = {"triton"} if triton else set()
    monkeypatch.setattr(kernels, "find_spec", lambda name: object() if name in there else None)


def test_choosing_a_kernel_leaves_the_order_that_torch_settles_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch settles on an order in its first attention on CUDA; the stand-in does so too."""
    before, attention, own = torch._C._get_sdp_priority_order(), F.scaled_dot_product_attention, [3, 1, 2, 0, 4]
    own, settled = own[: len(before)], []

    def settling(*args: torch.Tensor) -> torch.Tensor:
        if not settled:
            settled.append(True)
            torch._C._set_sdp_priority_order(own)
        return attention(*args)

    cpu = lambda *shape, device, **how: torch.zeros_like(torch.empty(*shape))  # noqa: E731
    monkeypatch.setattr(kernels.torch, "zeros", cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", settling)
    kernels.settle_order.cache_clear()
    try:
        with first_of(SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            settling(*torch.randn(3, 1, 1, 8, 64))
        assert torch._C._get_sdp_priority_order() == own
    finally:
        kernels.settle_order.cache_clear()
        torch._C._set_sdp_priority_order(before)


def test_a_kernel_that_does_not_take_the_tensors_is_told_apart() -> None:
    q, k, v = torch.randn(3, 2, 2, 8, 16)
    assert attends_by(SDPBackend.FLASH_ATTENTION, q, k, v)
    assert not attends_by(SDPBackend.CUDNN_ATTENTION, q, k, v)  # the CPU has none


def test_on_the_cpu_an_engine_leaves_other_threads_their_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernels torch may choose holds for the process, and the CPU has only one to choose."""
    before, during, attention = kernels_of_torch(), [], F.scaled_dot_product_attention

    def observed(*args: torch.Tensor) -> torch.Tensor:
        during.append(kernels_of_torch())
        return attention(*args)

    monkeypatch.setattr(F, "scaled_dot_product_attention", observed)
    Fused(tiny())(pixels(2, 3, 32, 32))
    assert during == [before] * len(tiny().blocks)


def test_two_threads_that_choose_a_kernel_restore_what_there_was() -> None:
    before, inside, leave, done = kernels_of_torch(), threading.Event(), threading.Event(), []

    def first() -> None:
        with first_of(SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
            inside.set()
            leave.wait(30)
            done.append(kernels_of_torch())

    def second() -> None:
        with first_of(SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            done.append(kernels_of_torch())

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    threads[1].join(0.2)  # long enough to enter, if nothing stopped it
    leave.set()
    for thread in threads:
        thread.join(30)
    assert done == [[False, False, True, True], [True, False, False, True]]
    assert kernels_of_torch() == before


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_batch_of_many_rows_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first axis of a grid takes 2^31 programs, the others 65,535."""
    from vitkit.speed import triton_training

    grids = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]):
            grids.append(grid)
            return lambda *args, **how: None

    monkeypatch.setattr(mlp, "by_triton", lambda x: True)
    monkeypatch.setattr(mlp, "sum_rows", lambda x: x[0])
    for name in ("gelu_forward", "gelu_backward"):
        monkeypatch.setattr(triton_training, name, Recorder())
    h = torch.empty(4096 * 257, 8)  # the paper's batch of images with 256 patches
    mlp.gelu(h, False, None)
    mlp.gelu_gradient(h, h, False, None)
    assert len(grids) == 2
    assert all(grid[0] < 2**31 and max(grid[1:], default=1) <= 65_535 for grid in grids)


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("size", [(2, 32, 32), (3, 48, 40), (1, 24, 32)])
def test_fused_equals_plain(changes, size) -> None:
    model = tiny(**changes)
    x = pixels(size[0], model.config.num_channels, *size[1:])
    with torch.no_grad():
        assert relative(Fused(model)(x), model(x)) < 5e-6


@pytest.mark.parametrize("name", KINDS)
def test_fused_training_equals_plain_with_gradients(name) -> None:
    model = tiny(num_hidden_layers=3, drop_path_rate=0.4, **KINDS[name]).train()
    x = pixels(5, model.config.num_channels, 32, 32)
    found = []
    for forward in (lambda x: model(x), lambda x: fused_forward(model, x)):
        model.zero_grad()
        torch.manual_seed(3)  # the same branches are left out
        logits = forward(x)
        (logits.square().mean() + logits[0].sum()).backward()
        found.append([logits.detach()] + [p.grad.clone() for p in model.parameters()])
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert relative(mine, theirs) < 1e-4


def dropping_alike(model: nn.Module) -> None:
    """Make the plain model drop what the fused one drops after the same seed."""

    class Alike(nn.Module):
        def __init__(self, drops: list) -> None:
            super().__init__()
            self.drops = drops

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drops.pop(0)(x.flatten(0, -2)).view(x.shape)

    drops: list = list(dropouts(model, torch.device("cpu")))
    model.dropout = Alike(drops)
    for block in model.blocks:
        block.msa.dropout = block.mlp.dropout = model.dropout


@pytest.mark.parametrize("name", ["paper", "all extras", "mean"])
def test_fused_dropout_equals_the_plain_model_with_the_same_masks(name) -> None:
    c = {"num_hidden_layers": 3, "hidden_dropout_prob": 0.3, **KINDS[name]}
    model, found = tiny(**c).train(), []
    x = pixels(5, 3, 32, 32)
    torch.manual_seed(3)
    fused = fused_forward(model, x)
    other = copy.deepcopy(model)
    torch.manual_seed(3)
    dropping_alike(other)
    for one, logits in ((model, fused), (other, other(x))):
        (logits.square().mean() + logits[0].sum()).backward()
        found.append([logits.detach()] + [p.grad for p in one.parameters()])
    assert not other.dropout.drops  # every place has dropped
    for mine, theirs in zip(*found, strict=True):
        assert relative(mine, theirs) < 1e-4


def test_a_step_drops_the_same_again_and_another_step_something_else() -> None:
    model, x = tiny(hidden_dropout_prob=0.3).train(), pixels(2, 3, 32, 32)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(fused_forward(model, x))
    assert torch.equal(found[0], found[1])
    assert relative(found[2], found[0]) > 1e-3
    model.eval()
    assert torch.equal(fused_forward(model, x), fused_forward(model, x))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_dropout_drops_its_share_of_every_row_and_column_independently(rate) -> None:
    M, N = 500, 400
    keys = torch.randint(-(2**31), 2**31, (8, 2), generator=torch.Generator().manual_seed(4)).int()
    lost = torch.stack([~kept(key, M, N, rate) for key in keys]).double() - rate
    deviation = (rate * (1 - rate)) ** 0.5
    for count, mean in ((M * N, lost.mean((1, 2))), (N, lost.mean(2)), (M, lost.mean(1))):
        assert (mean.abs() * count**0.5 / deviation).max() < 5  # in standard errors, of at most 4,000 means
    scaled = lost / deviation
    for name, a, b in (
        ("neighbours in a row", scaled[:, :, 1:], scaled[:, :, :-1]),
        ("neighbours in a column", scaled[:, 1:], scaled[:, :-1]),
        ("halves", scaled[:, : M // 2], scaled[:, M // 2 :]),
        ("keys", scaled[1:], scaled[:-1]),
    ):
        assert ((a * b).mean((1, 2)) * a[0].numel() ** 0.5).abs().max() < 4.5, name


def test_dropout_of_everything_and_of_nothing() -> None:
    x, key = torch.randn(3, 5), torch.tensor([1, 2], dtype=torch.int32)
    assert torch.equal(Dropout(key, 0.0)(x), x)
    assert torch.equal(Dropout(key, 1.0)(x), torch.zeros(3, 5))


@pytest.mark.parametrize("changes", [{}, {"layer_scale": 0.5}, {"hidden_dropout_prob": 0.3}])
def test_in_a_run_that_keeps_its_choices_products_are_chosen_ones(changes, monkeypatch, tmp_path) -> None:
    """Stand-ins for cublas.py that compute what it documents, and not by what else it is given."""
    asked = []

    def product(x, W):
        asked.append("product")
        return x @ W

    def linear(x, W, bias):
        asked.append("linear")
        return x @ W + bias

    def linear_gelu(x, W, bias, otherwise):
        asked.append("linear_gelu")
        h = x @ W + bias
        return nn.functional.gelu(h, approximate="tanh"), h

    def product_dgelu(x, W, h, otherwise):
        asked.append("product_dgelu")
        dh = torch.ops.aten.gelu_backward(x @ W, h, approximate="tanh")
        return dh, dh.sum(0)

    for stand_in in (product, linear, linear_gelu, product_dgelu):
        monkeypatch.setattr(cublas, stand_in.__name__, stand_in)
    model = tiny(num_hidden_layers=3, hidden_act="gelu_tanh", **changes).train()
    found, calls = [], []
    for context in (nullcontext(), choices.pinned(tmp_path / "kernels.json")):
        asked.clear()
        model.zero_grad()
        torch.manual_seed(3)
        with context:
            logits = fused_forward(model, pixels(5, 3, 32, 32))
            (logits.square().mean() + logits[0].sum()).backward()
        found.append([logits.detach()] + [p.grad.clone() for p in model.parameters()])
        calls.append({name: asked.count(name) for name in asked})
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert relative(mine, theirs) < 1e-4
    assert calls[0] == {}
    # Three MLPs; qkv of three blocks, of which the last has q apart; six layers without a bias, and their inputs'.
    fused = {"linear_gelu": 3, "product_dgelu": 3, "linear": 4, "product": 6 + 7 + 3}
    assert calls[1] == ({"linear": 7, "product": 6 + 7 + 6} if "hidden_dropout_prob" in changes else fused)


# The plain model draws numbers for one query of its last block if it has a class token, the fused one for all.
@pytest.mark.parametrize(("pool", "rate"), [("mean", 0.3), ("cls", 1e-12)])
def test_dropout_of_attention_drops_what_the_plain_model_drops(pool, rate) -> None:
    model, x = tiny(num_hidden_layers=3, pool=pool, attention_probs_dropout_prob=rate).train(), pixels(4, 3, 32, 32)
    found = []
    for forward in (lambda x: model(x), lambda x: fused_forward(model, x)):
        model.zero_grad()
        torch.manual_seed(3)
        logits = forward(x)
        (logits.square().mean() + logits[0].sum()).backward()
        found.append([logits.detach()] + [p.grad.clone() for p in model.parameters()])
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert relative(mine, theirs) < 1e-4


def test_the_last_block_computes_the_query_of_the_class_token_alone(monkeypatch) -> None:
    rows, apply = [], AttendFirst.apply

    def remember(*arguments):
        rows.append(len(sa := apply(*arguments)))
        return sa

    monkeypatch.setattr(AttendFirst, "apply", remember)
    for changes in ({}, {"pool": "mean"}):
        fused_forward(tiny(num_hidden_layers=3, **changes).train(), pixels(2, 3, 32, 32))
    assert rows == [2]


def test_the_rest_of_the_keys_is_the_smallest_step_that_covers_it() -> None:
    assert [rest(T, 64) for T in (64, 128, 65, 80, 81, 96, 97, 127, 197, 256)] == [0, 0, 16, 16, 32, 32, 0, 0, 16, 0]


def test_frozen_weights_get_no_gradient_and_the_others_theirs() -> None:
    model = tiny(num_hidden_layers=3).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(("qkv.weight", "fc1.weight", "projection.weight", "out.weight")))
    x, found = pixels(3, 3, 32, 32), []
    for forward in (lambda x: model(x), lambda x: fused_forward(model, x)):
        model.zero_grad()
        forward(x).square().mean().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, theirs in found[0].items():
        mine = found[1][name]
        assert (mine is None) == (theirs is None), name
        assert theirs is None or relative(mine, theirs) < 1e-4


@pytest.mark.parametrize("changes", [{}, {"hidden_dropout_prob": 0.3, "layer_scale": 0.1}])
def test_fp8_training_is_close_with_gradients(changes) -> None:
    model = tiny(hidden_size=64, intermediate_size=128, num_hidden_layers=3, **changes).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    x, found = pixels(6, 3, 32, 32), []
    for fp8 in (False, True):
        model.zero_grad()
        torch.manual_seed(3)
        logits = fused_forward(model, x, fp8)
        logits.square().mean().backward()
        found.append((logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (plain, straight), (small, through) = found
    assert 1e-4 < ((small - plain).norm() / plain.norm()).item() < 0.1
    assert nn.functional.cosine_similarity(straight, through, dim=0) > 0.99


@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0, 300.0])
def test_bounds_of_fp8_hold(size) -> None:
    x, W, b = torch.randn(7, 48) * size, torch.randn(96, 48), torch.randn(96)
    x[3] = W.sign()[W.abs().sum(1).argmax()] * size  # the worst row that there can be
    small, lengths = rows_to_fp8(x), torch.empty(96)
    for bias, larger in ((b, 1.0), (None, 1.13)):  # GELU(y), and a gradient times GELU' <= 1.13
        y = small_product(small, W, bias, lengths)
        scales = bound(small[1], lengths, bias)
        assert (scales > 0).all()
        assert (larger * y.abs().amax(1) <= FP8_MAX * scales * (1 + 1e-6)).all()


def test_fp8_training_of_zeros_is_finite() -> None:
    u, W1, W2 = (torch.zeros(shape, requires_grad=True) for shape in ((32, 16), (64, 16), (16, 64)))
    b1 = torch.zeros(64, requires_grad=True)
    y = MLP.apply(u, W1, b1, W2, False, None, None, *rows_to_fp8(u.detach()))
    y.sum().backward()
    assert y.isfinite().all()
    assert all(t.grad.isfinite().all() for t in (u, W1, b1, W2))


@pytest.mark.parametrize(
    ("changes", "device", "why"),
    [
        ({}, "cpu", "a CUDA device; got cpu"),
        ({"relative": "offsets"}, "cuda", "a model without relative=offsets"),
        ({"hidden_size": 40}, "cuda", "widths that are multiples of 16"),
    ],
)
def test_fp8_training_is_refused_where_it_cannot_run(changes, device, why, monkeypatch) -> None:
    on_a_gpu(monkeypatch, (9, 0), True)
    with pytest.raises(ConfigError, match=f"--precision fp8 needs {why}. Use --precision bf16"):
        refuse_fp8(tiny(**changes).config, torch.device(device))


@pytest.mark.parametrize(
    ("capability", "triton", "checkpointing", "why"),
    [
        ((8, 0), True, False, "Triton and a GPU of compute capability 8.9 or more"),  # A100: no fp8 products
        ((9, 0), False, False, "Triton and a GPU of compute capability 8.9 or more"),
        ((9, 0), True, True, "--no-checkpointing"),
    ],
)
def test_fp8_training_is_refused_where_bf16_would_run_in_its_place(
    capability, triton, checkpointing, why, monkeypatch
) -> None:
    on_a_gpu(monkeypatch, capability, triton)
    with pytest.raises(ConfigError, match=f"--precision fp8 needs {why}. Use --precision bf16"):
        refuse_fp8(tiny().config, torch.device("cuda"), checkpointing)
    on_a_gpu(monkeypatch, (8, 9), True)
    refuse_fp8(tiny().config, torch.device("cuda"))


@pytest.mark.parametrize(("capability", "triton", "runs"), [((9, 0), True, True), ((9, 0), False, False),
                                                            ((7, 5), True, False), ((8, 0), True, True)])  # fmt: skip
def test_kernels_run_where_triton_is_and_the_gpu_has_bf16(capability, triton, runs, monkeypatch) -> None:
    on_a_gpu(monkeypatch, capability, triton)
    assert run_on(torch.device("cuda")) is runs
    assert run_on(torch.device("cpu"))


def test_the_engine_says_that_it_cannot_run_on_this_gpu(monkeypatch) -> None:
    monkeypatch.setattr(fused, "run_on", lambda device: False)
    with pytest.raises(
        ConfigError, match=r"need Triton and a GPU of compute capability 8\.0 or more\. Use --engine torch"
    ):
        Fused(tiny())


def test_an_engine_runs_on_the_device_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels and graphs run on the current device, whichever that is in the calling thread."""
    engine, x, entered = Fused(tiny()), pixels(2, 3, 32, 32), []
    want = engine(x)

    @contextmanager
    def device(which: torch.device):
        entered.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(fused, "validate_and_pad", lambda x, c: types.SimpleNamespace(to=lambda device: x))
    monkeypatch.setattr(engine, "device", torch.device("cuda:1"))
    assert torch.equal(engine(x), want)
    assert entered == [torch.device("cuda:1")]


def test_lean_records_anew_only_for_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class OnTheCpu:
        def __init__(self, module: nn.Module, x: torch.Tensor) -> None:
            self.module, self.x = module, torch.zeros_like(x)
            made.append(len(x))

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    monkeypatch.setattr("vitkit.speed.training.GraphedStep", OnTheCpu)
    monkeypatch.setattr("vitkit.speed.training.fusible", lambda *_: True)
    model = tiny().train()
    wrapped = TrainingForward(model, graph=True)
    for count in (2, 2, 3, 2):
        x = pixels(count, 3, 32, 32)
        assert relative(wrapped(x), model(x)) < 5e-6
    assert made == [2, 3, 2]
    model.eval()
    wrapped(pixels(4, 3, 32, 32))
    assert made == [2, 3, 2]  # only a step of training is worth a CUDA graph


@pytest.mark.parametrize("changes", [KINDS[name] for name in ("paper", "all extras", "mean")])
@pytest.mark.parametrize("full", [0, 2, None])
def test_fp8_is_close(changes, full) -> None:
    model = tiny(hidden_size=64, intermediate_size=128, num_hidden_layers=3, **changes)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = pixels(4, 3, 32, 32)
    with torch.no_grad():
        plain, small = model(x), Fp8(model, full=full)(x)
    assert 1e-5 < ((small - plain).norm() / plain.norm()).item() < ENGINES["fp8"].tolerance


def test_fp8_runs_in_full_where_that_is_faster_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = tiny(hidden_size=64, intermediate_size=128), pixels()
    engine, asked = Fp8(model), []
    monkeypatch.setattr(engine, "pays", lambda x: asked.append(len(x)) or len(x) > 2)
    with pytest.warns(UserWarning, match="For 2 images of 32 x 32 pixels, bf16 is faster here than 8 bits"):
        assert torch.equal(engine(x[:2]), Fused(model)(x[:2]))
    more = pixels(3, 3, 32, 32)
    assert not torch.equal(engine(more), Fused(model)(more))
    assert torch.equal(engine(x[:2]), Fused(model)(x[:2]))  # the choice is kept
    assert asked == [2, 3]


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_fp8_keeps_the_mlp_of_a_token_that_the_head_reads_in_full(pool) -> None:
    model = tiny(hidden_size=64, intermediate_size=128, num_hidden_layers=2, pool=pool)
    engine, z, (B, T) = Fp8(model, full=0), torch.randn(3 * 17, 64), (3, 17)
    engine.products = engine.small
    with torch.inference_mode():
        z, branch = engine.block(z, None, 0, B, T)
        layer, by = engine.layers[0], engine.plain[0]
        exact = by.hidden(engine.read(z, None, layer.shift2, layer.norm2)) @ layer.fc2
    off = (branch - exact).view(B, T, -1).norm(dim=2) / exact.view(B, T, -1).norm(dim=2)
    assert off[:, 1:].min() > 1e-3
    assert off[:, 0].max() < 1e-5 if pool == "cls" else off[:, 0].min() > 1e-3


def test_fp8_refuses_odd_widths() -> None:
    with pytest.raises(ConfigError, match=r"multiples of 16; this model has \[40, 120\]"):
        Fp8(tiny(hidden_size=40))


def test_scales_of_fp8_cannot_saturate() -> None:
    """The bound holds for the worst input a LayerNorm can be given: all its weight in one place."""
    model = tiny(hidden_size=64, intermediate_size=128)
    engine = Fp8(model, full=0)
    worst = torch.eye(64) * 1e4
    for block, small in zip(model.blocks, engine.small, strict=True):
        assert (block.mlp.fc1(block.norm2(worst)).abs() / small.scale_h).max() <= 448.5


def test_add_norm() -> None:
    a, b, table = torch.randn(6, 32), torch.randn(6, 32), torch.randn(3, 32)
    shift, weight, bias = torch.randn(32), torch.randn(32), torch.randn(32)
    norm = nn.functional.layer_norm
    total = torch.empty(6, 32)
    assert torch.allclose(
        add_norm(a, b, shift, weight, bias, 1e-6, total=total),
        norm(a + b + shift, (32,), weight, bias, 1e-6),
        atol=1e-5,
    )
    assert torch.equal(total, a + b)
    tabled = add_norm(a, table, shift, weight, bias, 1e-6)
    assert torch.allclose(tabled, norm(a + table.repeat(2, 1) + shift, (32,), weight, bias, 1e-6), atol=1e-5)


def test_add_norm_to_integers() -> None:
    a, shift, weight, bias = torch.randn(6, 32), torch.randn(32), torch.randn(32), torch.randn(32)
    scales = torch.empty(6)
    small = add_norm(a, None, shift, weight, bias, 1e-6, scale=scales)
    whole = nn.functional.layer_norm(a + shift, (32,), weight, bias, 1e-6)
    assert small.dtype == torch.int8
    assert torch.allclose(scales, whole.abs().amax(1) / 127)
    assert ((small * scales[:, None] - whole).abs() <= scales[:, None] * 0.501).all()


def test_linear_int8() -> None:
    scale_a, scale_b, bias = torch.empty(5), torch.empty(48), torch.randn(48)
    a, b = to_int8(torch.randn(5, 32), scale_a), to_int8(torch.randn(48, 32), scale_b)
    x = (a.double() * scale_a[:, None].double()) @ (b.double() * scale_b[:, None].double()).T + bias.double()
    assert torch.allclose(linear_int8(a, (b, scale_b), scale_a, bias, torch.float32).double(), x, atol=1e-5)
    gelu = nn.functional.gelu(x, approximate="tanh")
    found = linear_int8(a, (b, scale_b), scale_a, bias, torch.float32, gelu=True)
    assert torch.allclose(found.double(), gelu, atol=1e-5)
    small = linear_int8(a, (b, scale_b), scale_a, bias, torch.float32, gelu=True, scale=0.05)
    assert small.dtype == FP8
    assert ((small.double() * 0.05 - gelu).abs() <= gelu.abs() / 15 + 1e-3).all()


def test_later_changes_of_the_model_do_not_reach_the_engine() -> None:
    model, x = tiny(), pixels()
    engine = Fused(model)
    before = engine(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert torch.equal(engine(x), before)


def test_autocast_does_not_reach_an_engine() -> None:
    engine, x = Fused(tiny()), pixels()
    before = engine(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(engine(x), before)


def test_bad_input_has_the_models_sentences() -> None:
    engine = Fused(tiny())
    with pytest.raises(InputError, match="patch size 8"):
        engine(pixels(1, 3, 33, 32))
    with pytest.raises(InputError, match="batch of 0"):
        engine(torch.zeros(0, 3, 32, 32))


@pytest.mark.parametrize("name", ["cuda-fused", "fp8"])
def test_without_cuda_it_falls_back_and_says_so(name: str) -> None:
    model, x = tiny(), pixels()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        forward = ENGINES[name].build(model)
    assert "needs a CUDA device" in str(said[0].message)
    with torch.no_grad():
        assert relative(forward(x), model(x)) < 5e-6


@pytest.mark.parametrize("name", ["vit-ti/16", "vit-s/32"])
def test_published_shapes(name: str) -> None:
    model = vitkit.create(name).eval()
    nn.init.normal_(model.head.weight)
    x = pixels(1, 3, 224, 224)
    with torch.no_grad():
        assert relative(Fused(model)(x), model(x)) < 5e-6


def test_the_compiler_leaves_the_fused_parts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling: list[bool] = []

    def fused(self: TrainingForward, x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return self.model(x)

    monkeypatch.setattr(training, "fusible", lambda model, x: True)
    monkeypatch.setattr(TrainingForward, "fused", fused)
    wrapped = TrainingForward(tiny())
    wrapped.compile(backend="eager")
    wrapped(pixels(1, 3, 32, 32))
    assert compiling == [False]


def test_training_starts_without_the_compiler() -> None:
    """Importing it takes as long as importing torch."""
    code = "import sys, vitkit.jobs.train; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
