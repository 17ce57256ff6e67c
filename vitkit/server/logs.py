"""The server's log: no client can fill it, and whoever reads it slowly stops nobody."""

from __future__ import annotations

import logging
import math
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

LOGGERS = ("", "uvicorn", "uvicorn.access")  # those with handlers of their own, and the one of all others
EVERY_REQUEST = "uvicorn.access"
PERIOD, PER_PERIOD = 60.0, 20  # seconds, and the lines from one place in the code that are written within them
WAITING = 1000  # lines that wait to be written; more are lost
LAST_SECONDS = 2.0  # how long the last lines may take
LAST = [logging.lastResort] if logging.lastResort is not None else []  # writes to stderr where nobody else does
TICK = 0.1  # seconds between two looks at whether the server has stopped


class Apart(logging.Handler):
    """Writes lines in a thread of its own, and few of each kind.

    A line for every malformed request would let a client fill the disk. And a pipe that nobody reads would stop the
    event loop, and with it the server, at the first line that no longer fits.

    Args:
        to: handlers that write the lines.
        few: whether to write at most PER_PERIOD lines from one place in the code in each PERIOD.
        clock: the time in seconds.
    """

    def __init__(
        self, to: Sequence[logging.Handler], few: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._to, self._few, self._clock = to, few, clock
        self._lines: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}  # by place: when its period began, lines since then
        self._lost, self._until = 0, math.inf  # until when the thread waits for room
        self._thread = threading.Thread(target=self._write, name="vitkit-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a line to the thread, or drop it."""
        if self._few and not self._is_wanted(record):
            return
        if not self._put(record):
            self._lost += 1
        elif self._lost and self._put(_note(f"{self._lost:,} lines of the log were lost")):
            self._lost = 0

    def close(self) -> None:
        """Write what is waiting, if somebody reads it, and end the thread."""
        self._until = time.monotonic() + LAST_SECONDS
        self._lines.put(None)  # does not count towards WAITING
        self._thread.join(LAST_SECONDS + 2 * TICK)
        super().close()

    def _put(self, record: logging.LogRecord) -> bool:
        """Hand a line to the thread; return whether there was room for it."""
        if room := self._lines.qsize() < WAITING:
            self._lines.put(record)
        return room

    def _is_wanted(self, record: logging.LogRecord) -> bool:
        place, now = (record.pathname, record.lineno), self._clock()
        began, lines = self._seen.get(place, (now, 0))
        if now - began >= PERIOD:
            if lines > PER_PERIOD:
                self._put(_note(f"{lines - PER_PERIOD:,} lines like the next one were left out"))
            began, lines = now, 0
        self._seen[place] = began, lines + 1
        return lines < PER_PERIOD

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            for handler in LAST if record.pathname == __file__ else self._to:
                if record.levelno >= handler.level and self._has_room(handler):
                    handler.handle(record)

    def _has_room(self, handler: logging.Handler) -> bool:
        """Wait until a line can be written; return whether it can."""
        while time.monotonic() < self._until:
            try:
                if select.select([], [handler.stream], [], TICK)[1]:  # type: ignore[attr-defined]
                    return True
            except (AttributeError, OSError, ValueError):  # no file, or a system that cannot say
                return True
        return False


@contextmanager
def written_apart() -> Iterator[None]:
    """Write the log of this process in threads of their own for a while."""
    before = {name: logging.getLogger(name).handlers for name in LOGGERS}
    apart = {
        name: Apart(handlers or LAST, few=name != EVERY_REQUEST)
        for name, handlers in before.items()
        if handlers or not name
    }
    for name, handler in apart.items():
        logging.getLogger(name).handlers = [handler]
    try:
        yield
    finally:
        for name, handler in apart.items():
            logging.getLogger(name).handlers = before[name]
            handler.close()


def _note(text: str) -> logging.LogRecord:
    """Return a line about the log itself."""
    return logging.LogRecord("vitkit", logging.WARNING, __file__, 0, text, None, None)
