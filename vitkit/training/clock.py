"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds of training, of waiting for data, and of other things, since the last line of metrics.

    Args:
        images: of a step.
    """

    def __init__(self, images: int) -> None:
        self.images = images
        self._restart()

    def _restart(self) -> None:
        self._since, self._waited, self._away = time.perf_counter(), 0.0, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The device has nothing to do inside."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What happens inside is no training."""
        began = time.perf_counter()
        yield
        self._away += time.perf_counter() - began

    def read(self, steps: int) -> dict[str, float]:
        """Seconds, images a second and the share of time spent waiting for data; then starts again."""
        seconds = max(time.perf_counter() - self._since - self._away, 1e-9)
        found = {
            "seconds": round(seconds, 4),
            "images_per_second": round(steps * self.images / seconds, 2),
            "waiting": round(self._waited / seconds, 4),
        }
        self._restart()
        return found
