"""Products by cuBLASLt: what is handed to the library describes the right product. A stand-in computes, on the CPU,
what the descriptions say; benchmarks/check.py runs the library itself on a device."""

from __future__ import annotations

import ctypes
import threading
import time
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitkit.speed import choices, cublas

M, K, N = 5, 8, 6


class Library:
    """Column-major products of fp16 numbers, with the library's names and arguments. For matrices that are not
    transposed it suggests algorithms 70 to 72, for others 80 to 82. Some cannot run: 71 at all, 81 these products."""

    def __init__(self) -> None:
        self.objects: dict[int, dict] = {}
        self.ran: list[int] = []
        self.wrong = 0  # an algorithm that computes something else
        self.restless = 0  # one that rounds differently once
        self.scales = 0  # one whose result is right for zeros only

    def new(self, at, **what) -> int:
        at._obj.value = 1 + len(self.objects)
        self.objects[at._obj.value] = what
        return 0

    def cublasLtGetVersion(self) -> int:
        return 130000

    def cublasLtMatmulDescCreate(self, at, compute, scale) -> int:
        return self.new(at, compute=compute.value, scale=scale.value)

    def cublasLtMatmulDescSetAttribute(self, which, attribute, value, size) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self.objects[which.value][attribute.value] = value._obj.value
        time.sleep(0.001)  # another thread would get between this and the product
        return 0

    def cublasLtMatrixLayoutCreate(self, at, kind, rows, columns, leading) -> int:
        assert kind.value == 2
        return self.new(at, shape=(rows.value, columns.value), leading=leading.value)

    def cublasLtMatmulPreferenceCreate(self, at) -> int:
        return self.new(at)

    def cublasLtMatmulPreferenceSetAttribute(self, which, attribute, value, size) -> int:
        assert size.value == 8
        self.objects[which.value][attribute.value] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceDestroy(self, which) -> int:
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, product, a, b, c, d, preference, most, found, count) -> int:
        assert self.objects[preference.value] == {1: 32 << 20}
        transposed = self.objects[product.value][3]
        assert self.objects[a.value]["shape"] == ((K, N) if transposed else (N, K))
        for i in range(3):
            found[i].algorithm[0] = (80 if transposed else 70) + i
        found[1].status = 0 if transposed else 7
        count._obj.value = 3
        return 0

    def cublasLtMatmulAlgoCheck(self, handle, product, a, b, c, d, algorithm, result) -> int:
        which = algorithm._obj[0]
        result._obj.workspace = which
        return 15 if which == 81 else 0

    def cublasLtMatmul(self, handle, product, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, algorithm, space,
                       size, stream) -> int:  # fmt: skip
        how = self.objects[product.value]
        A, B, C, D = (self.matrix(at, of) for at, of in ((a, of_a), (b, of_b), (c, of_c), (d, of_d)))
        result = alpha._obj.value * ((A.T if how.get(3) else A) @ B).astype(np.float32)
        result += beta._obj.value * C if beta._obj.value else 0  # C is not read then, and may be anything
        if how[7] in (4, 36, 164):
            result += self.array(how[8], len(result))[:, None]
        aux = self.array(how[11], how[12] * D.shape[1]).reshape(-1, how[12]).T if how[7] in (164, 192) else None
        if how[7] == 164:
            aux[:] = result
        if how[7] in (36, 164):
            result = F.gelu(torch.from_numpy(result), approximate="tanh").numpy()
        if how[7] == 192:
            h = torch.from_numpy(aux.astype(np.float32))
            result = torch.ops.aten.gelu_backward(torch.from_numpy(result), h, approximate="tanh").numpy()
        which = algorithm._obj[0]
        D[:] = result * (2 if which == self.scales else 1) + (1 if which == self.wrong else 0)
        if which == self.restless and self.ran.count(which) == 3:
            D[0, 0] += 0.125
        assert size.value == which
        self.ran.append(which)
        return 0

    def matrix(self, at, which) -> np.ndarray:
        what = self.objects[which.value]
        rows, columns = what["shape"]
        return self.array(at.value, what["leading"] * columns).reshape(columns, -1)[:, :rows].T

    def array(self, at, count) -> np.ndarray:
        return np.ctypeslib.as_array((ctypes.c_uint16 * count).from_address(at)).view(np.float16)


