"""Fairness between clients: decoding takes turns between them, and each holds at most so many pixels at a time."""

from __future__ import annotations

import ctypes
import functools
import heapq
import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from vitkit.errors import Busy

T = TypeVar("T")


LARGE = (
    2_000_000  # pixels; larger images have threads of their own, because they take from a tenth of a second to seconds
)
NICE = 10  # how much less of a busy processor those threads get than the model and the small images


class Lane:
    """Threads that take work from each client in turn, and the smallest work of a client first.

    Args:
        threads: number of threads.
        name: what they are called.
        start: called first in each of them.
    """

    def __init__(self, threads: int, name: str, start: Callable[[], None] = lambda: None) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=start)
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._waiting: dict[str, list[tuple[int, int, Future[Any], Callable[[], Any]]]] = {}  # heaps, next client first

    def submit(self, client: str, size: int, work: Callable[[], T]) -> Future[T]:
        """Add work; see `FairPool.submit`."""
        future: Future[T] = Future()
        with self._lock:
            heapq.heappush(self._waiting.setdefault(client, []), (size, next(self._count), future, work))
        self._pool.submit(self._next)
        return future

    def _next(self) -> None:
        with self._lock:
            client = next(iter(self._waiting))
            heap = self._waiting.pop(client)
            _, _, future, work = heapq.heappop(heap)
            if heap:
                self._waiting[client] = heap  # behind all other clients
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # it belongs to whoever waits for the result
                future.set_exception(error)

    def shutdown(self) -> None:
        """Finish all work, then end the threads."""
        self._pool.shutdown()


class FairPool:
    """Two lanes for decoding: small images never wait for large ones, and large ones run at a lower priority.

    Args:
        threads: threads for small images; large ones have one thread less, but at least one.
    """

    def __init__(self, threads: int) -> None:
        self._small = Lane(threads, "vitkit-decode")
        self._large = Lane(max(1, threads - 1), "vitkit-decode-large", lower_priority)

    def submit(self, client: str, size: int, work: Callable[[], T]) -> Future[T]:
        """Add work.

        Args:
            client: whose it is.
            size: pixels to decode.
            work: the function to call.
        """
        return (self._large if size > LARGE else self._small).submit(client, size, work)

    def shutdown(self) -> None:
        """Finish all work, then end the threads."""
        self._small.shutdown()
        self._large.shutdown()


def lower_priority() -> None:
    """Let all other threads of this process go first when the processors are busy. Linux has priorities of threads."""
    if sys.platform == "linux":
        with suppress(OSError):  # a container may forbid it
            lower = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE, 19)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), lower)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim if sys.platform == "linux" else None
    except (OSError, AttributeError):  # another C library
        return None


def trim() -> None:
    """Give the memory of large requests back to the system, which glibc otherwise keeps for later. Runs in a thread."""
    if (function := _malloc_trim()) is not None:
        function(0)


class Budget:
    """The pixels that each client may have in progress.

    Args:
        most: pixels per client.
        small: a request of at most so many pixels is always accepted, so that a client that shares its address with a
            greedy one is still answered.
    """

    def __init__(self, most: float, small: float) -> None:
        self.most, self.small = most, small
        self.held: Counter[str] = Counter()  # pixels in progress by client; used by one thread

    @contextmanager
    def reserve(self, client: str, pixels: int) -> Iterator[None]:
        """Hold pixels inside a `with` block.

        Raises:
            Busy: the client has too many in progress.
        """
        if pixels > self.small and self.held[client] + pixels > self.most:
            raise Busy(
                f"The server is busy: your requests in progress hold {self.held[client] / 1e6:.0f} megapixels, and "
                f"this one would exceed the {self.most / 1e6:g} per client. Wait for their answers, then try again."
            )
        self.held[client] += pixels
        try:
            yield
        finally:
            self.held[client] -= pixels
            if not self.held[client]:
                del self.held[client]
