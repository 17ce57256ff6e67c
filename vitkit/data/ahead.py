"""Work that threads do ahead of the one who needs it, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from vitkit.data.loader import Made

T = TypeVar("T")

THREADS = 8  # that decode where there are no worker processes
BATCHES = 2  # that are made ready on a GPU while the model computes another


def by_threads(work: Callable[[int], T], tasks: Iterable[int]) -> Generator[T, None, None]:
    """Yield work(task) for each task; Pillow lets other threads run while it decodes.

    Args:
        work: what to do; called in several threads.
        tasks: the tasks, of which a few are begun before they are needed.
    """
    waiting, pool = deque[Future[T]](), ThreadPoolExecutor(THREADS, "decode")
    try:
        for task in tasks:
            waiting.append(pool.submit(work, task))
            if len(waiting) > 2 * THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def made_ahead(
    made: Generator[Made, None, None], device: torch.device, stop: Callable[[], None]
) -> Generator[Made, None, None]:
    """Make batches by a thread and a stream of their own, while the model computes others.

    Args:
        made: the batches.
        device: a GPU.
        stop: ends the waiting for workers, if the batches are no longer wanted.
    """
    stream = torch.cuda.Stream(device, priority=-1)  # before the model, which would wait for it

    def make() -> tuple[Made | None, torch.cuda.Event]:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return next(made, None), stream.record_event()

    thread = ThreadPoolExecutor(1, "batches")
    waiting: deque[Future[tuple[Made | None, torch.cuda.Event]]] = deque()
    try:
        waiting.extend(thread.submit(make) for _ in range(BATCHES))
        while (found := waiting.popleft().result())[0] is not None:
            waiting.append(thread.submit(make))
            (batch, _), ready = found[0], found[1]
            current = torch.cuda.current_stream(device)
            current.wait_event(ready)
            for part in (batch.pixels, batch.labels, batch.weight) if batch is not None else ():
                part.record_stream(current)  # its memory belongs to the other stream
            yield found[0]
    finally:
        stop()
        thread.shutdown(cancel_futures=True)
        made.close()
