"""Processes that share out work: results come in the order of the tasks, and nothing random happens in them."""

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
        work: a function, or an object with `__call__`, that can be sent to another process.
        tasks: what to do; taken from the iterable as they are needed, so it may be endless.
        workers: processes; 0 works in this one.
        ahead: tasks that each worker has waiting.
        pin: whether tensors land in pinned memory, for a copy to the GPU that does not wait.
    """
    if not workers:
        return map(work, tasks)
    with warnings.catch_warnings():  # torch has an opinion on how many workers there should be; the caller asked
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
                worker_init_fn=_quiet,
                generator=torch.Generator().manual_seed(0),
            )
        )  # else it draws from the global generator


def default_workers(source: Source, ranks: int = 1, spare: bool = False) -> int:
    """One worker for each core that this process may use and does not share; none where reading costs nothing.

    Args:
        source: where images come from.
        ranks: processes that share the cores.
        spare: whether the cores have nothing else to do, so that augmenting images in memory is worth processes too.
    """
    if source.in_memory and not spare:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


class _Calls(Dataset[Any]):
    """What DataLoader indexes: the result of a task."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work

    def __getitem__(self, task: Any) -> Any:
        return self.work(task)


def _same(result: Any) -> Any:
    return result


def _quiet(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends its workers
    parent, forked = multiprocessing.parent_process(), multiprocessing.get_start_method() == "fork"
    expected = parent.pid if parent is not None and parent.pid is not None and forked else os.getppid()
    threading.Thread(target=_end_with, args=(expected,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process soon after its parent was killed. DataLoader's own worker sees that too, but while it starts it
    does not look, and when it ends it waits for somebody to take the results that it still has."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
