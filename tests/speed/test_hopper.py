"""The kernels for Hopper, without such a device: what is compiled, what it is given, and where it is used.

Stand-ins for the driver and the compiler record and compute what they are given. Where CUDA's compiler is installed, it
compiles the kernels. benchmarks/check.py runs the kernels themselves on a device.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vitkit.speed import attention_gradient as attention
from vitkit.speed import choices, differentiable, gelu_products, hopper, kernels
from vitkit.speed.dropping import Dropout

FOLDER = Path(hopper.__file__).parent
CPU = torch.device("cpu")


class Driver:
    """Remembers the matrices that are described, and computes a kernel with them when one is launched."""

    def __init__(self) -> None:
        self.maps: list[dict[str, Any]] = []
        self.launched: list[tuple[int, ...]] = []
        self.loaded: list[bytes] = []

    def cuTensorMapEncodeTiled(self, at, kind, n, address, sizes, strides, box, steps, interleave, swizzle, promote,
                               fill) -> int:  # fmt: skip
        assert ctypes.addressof(at._obj) % 64 == 0
        assert (kind.value, interleave.value, swizzle.value, fill.value, list(steps)) == (9, 0, 3, 0, [1] * n.value)
        assert address.value % 16 == 0
        assert not any(stride % 16 for stride in strides)
        self.maps.append({"at": address.value, "sizes": list(sizes), "strides": list(strides), "box": list(box)})
        at._obj[0] = len(self.maps)
        return 0

    def cuLaunchKernel(self, function, *rest) -> int:
        *size, _, arguments, _ = rest
        self.launched.append(tuple(n.value for n in size))
        self.compute(arguments)
        return 0

    def compute(self, arguments) -> None:
        raise AssertionError("no kernel was expected")

    def cuModuleLoadData(self, at, binary) -> int:
        self.loaded.append(bytes(binary))
        return 1 if b"damaged" in binary else 0

    def cuModuleGetFunction(self, at, module, name) -> int:
        self.name = name
        return 0

    def cuFuncSetAttribute(self, function, attribute, value) -> int:
        assert (attribute.value, value.value) == (8, self.shared)
        return 0

    shared = 0

    def matrix(self, arguments, i: int) -> tuple[torch.Tensor, list[int]]:
        """The matrix that an argument describes, and its box."""
        found = self.maps[ctypes.cast(arguments[i], ctypes.POINTER(ctypes.c_ubyte))[0] - 1]
        sizes = found["sizes"][::-1]
        dense = [2 * found["sizes"][0]]
        for n in found["sizes"][1:-1]:
            dense.append(dense[-1] * n)
        assert found["strides"] == dense
        return tensor(found["at"], sizes, torch.bfloat16), found["box"]


def tensor(at: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(at), dtype=dtype).view(shape)


def pointer(arguments, i: int) -> int:
    return ctypes.cast(arguments[i], ctypes.POINTER(ctypes.c_void_p))[0]


def number(arguments, i: int, kind=ctypes.c_int):
    return ctypes.cast(arguments[i], ctypes.POINTER(kind))[0]


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(hopper, "_driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: type("Stream", (), {"cuda_stream": 0}))
    return found


def launcher(device: torch.device, shared: int = 7) -> hopper.Kernel:
    """A kernel that was never compiled."""
    kernel = hopper.Kernel.__new__(hopper.Kernel)
    kernel.device, kernel.shared, kernel.function = device, shared, ctypes.c_void_p(1)
    return kernel


class Products(Driver):
    """What gelu_products.cu does, with GELU' in an order of its own."""

    forward, tanh = True, False

    def compute(self, arguments) -> None:
        (x, of_x), (W, of_W), (out, of_out) = (self.matrix(arguments, i) for i in range(3))
        assert (of_x, of_W, of_out) == ([64, 128], [64, 64], [64, 16])
        pairs, tiles, turns = (number(arguments, i) for i in (5, 6, 7))
        W = W.mT if self.columns else W
        (M, K), N = x.shape, W.shape[1]
        assert (pairs, tiles, turns) == (-(-M // 256), N // 128, K // 64)
        assert self.launched[-1] == (2 * min(3, pairs * tiles), 1, 1, 384, 1, 1, 7)
        slopes = tensor(pointer(arguments, 4), [2 * pairs * 128, N], torch.uint8)
        product = x.float() @ W.float()
        if self.forward:
            h = product + tensor(pointer(arguments, 3), [N], torch.bfloat16).float()
            how = "tanh" if self.tanh else "none"
            out.copy_(F.gelu(h, approximate=how))
            slope = torch.ops.aten.gelu_backward(torch.ones_like(h), h, approximate=how)
            slopes[:M] = (slope * 200 + 26).round().byte()
        else:
            dh = product * (slopes[:M].float() - 26) / 200
            out.copy_(dh)
            sums = tensor(pointer(arguments, 3), [8 * pairs, N], torch.float32).zero_()
            for row in range(0, M, 32):
                sums[row // 32] = dh[row : row + 32].sum(0)


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("M", [300, 512])
def test_products_around_gelu_get_what_they_need(monkeypatch, M, turned, tanh) -> None:
    found = Products()
    monkeypatch.setattr(hopper, "_driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: type("Stream", (), {"cuda_stream": 0}))
    monkeypatch.setattr(gelu_products, "processors", lambda x: 7)

    def kernel(device, how, columns):
        found.forward, found.tanh, found.columns = how is not None, bool(how), columns
        return launcher(device)

    monkeypatch.setattr(gelu_products, "_kernel", kernel)
    torch.manual_seed(0)
    x, dy = (torch.randn(M, 128).bfloat16() for _ in range(2))
    W1, W2, bias = torch.randn(256, 128).bfloat16() / 10, torch.randn(128, 256).bfloat16() / 10, torch.randn(256)
    first, second = (W1.mT.contiguous(), W2.mT.contiguous().mT) if turned else (W1.mT, W2)
    g, slopes = gelu_products.linear_gelu(x, first, bias.bfloat16(), tanh)
    h, how = x.float() @ W1.float().mT + bias.bfloat16().float(), "tanh" if tanh else "none"
    torch.testing.assert_close(g.float(), F.gelu(h, approximate=how), rtol=0.01, atol=0.01)
    assert slopes.numel() == 256 * -(-M // 256) * 256
    dh, sums = gelu_products.product_dgelu(dy, second, slopes)
    want = torch.ops.aten.gelu_backward(dy.float() @ W2.float(), h, approximate=how)
    assert ((dh - want).norm() / want.norm()).item() < 0.004
    torch.testing.assert_close(sums, dh.float().sum(0), rtol=0.01, atol=0.1)


class Attention(Driver):
    """What attention_gradient.cu does."""

    def compute(self, arguments) -> None:
        (qkv, of_qkv), (dout, of_dout), (dqkv, of_out) = (self.matrix(arguments, i) for i in range(3))
        B, T, width = dout.shape
        tokens = -(-T // 16) * 16
        assert (of_qkv, of_dout, of_out) == ([64, tokens, 1], [64, tokens, 1], [64, 16, 1])
        heads, items = number(arguments, 8), number(arguments, 9)
        assert (heads, items) == (width // 64, B * width // 64)
        scale, factor = (number(arguments, i, ctypes.c_float) for i in (10, 11))
        assert self.launched[-1][0] == min(items, 5)
        o, again = (tensor(pointer(arguments, i), [B, T, width], torch.bfloat16) for i in (3, 4))
        lse = tensor(pointer(arguments, 5), [B, heads, T], torch.float32)
        of_q = tensor(pointer(arguments, 6), [B, 8, width], torch.float32).zero_()
        of_v = tensor(pointer(arguments, 7), [B, 3, width], torch.float32).zero_()
        assert torch.equal(dout, again)
        q, k, v = qkv.float().view(B, T, 3, heads, 64).permute(2, 0, 3, 1, 4)
        do, out = (x.float().view(B, T, heads, 64).transpose(1, 2) for x in (dout, o))
        A = (2 ** (q @ k.mT * factor)) * (-lse[..., None]).exp()
        dS = A * (do @ v.mT - (do * out).sum(-1, keepdim=True)) * scale
        parts = torch.stack([dS @ k, dS.mT @ q, A.mT @ do])
        dqkv.copy_(parts.permute(1, 3, 0, 2, 4).reshape(B, T, -1))
        of_q[:, 2] = parts[0].sum(2).view(B, width)
        of_v[:, 1] = dout.float().sum(1)


@pytest.mark.parametrize(("B", "T", "heads"), [(2, 130, 3), (3, 145, 2)])
def test_attention_backward_gets_what_it_needs(monkeypatch, B, T, heads) -> None:
    found, width = Attention(), 64 * heads
    monkeypatch.setattr(hopper, "_driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: type("Stream", (), {"cuda_stream": 0}))
    monkeypatch.setattr(attention, "processors", lambda x: 5)
    monkeypatch.setattr(attention, "_kernel", lambda device, tokens: launcher(device))
    torch.manual_seed(0)
    qkv, dsa = torch.randn(B * T, 3 * width).bfloat16(), torch.randn(B * T, width).bfloat16()
    lse = torch.empty(B, heads, T)
    sa = kernels.attention_loop(qkv, heads, B, T, lse)
    dqkv, sums = attention.attention_gradient(qkv, sa, dsa, lse)
    exact = qkv.float().requires_grad_()
    q, k, v = exact.view(B, T, 3, heads, 64).permute(2, 0, 3, 1, 4)
    out = ((q @ k.mT / 8).softmax(-1) @ v).transpose(1, 2).reshape(B * T, width)
    (want,) = torch.autograd.grad(out, exact, dsa.float())
    assert ((dqkv - want).norm() / want.norm()).item() < 0.01
    torch.testing.assert_close(sums, want.sum(0), rtol=0.02, atol=0.2)


def test_queries_are_divided_into_parts_that_products_can_have() -> None:
    for T in range(attention.LEAST, attention.MOST + 1):
        cut, tokens = attention.parts(attention.padded(T)), attention.padded(T)
        assert T <= tokens < T + 16
        assert [first for _, first in cut] == [sum(size for size, _ in cut[:i]) for i in range(len(cut))]
        assert sum(size for size, _ in cut) == tokens
        assert all(0 < size <= attention.WIDEST and size % 16 == 0 for size, _ in cut)


@pytest.mark.parametrize("columns", [64, 112, 128])
@pytest.mark.parametrize("held", [False, True])
def test_products_name_each_register_once(columns, held) -> None:
    text = hopper.wgmma("mma", columns, turn_a=not held, turn_b=True, held=held)
    count = columns // 2 + (4 if held else 1) + 2  # d, a, b, adds
    assert sorted(set(map(int, re.findall(r"%(\d+)", text)))) == list(range(count))
    outputs, inputs = text.rsplit(" : ", 2)[1:]
    assert (outputs.count('"+f"'), inputs.count("(")) == (columns // 2, count - columns // 2)
    assert f"m64n{columns}k16" in text
    assert text.count("{") == text.count("}")
    turns = re.search(r"adds, 1, 1, ([01, ]+); }", text)
    assert turns is not None
    assert turns.group(1) == ("1" if held else "1, 1")  # a in registers cannot be turned


def test_both_sides_have_the_same_constants() -> None:
    source = (FOLDER / "gelu_products.cu").read_text()
    line = re.search(r"constexpr int ROWS = (\d+), COLS = (\d+), DEPTH = (\d+), STAGES = (\d+);", source)
    ours = gelu_products.ROWS, gelu_products.COLUMNS, gelu_products.DEPTH, gelu_products.STAGES
    assert tuple(map(int, line.groups())) == ours
    assert gelu_products.SHARED <= 227 << 10
    assert 8 * attention.MOST * 128 + 2 * attention.MOST * 8 + 128 <= 227 << 10
    assert hopper.THREADS == 384
    for name in ("gelu_products", "attention_gradient"):
        text = (FOLDER / f"{name}.cu").read_text()
        assert "__launch_bounds__(384, 1)" in text
        assert f"\n{name}(const" in text  # a kernel has its file's name
        for function in re.findall(
            r"void (\w+)\([^)]*\) \{((?:.|\n)*?)\n\}", text + (FOLDER / "hopper.cuh").read_text()
        ):
            assert not re.search(rf"\b{function[0]}\(", function[1]), "a function calls itself, and would be removed"


class Compiler:
    """Compiles to the first letters of the source, or refuses."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.count = refuses, 0

    def nvrtcCreateProgram(self, at, source, name, headers, texts, names) -> int:
        self.source = source.value
        return 0

    def nvrtcCompileProgram(self, program, count, options) -> int:
        assert list(options) == [b"--gpu-architecture=sm_90a"]
        self.count += 1
        return 6 if self.refuses else 0

    def nvrtcGetProgramLogSize(self, program, size) -> int:
        size._obj.value = 20
        return 0

    def nvrtcGetProgramLog(self, program, log) -> int:
        log.value = b"line 3: no"
        return 0

    def nvrtcGetCUBINSize(self, program, size) -> int:
        size._obj.value = 6
        return 0

    def nvrtcGetCUBIN(self, program, binary) -> int:
        binary[0:6] = b"binary"
        return 0

    def nvrtcDestroyProgram(self, program) -> int:
        return 0


@pytest.fixture
def compiler(monkeypatch, driver, tmp_path):
    found = Compiler()
    hopper.compiles.cache_clear()
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hopper, "_compiler", lambda: found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    driver.shared = 99
    (tmp_path / "sum_up.cu").write_text("the kernel")
    return found


def test_a_kernel_is_compiled_once_and_a_damaged_one_again(compiler, driver, tmp_path) -> None:
    def build(*parts: str) -> hopper.Kernel:
        return hopper.Kernel(tmp_path / "sum_up.cu", CPU, 99, parts)

    build("before it")
    assert compiler.source.endswith(b"before it\nthe kernel")
    assert b"barrier_wait" in compiler.source  # hopper.cuh
    assert (compiler.count, driver.loaded, driver.name) == (1, [b"binary"], b"sum_up")
    build("before it")
    assert (compiler.count, driver.loaded) == (1, [b"binary"] * 2)
    (kept,) = (tmp_path / "cache" / "kernels").iterdir()
    kept.write_bytes(b"damaged")
    build("before it")
    assert (compiler.count, kept.read_bytes()) == (2, b"binary")
    build("something else")
    assert compiler.count == 3


def test_what_cannot_be_compiled_is_said_and_not_used(compiler, tmp_path) -> None:
    compiler.refuses = True
    with pytest.raises(RuntimeError, match=r"sum_up.cu cannot be compiled: line 3: no"):
        hopper.Kernel(tmp_path / "sum_up.cu", CPU, 99)
    assert not hopper.compiles(hopper.Kernel, tmp_path / "sum_up.cu", CPU, 99)
    assert not hopper.compiles(hopper.Kernel, tmp_path / "sum_up.cu", CPU, 99)
    assert compiler.count == 2  # it is not tried again in every step
    compiler.refuses = False
    assert hopper.compiles(hopper.Kernel, tmp_path / "sum_up.cu", CPU, 99, ("other options",))


def test_other_devices_and_shapes_are_left_to_others(monkeypatch) -> None:
    x, W = torch.randn(5000, 128).bfloat16(), torch.randn(256, 128).bfloat16().mT
    assert not gelu_products.takes(x, W)
    assert not attention.takes(197, 64, CPU)
    monkeypatch.setattr(gelu_products.cublas, "takes", lambda x, W: True)
    for module in (gelu_products, attention):
        monkeypatch.setattr(module, "available", lambda device: True)
        monkeypatch.setattr(module, "compiles", lambda *_: True)
    assert gelu_products.takes(x, W)
    asked = []
    monkeypatch.setattr(gelu_products, "compiles", lambda build, *which: asked.append(which[1:]) or True)
    assert gelu_products.takes(x, W, True)  # the very kernel that runs
    assert gelu_products.takes(x, W.contiguous())
    assert asked == [(True, True), (None, False)]
    assert not gelu_products.takes(x.float(), W)
    assert not gelu_products.takes(x, torch.randn(192, 128).mT)
    assert not gelu_products.takes(x[:, :96], torch.randn(256, 96).mT)
    cuda = torch.device("cuda")
    assert [T for T in range(300) if attention.takes(T, 64, cuda)] == list(range(129, 209))
    assert not attention.takes(197, 80, cuda)


@pytest.mark.parametrize(
    ("best", "off", "want"),
    [("ours", 0.0, True), ("library", 0.0, False), ("ours", 0.1, False), ("ours", None, False)],  # None: not launched
)
def test_the_faster_way_is_chosen_once_per_run_if_it_computes_the_same(monkeypatch, tmp_path, best, off, want) -> None:
    offered = []

    def fastest(what, ways, time):
        offered.append(list(ways))
        for way in ways.values():
            way()
        return best if best in ways else "library"

    u, W1, b1, W2 = torch.randn(6, 4), torch.randn(8, 4), torch.randn(8), torch.randn(4, 8)
    monkeypatch.setattr(gelu_products, "takes", lambda x, W, tanh=None: x.shape[1] == W.shape[0])
    monkeypatch.setattr(gelu_products, "fastest", fastest)

    def linear_gelu(x, W, b, tanh):
        if off is None:
            raise RuntimeError("cuLaunchKernel failed with status 1.")
        return x @ W + b + off, "slopes"

    monkeypatch.setattr(gelu_products, "linear_gelu", linear_gelu)
    monkeypatch.setattr(gelu_products, "product_dgelu", lambda x, W, slopes: ((x @ W), (x @ W).sum(0)))

    def activate(u, W1, b1, tanh):
        return u @ W1.mT + b1, "h"

    def derive(dy, W2, h, tanh):
        return dy @ W2, (dy @ W2).sum(0)

    for _ in range(2):
        with choices.pinned(tmp_path / "kernels.json"):
            for _ in range(2):
                assert gelu_products.faster(u, W1, b1, W2, False, activate, derive) is want
    assert offered == [["library"] + (["ours"] if off == 0.0 else [])] * 2


@pytest.mark.parametrize("drop", [None, 0.3])
def test_the_mlp_uses_the_kernel_both_ways_or_not_at_all(monkeypatch, tmp_path, drop) -> None:
    asked = []

    def linear_gelu(x, W, b, tanh):
        asked.append("forward")
        h = x @ W + b
        return F.gelu(h), torch.ops.aten.gelu_backward(torch.ones_like(h), h, approximate="none")

    def product_dgelu(x, W, slopes):
        asked.append("backward")
        return (x @ W) * slopes, ((x @ W) * slopes).sum(0)

    monkeypatch.setattr(gelu_products, "faster", lambda *_: True)
    monkeypatch.setattr(gelu_products, "linear_gelu", linear_gelu)
    monkeypatch.setattr(gelu_products, "product_dgelu", product_dgelu)
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((10, 8), (16, 8), (16,), (8, 16))]
    dropout = None if drop is None else Dropout(torch.tensor([1, 2], dtype=torch.int32), drop)
    found = []
    for pinned in (False, True):
        with choices.pinned(tmp_path / "k.json") if pinned else nullcontext():
            y = differentiable.MLP.apply(*inputs, False, dropout)
            found.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert asked == ([] if drop else ["forward", "backward"])


def test_attention_uses_the_kernel_where_it_applies(monkeypatch) -> None:
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((2 * 9, 16), (48, 16), (48,))]
    plain = torch.autograd.grad(differentiable.Attend.apply(*inputs, 2, 2).square().sum(), inputs)
    asked = []

    def kernel(qkv, sa, dsa, lse):
        asked.append(qkv.shape)
        return torch.ones_like(qkv), torch.full((48,), 2.0)

    monkeypatch.setattr(attention, "takes", lambda T, size, device: (T, size) == (9, 8))
    monkeypatch.setattr(attention, "attention_gradient", kernel)
    again = torch.autograd.grad(differentiable.Attend.apply(*inputs, 2, 2).square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))  # fp32 is not for it
    halves = [x.detach().bfloat16().requires_grad_() for x in inputs]
    du, of_weight, of_bias = torch.autograd.grad(differentiable.Attend.apply(*halves, 2, 2).sum(), halves)
    assert asked == [(18, 48)]
    assert torch.equal(of_bias, torch.full((48,), 2.0).bfloat16())
    torch.testing.assert_close(du, torch.ones(18, 48).bfloat16() @ halves[1])
    assert of_weight.shape == (48, 16)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="CUDA's compiler (nvcc) is not installed")
@pytest.mark.parametrize("which", ["GELU forward", "GELU forward, tanh", "GELU backward", "T = 197", "T = 145"])
def test_the_kernels_compile_without_losing_speed(which, monkeypatch, tmp_path) -> None:
    """No spilled registers to speak of, no products one by one, and both meetings of a cluster."""
    said = {}

    class Compiled:
        def __init__(self, file, device, shared, parts):
            source = "\n".join([(FOLDER / "hopper.cuh").read_text(), *parts, file.read_text()])
            (tmp_path / "k.cu").write_text(source)
            for kind in ("-ptx", "-cubin"):
                command = [
                    "nvcc",
                    kind,
                    "-gencode=arch=compute_90a,code=sm_90a",
                    "-Xptxas",
                    "-v",
                    "k.cu",
                    "-o",
                    "k" + kind,
                ]
                ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
                assert ran.returncode == 0, ran.stderr
                said[kind] = ran.stderr

    for module in (gelu_products, attention):
        monkeypatch.setattr(module, "Kernel", Compiled)
    if "GELU" in which:
        tanh = None if "backward" in which else "tanh" in which
        gelu_products._kernel.__wrapped__(CPU, tanh, True)
        assert (tmp_path / "k-ptx").read_text().count("barrier.cluster.arrive") == 2
    else:
        attention._kernel.__wrapped__(CPU, int(which.split()[-1]))
    assert "Potential Performance Loss" not in said["-cubin"]
    assert int(re.search(r"(\d+) bytes spill stores", said["-cubin"]).group(1)) <= 64
