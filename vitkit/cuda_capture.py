"""Capture of CUDA graphs: kernels that are launched together, which saves the time between them."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
MOST = 32  # shapes that `Replays` keeps graphs for
CAPTURING = threading.RLock()  # a capture begins by waiting for the device, which would end another thread's


def warm_up(work: Callable[[], object]) -> None:
    """Run work on a separate stream, so that kernels are chosen and loaded before they are captured.

    Args:
        work: CUDA work.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)


def capture(
    work: Callable[[], Result], pool: Any = None, stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture work as a graph; return it with the result, which every replay overwrites.

    Args:
        work: CUDA work that has run before.
        pool: memory pool of another graph whose results this work reads (default: its own).
        stream: the stream to capture on (default: one per device).
    """
    graph = torch.cuda.CUDAGraph()
    with CAPTURING:
        # cuBLAS caches its workspace for the next caller. A captured workspace must belong to this graph alone: one
        # from another graph is freed with that graph, and torch.compile's CUDA graphs reuse theirs.
        torch._C._cuda_clearCublasWorkspaces()
        stream = stream or _stream(torch.cuda.current_device())
        # "thread_local": other threads, such as the one that pins the next batch, may call CUDA meanwhile. With the
        # default of torch such a call makes the capture fail.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = work()
        torch._C._cuda_clearCublasWorkspaces()
    return graph, result


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream of captures on a device. torch has a single one, on the device that captures first."""
    return torch.cuda.Stream(device)


class Replays:
    """Work on CUDA as graphs, one per shape of its input.

    The first input of a shape runs kernel by kernel, which chooses and loads the kernels. From the second on, a graph
    is replayed: kernels follow each other without a gap, and Python is free for something else. Graphs share the memory
    of what they compute on the way. If there is not enough of it for a graph, that shape runs kernel by kernel.

    Args:
        dtype: the type of its input.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.pool: Any = None
        # Shape -> the graph, its input and its result; None if its first input has been seen, () if it has no graph.
        self.graphs: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def __call__(self, work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Do the work.

        Args:
            work: maps a tensor to a tensor; the same for every call.
            x: its input, in any type.
        """
        shape = tuple(x.shape)
        if shape not in self.graphs:
            first = work(x.to(self.dtype))
            self.graphs[shape] = None  # not before: what has failed has chosen nothing
            if len(self.graphs) > MOST:
                self.graphs.popitem(last=False)
            return first
        if self.graphs[shape] is None:
            self.graphs[shape] = self._captured(work, x)
        self.graphs.move_to_end(shape)
        if not self.graphs[shape]:
            return work(x.to(self.dtype))
        graph, still, result = self.graphs[shape]
        still.copy_(x)
        graph.replay()
        return result.clone()

    def _captured(self, work: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Any, ...]:
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        try:
            still = x.new_empty(x.shape, dtype=self.dtype).copy_(x)
            work(still)  # what was chosen for the first input may have lapsed, and nothing can be timed in a capture
            graph, result = capture(lambda: work(still), self.pool)
        except torch.OutOfMemoryError:
            return ()
        return graph, still, result
