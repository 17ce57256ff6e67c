"""Worker processes: results come in the order of the tasks, and workers draw no random numbers of their own.

A worker that dies or no longer answers ends the work with a LostWorker error; no worker outlives the iteration.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from vitkit.data.base import Source
from vitkit.errors import LostWorker

TICK = 1.0  # seconds between two looks at workers that have not answered
PATIENCE = 600.0  # seconds without an answer after which a worker is given up

Task = TypeVar("Task")
Result = TypeVar("Result")


def parallel_map(
    work: Callable[[Task], Result],
    tasks: Iterable[Task],
    workers: int,
    *,
    ahead: int = 2,
    pin: bool = False,
    on_wait: Callable[[float], None] | None = None,
) -> Iterator[Result]:
    """Yield work(task) for each task, in order.

    Args:
        work: a callable that can be sent to another process.
        tasks: the tasks; they are taken as needed, so there may be endlessly many.
        workers: number of worker processes; 0 works in this process.
        ahead: tasks queued for each worker (default: 2).
        pin: whether tensors are placed in pinned memory, for asynchronous copies to a GPU (default: False).
        on_wait: called every TICK seconds with the seconds waited for a worker so far; may raise (default: nothing).

    Raises:
        LostWorker: a worker died, or did not answer for PATIENCE seconds.
    """
    if not workers:
        return map(work, tasks)
    return _in_workers(work, tasks, workers, ahead, pin, on_wait or (lambda seconds: None))


def _in_workers(
    work: Callable[[Task], Result],
    tasks: Iterable[Task],
    workers: int,
    ahead: int,
    pin: bool,
    on_wait: Callable[[float], None],
) -> Iterator[Result]:
    others = multiprocessing.active_children()
    with (
        _no_handler_of_child_signals(),
        warnings.catch_warnings(),
    ):  # torch warns about more workers than cores, but the caller asked for them
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        results: Iterator[Any] | None = iter(
            DataLoader(
                _Calls(work),
                batch_size=None,
                sampler=tasks,
                num_workers=workers,
                prefetch_factor=ahead,
                pin_memory=pin,
                collate_fn=_same,
                worker_init_fn=start_worker,
                generator=torch.Generator().manual_seed(0),  # or it would draw from the global one
                timeout=TICK,
            )
        )
    processes = [process for process in multiprocessing.active_children() if process not in others]
    nothing, watch = object(), _Watch(processes, on_wait)
    try:
        while (result := _next(results, nothing, watch)) is not nothing:
            yield result
    finally:
        watch.close()
        results = None  # ends the workers, except those that no longer answer
        kill(processes)


@contextmanager
def _no_handler_of_child_signals() -> Iterator[None]:
    """Remove the handler that DataLoader sets: it raises wherever the program is when a worker dies, even in the middle
    of an update of the weights. `_next` finds out soon enough."""
    here = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if here else None
    yield
    if before is not None:
        signal.signal(signal.SIGCHLD, before)


class _Watch:
    """A thread that frees a process from workers that no longer answer.

    torch waits TICK seconds for a result. But the memory of a tensor is handed over after its result has arrived, and
    torch waits for that without a limit.

    Args:
        processes: the workers.
        on_wait: see `parallel_map`.
    """

    def __init__(self, processes: list[Any], on_wait: Callable[[float], None]) -> None:
        self.processes, self.on_wait = processes, on_wait
        self.began: float | None = None  # when the process began to wait for its next result; None if it does not wait
        self.asked = 0.0  # when it last asked torch for it
        self.error: BaseException | None = None  # why the workers were killed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def check(self, waited: float) -> None:
        """Raise if the wait is to end."""
        self.on_wait(waited)
        if waited > PATIENCE:
            raise LostWorker(
                f"No worker process has sent images for {waited:.0f} s. Check that the images can be read (a network "
                f"drive may hang), or use --workers 0."
            )

    def _look(self) -> None:
        while not self._over.wait(TICK):
            began, now = self.began, time.monotonic()
            if began is None or now - self.asked < 3 * TICK:
                continue
            try:
                self.check(now - began)
            except BaseException as error:
                self.error = error
                kill(self.processes)  # ends the wait
                return


def _next(results: Any, nothing: object, watch: _Watch) -> Any:
    """Return the next result, or `nothing` at the end. If it does not come, kill all workers and raise."""
    began = watch.asked = watch.began = time.monotonic()
    try:
        while True:
            try:
                return next(results, nothing)
            except (RuntimeError, OSError, EOFError) as error:
                if watch.error is not None:
                    raise watch.error from error
                if isinstance(error, (ConnectionError, EOFError)):  # from a worker that is just ending
                    multiprocessing.connection.wait([process.sentinel for process in watch.processes], TICK)
                if dead := [process for process in watch.processes if process.exitcode not in (None, 0)]:
                    raise LostWorker(epitaph(dead[0])) from error
                if not str(error).startswith("DataLoader timed out"):
                    raise
                watch.asked = time.monotonic()
                watch.check(watch.asked - began)
    except BaseException:
        kill(watch.processes)  # now, because torch would wait for each of them
        raise
    finally:
        watch.began = None


def epitaph(process: Any) -> str:
    """Say how a worker process ended."""
    if process.exitcode >= 0:
        return f"The worker process {process.pid} ended with exit code {process.exitcode}."
    name = signal.Signals(-process.exitcode).name
    cause = " The system does this when memory runs out; use fewer --workers." if name == "SIGKILL" else ""
    return f"The worker process {process.pid} was killed by {name}.{cause}"


def kill(processes: list[Any]) -> None:
    """End the worker processes that are still alive."""
    for process in processes:
        if process.is_alive():
            process.kill()  # SIGTERM does not end a process that hangs or is stopped
            process.join()


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


def start_worker(worker: int) -> None:
    """Leave signals to the main process, and end with it; to be called in a worker."""
    for name in ("SIGINT", "SIGHUP"):  # the main process handles them and ends its workers
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent, forked = multiprocessing.parent_process(), multiprocessing.get_start_method() == "fork"
    expected = parent.pid if parent is not None and parent.pid is not None and forked else os.getppid()
    threading.Thread(target=_end_with, args=(expected,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process soon after its parent was killed. DataLoader's own check does not run while a worker starts, and
    a worker that ends waits until someone takes its last results."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
