"""Work that threads do ahead of the one who needs it, in order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

THREADS = 8  # that decode where there are no worker processes
BATCHES = 2  # that a thread makes ready on a GPU before they are needed


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
    made: Generator[T, None, None],
    device: torch.device,
    stop: Callable[[], None],
    tensors: Callable[[T], Iterable[Tensor]] = lambda found: (),
    ahead: int = BATCHES,
) -> Generator[T, None, None]:
    """Make things on a GPU by a thread and a stream of their own, while another thread uses what was made before.

    Args:
        made: what is made, such as batches; it may itself be made ahead of a thread.
        device: a GPU.
        stop: ends the waiting for workers, if no more is wanted.
        tensors: those whose memory may be freed while the user's stream still reads them. Not needed for a user who
            waits for the GPU first (default: none).
        ahead: how many to begin before they are needed.
    """
    stream = torch.cuda.Stream(device, priority=-1)  # before the model, which would wait for it

    def make() -> tuple[list[T], torch.cuda.Event]:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return list(itertools.islice(made, 1)), stream.record_event()

    thread = ThreadPoolExecutor(1, "batches")
    waiting: deque[Future[tuple[list[T], torch.cuda.Event]]] = deque()
    try:
        waiting.extend(thread.submit(make) for _ in range(ahead))
        while found := (result := waiting.popleft().result())[0]:
            waiting.append(thread.submit(make))
            current = torch.cuda.current_stream(device)
            current.wait_event(result[1])
            for part in tensors(found[0]):
                part.record_stream(current)  # its memory belongs to the other stream
            yield found[0]
            del found, result  # their memory is for the next
    finally:
        stop()
        thread.shutdown(cancel_futures=True)
        made.close()
