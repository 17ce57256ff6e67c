"""Worker processes: results come in the order of the tasks, and workers draw no random numbers of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from vitkit.data.base import Source

Task = TypeVar("Task")
Result = TypeVar("Result")


def parallel_map(
    work: Callable[[Task], Result], tasks: Iterable[Task], workers: int, *, ahead: int = 2, pin: bool = False
) -> Iterator[Result]:
    """Yield work(task) for each task, in order.

    Args:
        work: a callable that can be sent to another process.
        tasks: the tasks; they are taken as needed, so there may be endlessly many.
        workers: number of worker processes; 0 works in this process.
        ahead: tasks queued for each worker (default: 2).
        pin: whether tensors are placed in pinned memory, for asynchronous copies to a GPU (default: False).
    """
    if not workers:
        return map(work, tasks)
    with warnings.catch_warnings():  # torch warns about more workers than cores, but the caller asked for them
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return iter(
            DataLoader(
                _Calls(work),
                batch_size=None,
                sampler=tasks,
                num_workers=workers,
                prefetch_factor=ahead,
                pin_memory=pin,
                collate_fn=_same,
                worker_init_fn=_start_worker,
                generator=torch.Generator().manual_seed(0),  # or it would draw from the global one
            )
        )


def default_workers(source: Source, ranks: int = 1, spare: bool = False) -> int:
    """Return the default number of workers: one per core that this process may use, or none for images in memory.

    Args:
        source: where the images come from.
        ranks: number of processes that share the cores (default: 1).
        spare: whether the cores are otherwise idle, so that augmenting images in memory is worth workers too.
    """
    if source.in_memory and not spare:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


class _Calls(Dataset[Any]):
    """A data set whose index is a task and whose item is its result."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work

    def __getitem__(self, task: Any) -> Any:
        return self.work(task)


def _same(result: Any) -> Any:
    return result


def _start_worker(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C and ends its workers
    parent, forked = multiprocessing.parent_process(), multiprocessing.get_start_method() == "fork"
    expected = parent.pid if parent is not None and parent.pid is not None and forked else os.getppid()
    threading.Thread(target=_end_with, args=(expected,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process soon after its parent was killed. DataLoader's own check does not run while a worker starts, and
    a worker that ends waits until someone takes its last results."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
