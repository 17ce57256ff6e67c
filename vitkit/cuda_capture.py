"""Capture of CUDA graphs: kernels that are launched together, which saves the time between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


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
        stream: the stream to capture on, of this thread alone (default: torch's, which only the main thread may use).
    """
    graph = torch.cuda.CUDAGraph()
    # cuBLAS caches its workspace for the next caller. A captured workspace must belong to this graph alone: one from
    # another graph is freed with that graph, and torch.compile's CUDA graphs reuse theirs.
    torch._C._cuda_clearCublasWorkspaces()
    # "thread_local": other threads, such as the one that pins the next batch, may call CUDA meanwhile. With the default
    # of torch such a call makes the capture fail.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = work()
    torch._C._cuda_clearCublasWorkspaces()
    return graph, result
