"""The runtime with one process and with two; devices and precisions that are not available are named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import vitkit.runtime
from tests.training.tiny import forked
from vitkit.errors import ConfigError, DataError, InputError, MissingDependency, UnknownName
from vitkit.runtime import AHEAD, Runtime, on_host, tracker


def test_one_process() -> None:
    runtime = Runtime("cpu")
    assert (runtime.rank, runtime.ranks, runtime.main, runtime.device) == (0, 1, True, torch.device("cpu"))
    model = nn.Linear(2, 2)
    assert runtime.prepare(model) is model
    assert runtime.unwrap(model) is model
    assert runtime.gather("x") == ["x"]
    assert runtime.on_main(lambda: 5) == 5
    runtime.wait()
    runtime.close()


def test_precision() -> None:
    x = torch.ones(2, 2)
    with Runtime("cpu", "bf16").autocast():
        assert torch.is_autocast_enabled("cpu")
    with Runtime("cpu").autocast():
        assert (x @ x).dtype == torch.float32
    with pytest.raises(ConfigError, match="fp16 runs on accelerators only"):
        Runtime("cpu", "fp16")
    with pytest.raises(UnknownName, match="fp23"):
        Runtime("cpu", "fp23")


@pytest.mark.parametrize(("device", "words"), [("cuda", "has no device 'cuda'"), ("toaster", "such as auto, cpu")])
def test_devices_that_are_not_there(device: str, words: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=words):
        Runtime(device)


def test_clip() -> None:
    runtime, p = Runtime("cpu"), nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([p], lr=1.0)
    p.grad = torch.full((4,), 3.0)
    assert runtime.clip(optimizer, [p], None) == pytest.approx(6.0)
    assert torch.equal(p.grad, torch.full((4,), 3.0))
    assert runtime.clip(optimizer, [p], 1.0) == pytest.approx(6.0)
    assert p.grad.norm() == pytest.approx(1.0, rel=1e-4)


def test_two_processes() -> None:
    def work(rank: int) -> None:
        runtime = Runtime("cpu")
        assert (runtime.rank, runtime.ranks, runtime.main) == (rank, 2, rank == 0)
        assert runtime.gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
        assert runtime.sum(torch.tensor([1.0 + rank])).item() == 3
        assert runtime.on_main(lambda: os.getpid()) == runtime.gather(os.getpid())[0]
        with pytest.raises(DataError, match="only here"):
            runtime.on_main(lambda: (_ for _ in ()).throw(DataError("only here")))
        torch.manual_seed(0)
        bare = nn.Linear(3, 1)
        model = runtime.prepare(bare)
        assert runtime.unwrap(model) is bare
        with runtime.no_sync(model):
            model(torch.ones(1, 3)).sum().backward()
        model(torch.full((1, 3), float(rank))).sum().backward()  # mean over processes of 1 + rank
        assert torch.allclose(bare.weight.grad, torch.full((1, 3), 1.5))
        runtime.wait()
        runtime.close()

    assert forked(work, ranks=2) == [0, 0]


def test_importing_the_runtime_imports_neither_torch_nor_accelerate() -> None:
    code = "import sys, vitkit.runtime; print('torch' in sys.modules, 'accelerate' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == [
        "False",
        "False",
    ]


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependency, match=r"pip install 'vitkit\[track\]'"):
        tracker("wandb", "p", ".", "r")
    with pytest.raises(UnknownName, match="wandb, mlflow"):
        tracker("abacus", "p", ".", "r")


def test_results_come_in_order_and_those_before_an_error_are_kept() -> None:
    started: list[int] = []

    def results() -> Iterator[tuple[int, torch.Tensor]]:
        for i in range(3):
            started.append(i)
            yield i, torch.full((2,), float(i))
        raise InputError("the fourth is broken")

    found: list[tuple[int, list[float]]] = []

    def take() -> None:
        for about, tensor in on_host(results()):
            found.append((about, tensor.tolist()))
            assert started[-1] == about  # on the CPU nothing runs ahead

    with pytest.raises(InputError, match="the fourth is broken"):
        take()
    assert found == [(0, [0.0, 0.0]), (1, [1.0, 1.0]), (2, [2.0, 2.0])]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_batches_run_ahead_of_their_results() -> None:
    started: list[int] = []

    def results() -> Iterator[tuple[int, torch.Tensor]]:
        for i in range(6):
            started.append(i)
            yield i, torch.full((2,), float(i), device="cuda")

    for about, tensor in on_host(results()):
        assert tensor.tolist() == [about, about]
        assert started[-1] == min(about + AHEAD, 5)


def test_the_usual_precision_depends_on_the_device() -> None:
    assert Runtime("cpu", "auto").precision == "fp32"
    with pytest.raises(UnknownName, match="auto"):
        Runtime("cpu", "autos")


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16"), (False, "fp32")])
def test_a_gpu_that_only_emulates_bf16_computes_in_fp32(native, precision, monkeypatch) -> None:
    """As a T4 does, many times slower than in fp32."""
    monkeypatch.setattr(vitkit.runtime, "find_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert Runtime("cuda", "auto").precision == precision