@pytest.fixture
def library(monkeypatch):
    found = Library()
    cublas._plan.cache_clear()
    monkeypatch.setattr(cublas, "_library", lambda: found)
    monkeypatch.setattr(cublas, "_handle", lambda device: ctypes.c_void_p(1))
    monkeypatch.setattr(cublas, "takes", lambda x, W: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    yield found
    cublas._plan.cache_clear()


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


def choose(monkeypatch, name: str) -> list[list[str]]:
    """Let every choice fall on a name; return what there was to choose from."""
    offered = []

    def fastest(what, ways, time):
        offered.append(list(ways))
        ways[name]()  # as timing does
        return name

    monkeypatch.setattr(cublas, "fastest", fastest)
    return offered


@pytest.mark.parametrize(("name", "which"), [("torch", None), ("1", 70), ("2", 72), ("3", 80), ("4", 82)])
def test_products_are_what_they_say_with_every_algorithm(library, monkeypatch, name, which) -> None:
    offered = choose(monkeypatch, name)
    x, W, bias, z = numbers(M, K), numbers(2 * N, K).mT[:, N:], numbers(N), numbers(M, N)
    want = x.float() @ W.float() + bias.float()
    torch.testing.assert_close(cublas.linear(x, W, bias).float(), want, rtol=0.01, atol=0.01)
    want = z.float() + x.float() @ W.float()
    library.ran.clear()
    result = cublas.add_product(z, x, W)
    torch.testing.assert_close(z.float(), want, rtol=0.01, atol=0.01)  # timing did not add to it
    assert result is z
    library.ran.clear()
    cublas.add_product(z, x, W)
    assert library.ran == ([which] if which else [])
    assert offered == [["torch", "1", "2", "3", "4"]] * 2  # what cannot run is left out, and each is chosen once


def test_gelu_is_part_of_the_product(library, monkeypatch) -> None:
    choose(monkeypatch, "1")
    x, W, bias = numbers(M, K), numbers(N, K).mT, numbers(N)
    want = F.gelu(x.float() @ W.float() + bias.float(), approximate="tanh")
    torch.testing.assert_close(cublas.linear(x, W, bias, gelu=True).float(), want, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", ["torch", "1", "2", "3", "4"])
def test_products_of_training_are_what_they_say(library, monkeypatch, name, rows) -> None:
    offered = choose(monkeypatch, name)
    x, bias, h = numbers(M, K), numbers(N), numbers(M, N)
    W = numbers(K, N) if rows else numbers(N, K).mT
    exact = x.float() @ W.float()
    close = {"rtol": 0.01, "atol": 0.02}
    torch.testing.assert_close(cublas.product(x, W).float(), exact, **close)

    def otherwise(x):
        y = x.float() @ W.float() + bias.float()
        return F.gelu(y, approximate="tanh").half(), y.half()

    for found, want in zip(cublas.linear_gelu(x, W, bias, otherwise), otherwise(x), strict=True):
        torch.testing.assert_close(found, want, **close)

    def derived(x):
        y = torch.ops.aten.gelu_backward(x.float() @ W.float(), h.float(), approximate="tanh")
        return y.half(), y.sum(0)

    found = cublas.product_dgelu(x, W, h, derived)
    for mine, want in zip(found, derived(x), strict=True):
        torch.testing.assert_close(mine, want, **close)
    assert found[1].dtype == torch.float32
    assert offered == [["torch", "1", "2", "3", "4"]] * 3


def test_another_run_chooses_again(library, monkeypatch, tmp_path) -> None:
    offered = choose(monkeypatch, "1")
    x, W = numbers(M, K), numbers(N, K).mT
    cublas.product(x, W)
    with choices.pinned(tmp_path / "a.json"):
        cublas.product(x, W)
        cublas.product(x, W)
    cublas.product(x, W)
    assert len(offered) == 3


def test_an_algorithm_with_another_result_is_not_offered(library, monkeypatch) -> None:
    offered, library.wrong = choose(monkeypatch, "torch"), 72
    cublas.linear(numbers(M, K), numbers(N, K).mT, numbers(N))
    cublas.add_product(numbers(M, N), numbers(M, K), numbers(N, K).mT)
    assert offered == [["torch", "1", "3", "4"]] * 2


def test_an_algorithm_that_does_not_repeat_itself_is_not_offered(library, monkeypatch) -> None:
    offered, library.restless = choose(monkeypatch, "torch"), 80
    cublas.linear(numbers(M, K), numbers(N, K).mT, numbers(N))
    library.ran.clear()
    cublas.add_product(numbers(M, N), numbers(M, K), numbers(N, K).mT)
    assert offered == [["torch", "1", "2", "4"]] * 2


def test_zeros_do_not_hide_what_an_algorithm_does(library, monkeypatch) -> None:
    """As in the first backward pass of a new model, whose head is zero."""
    offered, library.scales, zeros = choose(monkeypatch, "torch"), 72, torch.zeros(M, K).half()
    W, state = numbers(N, K).mT, torch.get_rng_state()
    assert not cublas.product(zeros, W).any()
    cublas.product_dgelu(zeros, W, numbers(M, N), lambda x: (x @ W, (x @ W).sum(0)))
    assert offered[0] == ["torch", "1", "3", "4"]
    library.scales = 0
    torch.set_rng_state(state)
    assert torch.equal(cublas.numbers_like(zeros), cublas.numbers_like(zeros))
    assert torch.equal(torch.get_rng_state(), state)  # a run's own random numbers stay what they were


def test_threads_do_not_exchange_their_biases(library, monkeypatch) -> None:
    choose(monkeypatch, "1")
    x, W, biases = numbers(M, K), numbers(N, K).mT, [torch.full((N,), float(n)).half() for n in range(4)]
    cublas.linear(x, W, biases[0])
    found: dict[int, torch.Tensor] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: cublas.linear(x, W, biases[n])})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        torch.testing.assert_close(found[n].float() - n, x.float() @ W.float(), rtol=0.01, atol=0.02)


def test_other_products_run_in_torch() -> None:
    x, W = torch.randn(M, K), torch.randn(N, K).mT
    assert not cublas.takes(x, W)
    torch.testing.assert_close(cublas.linear(x, W, torch.ones(N)), x @ W + 1)
    torch.testing.assert_close(cublas.add_product(torch.ones(M, N), x, W), x @ W + 1)
