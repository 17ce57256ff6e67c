"""The Triton kernels compute what their plain versions compute, in Triton's interpreter: no CUDA device is needed.

The interpreter is chosen when Triton is imported, so every case runs in a process of its own (this file as a script).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vitkit.speed import differentiable, dropping, kernels
from vitkit.speed.differentiable import products
from vitkit.training.adamw import BLOCK, COUNT, TURNS, OnePassAdamW


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    """The outputs, and what a random sum of them gives its inputs."""
    sum((y * torch.randn_like(y)).sum() for y in outputs).backward()
    return [*(y.detach() for y in outputs), *(x.grad for x in inputs if x.grad is not None)]


def add_norm(D: int, rows: int = 12) -> list[Tensor]:
    a, parts, table = torch.randn(rows, D), torch.randn(3 * rows, D), torch.randn(rows // 3, D)
    shift, weight, bias = (torch.randn(D) for _ in range(3))
    total, scales = torch.empty(rows, D), torch.empty(rows)
    found = [kernels.add_norm(a, b, shift, weight, bias, 1e-6) for b in (None, table, parts)]
    found += [kernels.add_norm(a, parts, shift, weight, bias, 1e-6, total=total), total]
    small = kernels.add_norm(a, None, shift, weight, bias, 1e-6, scale=scales)
    found.append(kernels.add_norm(parts.view(rows, 3, D)[:, 1], None, shift, weight, bias, 1e-6))  # rows far apart
    return [*found, small * scales[:, None], scales]


def sum_rows() -> list[Tensor]:
    return [kernels.sum_rows(torch.randn(shape)) for shape in ((300, 3, 41), (256, 16), (1, 5))]


def attention() -> list[Tensor]:
    return [kernels.attention(torch.randn(2 * 21, 3 * 32).half(), 2, 2, 21).float()]


def attention_loop(T: int, size: int) -> list[Tensor]:
    qkv = torch.randn(2 * T, 3 * 2 * size).half()
    qkv[T:, 4 * size :] = float("nan") if kernels.by_triton(qkv) else 0.0  # values of the second image
    lse = torch.empty(2, 2, T)
    found = kernels.attention_loop(qkv, 2, 2, T)[:T].float()  # do not reach the first
    return [found, kernels.attention_loop(qkv, 2, 2, T, lse)[:T].float(), lse]


def linear_int8(rows: int = 70, inner: int = 160, gelu: bool = False, scale: float | None = None) -> list[Tensor]:
    of_a, of_b, bias = torch.empty(rows), torch.empty(80), torch.randn(80)
    a, b = kernels.to_int8(torch.randn(rows, inner), of_a), kernels.to_int8(torch.randn(80, inner), of_b)
    return [kernels.linear_int8(a, (b, of_b), of_a, bias, torch.float32, gelu, scale).float()]


def rows_to_fp8() -> list[Tensor]:
    x, scale = kernels.rows_to_fp8(torch.randn(9, 40))
    return [x.float(), scale]


def columns_to_fp8() -> list[Tensor]:
    lengths = torch.empty(21)
    x, scale = products.columns_to_fp8(torch.randn(300, 21), lengths)
    return [x.float(), scale, lengths]


def norm_alone() -> list[Tensor]:
    z, weight, shift = leaves((10, 24), (24,), (24,))
    return gradients(differentiable.AddNorm.apply(z, None, None, None, weight, shift, 1e-6), [z, weight, shift])


def norm_of_a_sum() -> list[Tensor]:
    z, branch, bias, weight, shift = leaves((10, 24), (10, 24), (24,), (24,), (24,))
    outputs = differentiable.AddNorm.apply(z, branch, bias, None, weight, shift, 1e-6)
    return gradients(outputs, [z, branch, bias, weight, shift])


def depth(images: int, rate: float) -> dropping.Depth:
    order = torch.randperm(images)
    return dropping.Depth(order, order.argsort().int(), torch.rand(()), rate)


def norm_with_stochastic_depth() -> list[Tensor]:
    found = []
    for rate in (0.1, 0.5, 0.7, 1.0):  # of five images with three tokens each
        before, after = depth(5, rate), depth(5, 0.9 * rate)
        rows = 3 * len(before.images)
        z, branch, bias, weight, shift = leaves((15, 24), (rows, 24), (24,), (24,), (24,))
        for one, other in ((before, None), (before, after), (None, after)):
            used = branch if one else torch.cat([branch] * 15)[:15]
            outputs = differentiable.AddNorm.apply(z, used, bias, one, weight, shift, 1e-6, None, other)
            found += gradients(outputs, [z, branch, bias, weight, shift])
    return found


def norm_with_stochastic_depth_in_fp8() -> list[Tensor]:
    z, branch, bias, weight, shift = leaves((15, 24), (9, 24), (24,), (24,), (24,))
    inputs, depths, left = (z, branch, bias), (depth(5, 0.5), depth(5, 0.25)), differentiable.Rounded()
    how = (depths[0], weight, shift, 1e-6, None, depths[1], True, left)
    total, u, *small = differentiable.AddNorm.apply(*inputs, *how)
    found = [*(x.float() for x in small), *gradients((total, u), [*inputs, weight, shift])]
    return [*found, *(x.float() for x in left.take(branch.grad))]


def norm_in_fp8() -> list[Tensor]:
    z, branch, bias, weight, shift = leaves((10, 24), (10, 24), (24,), (24,), (24,))
    total, u, small, scale = differentiable.AddNorm.apply(z, branch, bias, None, weight, shift, 1e-6, None, None, True)
    return [small.float(), scale, *gradients((total, u), [z, branch, bias, weight, shift])]


def key() -> Tensor:
    return torch.randint(-(2**31), 2**31, (2,)).int()


def dropout() -> list[Tensor]:
    (x,) = leaves((50, 70))
    rates = (0.0, 0.1, 0.5, 0.9)
    outputs = tuple(differentiable.Drop.apply(x, dropping.Dropout(key(), rate)) for rate in rates)
    return gradients(outputs, [x])


def norm_with_dropout() -> list[Tensor]:
    z, branch, short, bias, weight, shift = leaves((15, 24), (15, 24), (9, 24), (24,), (24,), (24,))
    drop = dropping.Dropout(key(), 0.3)
    outputs = differentiable.AddNorm.apply(z, short, bias, depth(5, 0.5), weight, shift, 1e-6, drop)
    outputs += differentiable.AddNorm.apply(z, branch, bias, None, weight, shift, 1e-6, drop)
    return gradients(outputs, [z, branch, short, bias, weight, shift])


def parts(fp8: bool) -> list[Tensor]:
    u, weight, bias = leaves((300, 24), (3 * 40, 24), (3 * 40,))
    small = kernels.rows_to_fp8(u.detach()) if fp8 else ()
    return gradients(differentiable.Parts.apply(u, weight, bias, *small), [u, weight, bias])


def attend(T: int) -> list[Tensor]:
    u, weight, bias = leaves((3 * T, 24), (3 * 32, 24), (3 * 32,))
    weight.data *= 0.3  # or a softmax of large numbers would enlarge what fp32 rounds
    return gradients((differentiable.Attend.apply(u, weight, bias, 3, 2),), [u, weight, bias])


def attend_first(T: int, size: int, fp8: bool = False) -> list[Tensor]:
    u, weight, bias = leaves((3 * T, 24), (3 * 2 * size, 24), (3 * 2 * size,))
    weight.data *= 0.3  # or a softmax of large numbers would enlarge what fp8 rounds
    small = kernels.rows_to_fp8(u.detach()) if fp8 else ()
    found = gradients((differentiable.AttendFirst.apply(u, weight, bias, 3, 2, *small),), [u, weight, bias])
    alone = differentiable.AttendFirst.apply(u[-T:], weight, None, 1, 2)  # without a bias, or other images
    return [*found, alone.detach()]


def mlp(tanh: bool, fp8: bool, rate: float = 0.0) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        u, weight1, bias1, weight2 = leaves((300, 24), (40, 24), (40,), (24, 40))
        small = kernels.rows_to_fp8(u.detach()) if fp8 else ()
        drop = dropping.Dropout(key(), rate) if rate else None
        outputs = (differentiable.MLP.apply(u, weight1, bias1, weight2, tanh, drop, None, *small),)
        return gradients(outputs, [u, weight1, bias1, weight2])

    return run


def adamw(limit: float | None) -> list[Tensor]:
    """Four steps, the third of which is broken, of weights of several sizes: many of one, parts of a program, some."""
    shapes = [(5, 7)] * (COUNT + 3) + [(BLOCK * TURNS + 70,), (BLOCK * TURNS,), (1,)]
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    groups = [{"params": weights[1:], "weight_decay": 0.3}, {"params": weights[:1], "weight_decay": 0.0}]
    optimizer, norms = OnePassAdamW(groups, lr=torch.tensor(0.01), betas=(0.9, 0.95), fused=True), []
    for step in range(4):
        for weight in weights:
            weight.grad = torch.randn_like(weight) * 10**step  # AdamW would not notice a constant factor
        weights[3].grad = torch.randn(7, 5).mT  # not in the order of the weight
        weights[4].grad = torch.randn(36)[1:].view(5, 7)  # at an odd address
        norms.append(optimizer.measure(limit))
        optimizer.found_inf = torch.tensor(float(step == 2))
        optimizer.step()
    state = [part for weight in weights for part in optimizer.state[weight].values()]
    return [torch.stack(norms), *(weight.detach() for weight in weights), *state]


ROUNDED = 0.15  # the interpreter rounds to fp8 in a way of its own
CASES: dict[str, tuple[Callable[[], list[Tensor]], float]] = {  # and how far the two may be apart
    "add_norm": (partial(add_norm, 24), 1e-5),
    "add_norm of a power of two": (partial(add_norm, 32), 1e-5),
    "add_norm of an odd width": (partial(add_norm, 41), 1e-5),
    "sum_rows": (sum_rows, 1e-5),
    "attention": (attention, 2e-3),
    "attention_loop": (partial(attention_loop, 101, 64), 2e-3),
    "attention_loop of heads of 80": (partial(attention_loop, 65, 80), 2e-3),
    "linear_int8": (linear_int8, 1e-5),
    "linear_int8 of many rows": (partial(linear_int8, 4096, 16), 1e-5),
    "linear_int8 and GELU": (partial(linear_int8, gelu=True), 1e-5),
    "linear_int8 and GELU to fp8": (partial(linear_int8, gelu=True, scale=0.5), ROUNDED),
    "rows_to_fp8": (rows_to_fp8, ROUNDED),
    "columns_to_fp8": (columns_to_fp8, ROUNDED),
    "norm alone": (norm_alone, 1e-5),
    "norm of a sum": (norm_of_a_sum, 1e-5),
    "norm with stochastic depth": (norm_with_stochastic_depth, 1e-5),
    "norm with stochastic depth in fp8": (norm_with_stochastic_depth_in_fp8, ROUNDED),
    "norm in fp8": (norm_in_fp8, ROUNDED),
    "dropout": (dropout, 1e-6),
    "norm with dropout": (norm_with_dropout, 1e-5),
    "mlp with dropout": (mlp(False, False, 0.3), 1e-5),
    "mlp with dropout in fp8": (mlp(False, True, 0.3), ROUNDED),
    "parts": (partial(parts, False), 1e-5),
    "attend": (partial(attend, 37), 1e-5),
    "attend with a few more keys": (partial(attend, 69), 1e-5),
    "mlp": (mlp(False, False), 1e-5),
    "mlp, tanh": (mlp(True, False), 1e-5),
    "parts in fp8": (partial(parts, True), ROUNDED),
    "attend to the first token": (partial(attend_first, 37, 16), 1e-5),
    "attend to the first token of many": (partial(attend_first, 130, 20), 1e-5),
    "attend to the first token in fp8": (partial(attend_first, 64, 16, True), ROUNDED),
    "mlp in fp8": (mlp(False, True), ROUNDED),
    "adamw": (partial(adamw, None), 1e-6),
    "adamw that clips": (partial(adamw, 0.5), 1e-6),
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_equal_their_plain_versions() -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.speed.test_triton"],
        env=env,
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.split("\n")[:-1] == list(CASES)


def work(kernel: Any, sizes: dict[str, int], fp8: bool) -> tuple[int, int]:
    """Hyperbolic tangents of a thread and changes of layout in a kernel compiled for an H200; that needs no device."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    fixed = {"TANH": False, "APPROXIMATE": True, "DROP": True, "FP8_TOO": fp8, **sizes}
    types = {"small": "*fp8e4nv" if fp8 else "*bf16", "scales": "*fp32", "sums": "*fp32", "rows": "i32", "N": "i32"}
    types |= {"key": "*i32", "limit": "i32", "scale": "fp32"}
    signature = {name: "constexpr" if name in fixed else types.get(name, "*bf16") for name in kernel.arg_names}
    odd = ("constexpr", "fp32")
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind not in odd}
    found = compile(
        ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4},
    )
    return found.asm["ptx"].count("tanh.approx"), found.asm["ttgir"].count("convert_layout")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.filterwarnings("ignore:AnnAssign:DeprecationWarning")  # Triton's compiler, from Python 3.13 on
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gelu_forward", {"STEP": 4, "BLOCK": 1024}),
        ("gelu_backward", {"STEP": 8, "ROWS": 128, "BLOCK": 256, "STAGES": 1}),
    ],
)
def test_fp8_beside_bf16_costs_a_store_alone(
    name: str, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of another width makes the compiler compute every GELU again for it, or pass it through shared memory:
    1.5 ms of a step."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from vitkit.speed import triton_training

    kernel = getattr(triton_training, name)
    tangents, layouts = work(kernel, sizes, fp8=False)
    assert tangents > 0
    assert work(kernel, sizes, fp8=True) == (tangents, layouts)


def mend_interpreter() -> None:
    """Make numbers of tensors with one element, which newer NumPy refuses in one dimension."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def with_numbers(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_numbers


def main() -> None:
    mend_interpreter()
    for name, (case, tolerance) in CASES.items():
        found = []
        for where in ("1", "0"):  # the kernels, then their plain versions
            os.environ["TRITON_INTERPRET"] = where
            torch.manual_seed(3)
            found.append(case())
        assert len(found[0]) == len(found[1])
        for ours, plain in zip(*found, strict=True):
            apart = ((ours.double() - plain.double()).norm() / plain.double().norm()).item()
            assert apart <= tolerance, f"{name}: {apart:.2g}"
        print(name, flush=True)


if __name__ == "__main__":
    main()
