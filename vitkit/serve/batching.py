"""Single images -> batches: one thread runs the model, whoever waits is answered from the same batch.

An image is announced (`reserve`) before it is decoded. A batch leaves when it is full, when nobody who is expected is
missing, or when its first image has waited max_delay. Expected are those who were announced, and for a moment after a
batch as many as it held: clients come back. So one lone user never waits, many users share batches, and while the model
runs the next batch gathers by itself. What is reserved is bounded, and all of it is answered before `close` returns.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

from vitkit.errors import Busy

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class _Waiting(Generic[T, R]):
    item: T
    answer: Future[R]
    since: float


class Batcher(Generic[T, R]):
    """Gathers items into batches and runs them in a thread of its own.

    Args:
        run: gives one result for each item of a batch, in order.
        max_batch: items in a batch, at most.
        max_delay: seconds that an item waits, at most, for others that are reserved but not there yet.
        max_queue: items reserved and not yet answered, at most.
        observe: called with the size and the seconds of every batch.
    """

    def __init__(
        self,
        run: Callable[[Sequence[T]], Sequence[R]],
        *,
        max_batch: int,
        max_delay: float,
        max_queue: int,
        observe: Callable[[int, float], None] = lambda size, seconds: None,
    ) -> None:
        self.run, self.max_batch, self.max_delay, self.max_queue = run, max_batch, max_delay, max_queue
        self.observe = observe
        self.held = 0  # reserved and not yet released
        self.coming = 0  # reserved and not yet submitted
        self.rate = 0.0  # items a second that the last batches ran at
        self._last = 0  # size of the last batch
        self._ended = -math.inf  # when it ended
        self._waiting: deque[_Waiting[T, R]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="vitkit-batcher", daemon=True)
        self._thread.start()

    def reserve(self, count: int = 1) -> Reservation[T, R]:
        """Announce `count` items; use the result in a `with` block, which gives back what was not used.

        Raises:
            Busy: there is no room, or the batcher is closing.
        """
        with self._changed:
            if self._closed:
                raise Busy("The server is stopping; send the request to another one.")
            if self.held + count > self.max_queue:
                raise Busy(
                    f"The server is busy: {self.held} images are waiting and {self.max_queue} is its limit. "
                    f"Try again in {self.patience()} s."
                )
            self.held += count
            self.coming += count
        return Reservation(self, count)

    def patience(self) -> int:
        """Seconds after which it is worth to try again."""
        return min(60, max(1, round(self.held / self.rate))) if self.rate else 1

    def close(self) -> None:
        """Refuse what is new, answer everything that was reserved, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _submit(self, item: T) -> Future[R]:
        answer: Future[R] = Future()
        with self._changed:
            self.coming -= 1
            self._waiting.append(_Waiting(item, answer, time.monotonic()))
            self._changed.notify_all()
        return answer

    def _release(self, count: int, unused: int) -> None:
        with self._changed:
            self.held -= count
            self.coming -= unused
            self._changed.notify_all()

    def _expecting(self) -> bool:
        """Whether it is worth to wait for one more."""
        just_now = self._waiting[0].since - self._ended < self.max_delay
        return self.coming > 0 or (just_now and len(self._waiting) < self._last)

    def _gather(self) -> list[_Waiting[T, R]]:
        """The next batch; empty when the batcher is closed and nobody is left."""
        with self._changed:
            while not self._waiting and not (self._closed and self.held == 0):
                self._changed.wait()
            while 0 < len(self._waiting) < self.max_batch and self._expecting():
                left = self._waiting[0].since + self.max_delay - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return [self._waiting.popleft() for _ in range(min(self.max_batch, len(self._waiting)))]

    def _work(self) -> None:
        while batch := self._gather():
            batch = [one for one in batch if one.answer.set_running_or_notify_cancel()]
            if not batch:  # whoever asked has gone
                continue
            start = time.perf_counter()
            try:
                results = self.run([one.item for one in batch])
            except BaseException as error:  # it belongs to those who wait; this thread goes on
                for one in batch:
                    one.answer.set_exception(error)
                continue
            seconds = time.perf_counter() - start
            self._last, self._ended = len(batch), time.monotonic()
            self.rate = 0.7 * self.rate + 0.3 * len(batch) / seconds if self.rate else len(batch) / seconds
            self.observe(len(batch), seconds)
            for one, result in zip(batch, results, strict=True):
                one.answer.set_result(result)


class Reservation(Generic[T, R]):
    """Room for some items of one request; made by `Batcher.reserve`."""

    def __init__(self, batcher: Batcher[T, R], count: int) -> None:
        self.batcher, self.count, self.used = batcher, count, 0

    def submit(self, item: T) -> Future[R]:
        """Hand in one of the announced items; the future holds its result."""
        assert self.used < self.count, "more items than were reserved"
        self.used += 1
        return self.batcher._submit(item)

    def __enter__(self) -> Reservation[T, R]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.batcher._release(self.count, self.count - self.used)
