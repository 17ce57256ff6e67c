"""Fairness between clients: decoding takes turns between them, and each holds at most so many pixels at a time."""

from __future__ import annotations

import ctypes
import functools
import heapq
import itertools
import math
import os
import sys
import threading
import time
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
# By number in malloc.h: M_MMAP_THRESHOLD, which otherwise rises with the largest block freed, and M_ARENA_MAX, which
# otherwise is eight heaps per core.
MALLOC = {-3: 2**20, -8: 2}
FADING = 5.0  # seconds after which about a third of what a client has used still counts
FORGOTTEN = 0.0002  # cores; a client that uses less is not there any more
LEAST = 0.03  # cores; a client that uses less never waits
LONGEST = 5.0  # seconds that a request waits
NICE = 10  # how much less of a busy processor those threads get than the model and the small images


class Pace:
    """Slows down the clients that use most of the processors while others use the server too.

    Every client is charged for what its requests cost. While all together keep less than `most` cores busy, or a client
    is alone, nobody waits. Otherwise those that use most wait before their next request, each so long that all use as
    much as is left to them by those that use less. So the clients that ask little find the processors free.

    Args:
        most: cores that all clients together may keep busy before some of them wait.
        clock: the time in seconds.
    """

    def __init__(self, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self._clock = most, clock
        self._lock = threading.Lock()
        self._used: dict[str, tuple[float, float]] = {}  # by client: seconds of work, fading with time; since when
        self._level, self._until = math.inf, -math.inf  # cores per client; until when this holds

    def charge(self, client: str, seconds: float) -> None:
        """Note that a client's request took seconds of a processor."""
        now = self._clock()
        with self._lock:
            self._used[client] = self._fading(client, now) + seconds, now

    def run(self, client: str, work: Callable[[], T]) -> T:
        """Call work, and charge the client for it before its result is known: with that, the client may ask again."""
        start = time.thread_time()
        try:
            return work()
        finally:
            self.charge(client, time.thread_time() - start)

    def wait(self, client: str) -> float:
        """Return how many seconds the next request of a client should wait."""
        now = self._clock()
        with self._lock:
            if now >= self._until:
                self._level, self._until = self._find_level(now), now + FADING / 50
            cores = self._fading(client, now) / FADING
        return min(FADING * math.log(cores / self._level), LONGEST) if cores > self._level else 0.0

    def stop(self) -> None:
        """Let nobody wait from now on."""
        with self._lock:
            self.most = self._level = math.inf

    def _fading(self, client: str, now: float) -> float:
        used, since = self._used.get(client, (0.0, now))
        return used * math.exp((since - now) / FADING)

    def _find_level(self, now: float) -> float:
        """Return the cores that each client may use, so that all together use `most`."""
        cores = {client: self._fading(client, now) / FADING for client in self._used}
        for client, used in cores.items():
            if used < FORGOTTEN:
                del self._used[client]
        left, clients = self.most, len(self._used)
        for used in sorted(used for used in cores.values() if used >= FORGOTTEN):
            if used * clients >= left and len(self._used) > 1:
                return max(left / clients, LEAST)
            left, clients = left - used, clients - 1
        return math.inf


class Lane:
    """Threads that take work from each client in turn, and the smallest work of a client first.

    Args:
        threads: number of threads.
        name: what they are called.
        pace: says which clients must wait, and is charged for the work.
        start: called first in each of them.
    """

    def __init__(self, threads: int, name: str, pace: Pace, start: Callable[[], None] = lambda: None) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=start)
        self._pace, self._changed = pace, threading.Condition()
        self._count = itertools.count()
        self._waiting: dict[str, list[tuple[int, int, Future[Any], Callable[[], Any]]]] = {}  # heaps, next client first

    def submit(self, client: str, size: int, work: Callable[[], T]) -> Future[T]:
        """Add work; see `FairPool.submit`."""
        future: Future[T] = Future()
        with self._changed:
            heapq.heappush(self._waiting.setdefault(client, []), (size, next(self._count), future, work))
            self._changed.notify()
        self._pool.submit(self._next)
        return future

    def _next(self) -> None:
        with self._changed:
            while wait := self._pace.wait(client := min(self._waiting, key=self._pace.wait)):  # the next of equals
                self._changed.wait(wait)
            heap = self._waiting.pop(client)
            _, _, future, work = heapq.heappop(heap)
            if heap:
                self._waiting[client] = heap  # behind all other clients
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(self._pace.run(client, work))
            except BaseException as error:  # it belongs to whoever waits for the result
                future.set_exception(error)

    def shutdown(self) -> None:
        """Finish all work, then end the threads."""
        self._pool.shutdown()


class FairPool:
    """Two lanes for decoding: small images never wait for large ones, and large ones run at a lower priority.

    Args:
        threads: threads for small images; large ones have one thread less, but at least one.
        pace: says which clients must wait, and is charged for the work.
    """

    def __init__(self, threads: int, pace: Pace) -> None:
        self._small = Lane(threads, "vitkit-decode", pace)
        self._large = Lane(max(1, threads - 1), "vitkit-decode-large", pace, lower_priority)

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
def _glibc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None if it is another one."""
    try:
        function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name) if sys.platform == "linux" else None
    except (OSError, AttributeError):
        return None
    return function


def trim() -> None:
    """Give the memory of large requests back to the system, which glibc otherwise keeps for later. Runs in a thread."""
    if (function := _glibc("malloc_trim")) is not None:
        function(0)


def keep_memory_together() -> None:
    """Let glibc use few heaps, and none for large blocks, whose holes would otherwise stay when they are freed."""
    if (function := _glibc("mallopt")) is not None:
        for parameter, value in MALLOC.items():
            function(parameter, value)


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
