"""Worker processes that write their results into memory which they share with this one, one slot per task.

Nothing is copied between processes and this process opens no file per result; on CUDA the memory is pinned, so that
slots are copied to the GPU while the next ones are filled. Workers take the next task themselves as soon as a slot is
free, so none of them waits for this process while it computes.
"""

from __future__ import annotations

import mmap
import multiprocessing
import pickle
import selectors
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from vitkit.data.workers import PATIENCE, TICK, epitaph, kill, start_worker
from vitkit.errors import LostWorker
from vitkit.types import Array

Result = TypeVar("Result")
Work = Callable[[int, Array], Result]  # (task, its slot [size] uint8) -> what this process is told about it


def available() -> bool:
    """Return whether processes are forked here; others do not inherit the memory."""
    return multiprocessing.get_start_method() == "fork"


class Slots(Generic[Result]):
    """Results of tasks 0, 1, ..., in order, with the slots that the workers filled.

    Args:
        work: what a worker does for a task; it writes to the slot and returns something small.
        tasks: number of tasks.
        workers: number of worker processes, at least 1; they start at once.
        slots: number of slots. At most this many results can be taken before the first one is released.
        size: bytes per slot.
        pin: whether to pin the memory, for asynchronous copies to a GPU.
    """

    def __init__(self, work: Work[Result], tasks: int, workers: int, *, slots: int, size: int, pin: bool) -> None:
        self.tasks, self.slots, self.pin = tasks, slots, pin
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE  # pages are pinned, so no two slots share one
        self.taken = 0
        self._stopped = False
        self._ready: dict[int, tuple[Result, Exception | None]] = {}
        self._memory = mmap.mmap(-1, max(1, slots * self.size))  # shared and anonymous: not limited by /dev/shm
        self._all = torch.frombuffer(self._memory, dtype=torch.uint8)[: slots * self.size].view(slots, self.size)
        self._registered = 0  # slots whose memory is pinned; without it copies are only slower
        context = multiprocessing.get_context("fork")
        self._free = context.Semaphore(slots)
        self._next = context.Value("q", 0)
        self._selector = selectors.DefaultSelector()
        self._processes: list[Any] = []
        with warnings.catch_warnings():  # Python warns that this process has threads; workers use none of their locks
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded")
            for _ in range(min(workers, tasks)):
                receive, send = context.Pipe(duplex=False)
                process = context.Process(target=self._run, args=(work, send), daemon=True)
                process.start()
                send.close()
                self._processes.append(process)
                self._selector.register(receive, selectors.EVENT_READ, process)

    def take(self) -> tuple[Result, Tensor]:
        """Wait for the next task: what its worker said, and its slot [size] uint8, which is valid until `release`.

        Raises:
            LostWorker: a worker died, or did not answer for PATIENCE seconds.
        """
        if self.pin and self.taken < self.slots:  # after the fork, and slot by slot: all at once would take 0.2 s
            self._registered += 1
            torch.cuda.cudart().cudaHostRegister(self._slot(self.taken).data_ptr(), self.size, 0)
        began = time.monotonic()
        while self.taken not in self._ready:
            for key, _ in self._selector.select(TICK):
                self._receive(key.fileobj, key.data)  # type: ignore[arg-type]
            if (waited := time.monotonic() - began) > PATIENCE:
                self.close()
                raise LostWorker(
                    f"No worker process has sent images for {waited:.0f} s. Check that the images can be read "
                    f"(a network drive may hang), or use --workers 0."
                )
        result, error = self._ready.pop(self.taken)
        if error is not None:
            self.close()
            raise error
        self.taken += 1
        return result, self._slot(self.taken - 1)

    def _slot(self, task: int) -> Tensor:
        return self._all[task % self.slots]

    def release(self, count: int = 1) -> None:
        """Let workers fill the oldest slots that were taken.

        Args:
            count: how many.
        """
        for _ in range(count):
            self._free.release()

    def stop(self) -> None:
        """End the workers, so that a thread which waits in `take` stops waiting; then call `close`."""
        self._stopped = True
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """End the workers. Slots that were taken stay readable."""
        for key in list((self._selector.get_map() or {}).values()):  # None: closed before
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        kill(self._processes)
        self._processes = []
        if self._registered:
            torch.cuda.synchronize()  # copies from this memory may be under way
        while self._registered:
            self._registered -= 1
            torch.cuda.cudart().cudaHostUnregister(self._slot(self._registered).data_ptr())

    def __enter__(self) -> Slots[Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()  # nobody took anything: a generator that never began has no `finally`

    def _receive(self, pipe: Connection, process: Any) -> None:
        try:
            task, result, error = pipe.recv()
            self._ready[task] = result, error
        except (EOFError, OSError, pickle.UnpicklingError):  # the worker has ended, perhaps in the middle of a message
            self._selector.unregister(pipe)
            pipe.close()
            process.join(TICK)
            if self._stopped or process.exitcode != 0:
                self.close()
                raise LostWorker(epitaph(process)) from None

    def _run(self, work: Work[Result], pipe: Connection) -> None:
        start_worker(0)
        torch.set_num_threads(1)
        slots = self._all.numpy()
        while True:
            self._free.acquire()
            with self._next.get_lock():
                task, self._next.value = self._next.value, self._next.value + 1
            if task >= self.tasks:
                self._free.release()  # for the next worker, which has nothing to do either
                return
            try:
                pipe.send((task, work(task, slots[task % self.slots]), None))
            except Exception as error:  # raised again where the result is taken
                pipe.send((task, None, _portable(error)))


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
