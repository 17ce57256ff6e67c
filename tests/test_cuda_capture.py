"""Graphs by shape: what a stand-in for CUDA graphs replays is what the work computes, for every input."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from vitkit import cuda_capture
from vitkit.cuda_capture import Replays


class Graph:
    """Replays work as a CUDA graph does: it reads the tensors that were captured and overwrites the captured result."""

    def __init__(self, work) -> None:
        self.work, self.result = work, work().clone()

    def replay(self) -> None:
        self.result.copy_(self.work())


@pytest.fixture
def captures(monkeypatch):
    """The memory pools that were captured into."""
    pools = []

    def capture(work, pool):
        pools.append(pool)
        graph = Graph(work)
        return graph, graph.result

    monkeypatch.setattr(cuda_capture, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    return pools


class Doubled:
    """Work that counts its calls and the types it is given."""

    def __init__(self) -> None:
        self.types: list[torch.dtype] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.types.append(x.dtype)
        return 2 * x


def test_one_thread_captures_at_a_time_and_on_its_devices_stream(monkeypatch) -> None:
    inside, streams, current = [], [], threading.local()

    @contextmanager
    def graph(made, pool, stream, capture_error_mode):
        inside.append(stream)
        streams.append(stream)
        time.sleep(0.05)  # long enough for the other to come in
        assert len(inside) == 1
        inside.pop()
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.device)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    cuda_capture._stream.cache_clear()

    def capture(device: int) -> int:
        current.device = device
        return cuda_capture.capture(lambda: device)[1]

    try:
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(capture, (0, 1, 0))) == [0, 1, 0]
    finally:
        cuda_capture._stream.cache_clear()
    assert sorted(streams) == ["stream of 0", "stream of 0", "stream of 1"]


def test_a_shape_is_captured_when_it_comes_again_and_results_are_the_callers_own(captures) -> None:
    run, work = Replays(torch.float64), Doubled()
    inputs = [torch.full(shape, float(n)) for n, shape in enumerate([(2, 3), (4, 3), (2, 3), (2, 3), (4, 3), (2, 3)])]
    results, counts = [], []
    for x in inputs:
        results.append(run(work, x))
        counts.append(len(captures))
    for x, result in zip(inputs, results, strict=True):  # also those that later replays could have overwritten
        assert torch.equal(result, 2 * x.double())
    assert counts == [0, 0, 1, 1, 2, 2]
    assert captures == [(0, 1)] * 2  # graphs share their memory
    assert set(work.types) == {torch.float64}


def test_a_layout_does_not_stay_with_the_graph(captures) -> None:
    run, work = Replays(torch.float32), lambda x: x.view(-1).cumsum(0)  # a view needs contiguous memory
    x = torch.arange(6.0).view(2, 3)
    run(work, x)
    assert torch.equal(run(work, x.mT.contiguous().mT), x.view(-1).cumsum(0))


class Choosing:
    """Work that chooses its kernel when it has none, which it must not do during a capture."""

    def __init__(self) -> None:
        self.chosen, self.capturing = False, False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.chosen and self.capturing:
            raise RuntimeError("kernels cannot be timed during a capture")
        self.chosen = True
        return 2 * x


def test_nothing_is_chosen_during_a_capture(captures, monkeypatch) -> None:
    run, work, capture = Replays(torch.float32), Choosing(), cuda_capture.capture

    def strict(function, pool):
        work.capturing = True
        try:
            return capture(function, pool)
        finally:
            work.capturing = False

    monkeypatch.setattr(cuda_capture, "capture", strict)
    run(work, torch.ones(2))
    work.chosen = False  # as when a training run begins, which has choices of its own
    assert torch.equal(run(work, torch.full((2,), 3.0)), torch.full((2,), 6.0))
    assert len(captures) == 1


def test_a_shape_whose_first_input_failed_counts_as_new(captures) -> None:
    run = Replays(torch.float32)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        run(fail, torch.ones(2))
    assert not run.graphs
    assert torch.equal(run(Doubled(), torch.ones(2)), torch.full((2,), 2.0))
    assert not captures


def test_only_the_latest_shapes_are_kept(captures, monkeypatch) -> None:
    monkeypatch.setattr(cuda_capture, "MOST", 2)
    run, work = Replays(torch.float32), Doubled()
    for n in (1, 2, 1, 3, 1, 2):  # 2 is forgotten when 3 comes, and 1 is not
        run(work, torch.ones(n))
    assert list(run.graphs) == [(1,), (2,)]
    assert len(captures) == 1


def test_without_memory_for_a_graph_the_work_is_done_without_one(captures, monkeypatch) -> None:
    def fail(work, pool):
        captures.append(pool)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(cuda_capture, "capture", fail)
    run, work = Replays(torch.float32), Doubled()
    for n in range(4):
        assert torch.equal(run(work, torch.full((2,), float(n))), torch.full((2,), 2.0 * n))
    assert len(captures) == 1  # it is not tried again
