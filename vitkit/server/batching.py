"""Gather single images into batches, which one thread runs through the model.

A request reserves room before its images are decoded, and submits them afterwards. A batch starts when it is full, when
no more images are expected, or when its first image has waited `max_delay`. Expected images are those reserved but not
yet submitted, unless they take long to decode, and, for a moment after a batch, as many as that batch held, because
clients often ask again soon. So a single user never waits, many users share batches, and the next batch gathers while
the model runs. The number of reserved items is bounded, and `close` answers all of them before it returns.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from vitkit.errors import Busy

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class _Waiting(Generic[T, R]):
    item: T
    answer: Future[R]
    since: float


class Reservation(Generic[T, R]):
    """Room for some items; call it to submit one of them.

    Args:
        batcher: where the room is.
        count: number of items, all of which are expected soon.
    """

    def __init__(self, batcher: Batcher[T, R], count: int) -> None:
        self._batcher, self._unused, self._expected = batcher, count, count

    def __call__(self, item: T) -> Future[R]:
        """Submit an item."""
        assert self._unused > 0, "more items than were reserved"
        self._unused -= 1
        answer = self._batcher.enqueue(item)
        self.expect(min(self._expected, self._unused))
        return answer

    def expect(self, count: int) -> None:
        """Say how many of the items will be submitted soon: a batch may wait for them, and for no others."""
        self._batcher.expect(count - self._expected)
        self._expected = count


class Batcher(Generic[T, R]):
    """Gather items into batches and run them in a thread of its own.

    Args:
        run: returns one result per item of a batch, in order.
        max_batch: maximum number of items in a batch.
        max_delay: maximum seconds that an item waits for others that are expected.
        max_queue: maximum number of items reserved and not yet answered.
        observe: called with the size and the seconds of every batch.
        start: called first in the thread (default: nothing).
    """

    def __init__(
        self,
        run: Callable[[Sequence[T]], Sequence[R]],
        *,
        max_batch: int,
        max_delay: float,
        max_queue: int,
        observe: Callable[[int, float], None] = lambda size, seconds: None,
        start: Callable[[], None] = lambda: None,
    ) -> None:
        self.run, self.max_batch, self.max_delay, self.max_queue = run, max_batch, max_delay, max_queue
        self.observe, self.start = observe, start
        self.held = 0  # reserved and not yet released
        self.coming = 0  # reserved, not yet submitted, and expected soon
        self.rate = 0.0  # moving average of items per second
        self._last = 0  # size of the last batch
        self._ended = -math.inf  # when it ended
        self._waiting: deque[_Waiting[T, R]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="vitkit-batcher", daemon=True)
        self._thread.start()

    @contextmanager
    def reserve(self, count: int = 1) -> Iterator[Reservation[T, R]]:
        """Reserve room for `count` items inside a `with` block.

        Raises:
            Busy: there is no room, or the batcher is closing.
        """
        with self._changed:
            if self._closed:
                raise Busy("The server is stopping; send the request to another one.")
            if self.held + count > self.max_queue:
                raise Busy(
                    f"The server is busy: {self.held} images are waiting and the limit is {self.max_queue}. "
                    f"Try again in {self.retry_after()} s."
                )
            self.held += count
            self.coming += count
        reservation = Reservation(self, count)
        try:
            yield reservation
        finally:
            with self._changed:
                self.held -= count
            reservation.expect(0)

    def expect(self, change: int) -> None:
        """Add to the number of items that are expected soon."""
        with self._changed:
            self.coming += change
            self._changed.notify_all()

    def retry_after(self) -> int:
        """Seconds after which a client should try again."""
        return min(60, max(1, round(self.held / self.rate))) if self.rate else 1

    def close(self) -> None:
        """Refuse new items, answer everything that was reserved, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def enqueue(self, item: T) -> Future[R]:
        """Add an item to the next batch."""
        answer: Future[R] = Future()
        with self._changed:
            self._waiting.append(_Waiting(item, answer, time.perf_counter()))
            self._changed.notify_all()
        return answer

    def _gather(self) -> list[_Waiting[T, R]]:
        """Wait for the next batch; an empty one means that the batcher is closed and every item was answered."""
        with self._changed:
            while not self._waiting and not (self._closed and self.held == 0):
                self._changed.wait()
            while 0 < len(self._waiting) < self.max_batch:
                first = self._waiting[0].since
                clients_return = first - self._ended < self.max_delay and len(self._waiting) < self._last
                left = first + self.max_delay - time.perf_counter()
                if left <= 0 or not (self.coming > 0 or clients_return):
                    break
                self._changed.wait(left)
            return [self._waiting.popleft() for _ in range(min(self.max_batch, len(self._waiting)))]

    def _work(self) -> None:
        self.start()
        while batch := self._gather():
            batch = [one for one in batch if one.answer.set_running_or_notify_cancel()]
            if not batch:  # every client of this batch has disconnected
                continue
            start = time.perf_counter()
            try:
                answers = list(zip(batch, self.run([one.item for one in batch]), strict=True))
            except BaseException as error:  # raised to the clients of this batch; the thread keeps running
                for one in batch:
                    one.answer.set_exception(error)
                continue
            self._last, self._ended = len(batch), time.perf_counter()
            seconds = max(self._ended - start, 1e-9)
            self.rate = 0.7 * self.rate + 0.3 * len(batch) / seconds if self.rate else len(batch) / seconds
            self.observe(len(batch), seconds)
            for one, result in answers:
                one.answer.set_result(result)
