"""Ctrl-C and requests to terminate, noted instead of obeyed at once: the step under way is finished and saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C or a request to terminate comes; the second one is not caught."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, frame: Any) -> None:
        asked.append(number)
        for one in caught:
            signal.signal(one, old[one])

    caught = (signal.SIGINT, signal.SIGTERM)
    old = {one: signal.signal(one, note) for one in caught}
    try:
        yield asked
    finally:
        for one in caught:
            signal.signal(one, old[one])
