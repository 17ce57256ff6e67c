"""Fairness between clients: decoding takes turns between them, and each holds at most so many pixels at a time."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from vitkit.errors import Busy

T = TypeVar("T")


LARGE = 16_000_000  # pixels; larger images may not take the last thread, because they take seconds


class FairPool:
    """Threads that take work from each client in turn, and the smallest work of a client first.

    Args:
        threads: number of threads; at least two are made, one of which large work never takes.
    """

    def __init__(self, threads: int) -> None:
        threads = max(threads, 2)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="vitkit-decode")
        self._most_large, self._large = threads - 1, 0  # large works that may run, and that are running
        self._put_off = 0  # calls of _next that found only large work
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._waiting: dict[str, list[tuple[int, int, Future[Any], Callable[[], Any]]]] = {}  # heaps, next client first

    def submit(self, client: str, size: int, work: Callable[[], T]) -> Future[T]:
        """Add work.

        Args:
            client: whose it is.
            size: what it costs, compared with other work of the same client.
            work: the function to call.
        """
        future: Future[T] = Future()
        with self._lock:
            heapq.heappush(self._waiting.setdefault(client, []), (size, next(self._count), future, work))
        self._pool.submit(self._next)
        return future

    def _next(self) -> None:
        with self._lock:
            free = self._large < self._most_large
            client = next((one for one, heap in self._waiting.items() if free or heap[0][0] <= LARGE), None)
            if client is None:
                self._put_off += 1
                return
            heap = self._waiting.pop(client)
            size, _, future, work = heapq.heappop(heap)
            if heap:
                self._waiting[client] = heap  # behind all other clients
            self._large += size > LARGE
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # it belongs to whoever waits for the result
                future.set_exception(error)
        if size > LARGE:
            with self._lock:
                self._large -= 1
                again, self._put_off = self._put_off, 0
            for _ in range(again):
                self._next()

    def shutdown(self) -> None:
        """Finish all work, then end the threads."""
        self._pool.shutdown()


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
