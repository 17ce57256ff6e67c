"""Metrics of a run besides their values: the time that training takes, and the trackers that receive the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vitkit.errors import pick
from vitkit.runtime import TRACKERS, tracker
from vitkit.training.run_folder import RunFolder, flatten

NAMES: dict[str, str] = {"tensorboard": "events in the run's tb/", **dict.fromkeys(TRACKERS, "through accelerate")}


class Clock:
    """Measures the time of training, and how much of it is spent waiting for data, since the last line of metrics.

    Args:
        images: images per step.
    """

    def __init__(self, images: int) -> None:
        self.images = images
        self._restart()

    def _restart(self) -> None:
        self._since, self._waited, self._excluded = time.perf_counter(), 0.0, 0.0

    @contextmanager
    def waiting(self, idle: Callable[[], bool]) -> Iterator[None]:
        """A context whose time counts as waiting for data, if the device has nothing to do at its end.

        Args:
            idle: returns whether it has nothing to do.
        """
        began = time.perf_counter()
        yield
        if idle():
            self._waited += time.perf_counter() - began

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """A context whose time does not count as training."""
        began = time.perf_counter()
        yield
        self._excluded += time.perf_counter() - began

    def read(self, steps: int) -> dict[str, float]:
        """Return the seconds, the images per second and the share of time spent waiting; then start again."""
        seconds = max(time.perf_counter() - self._since - self._excluded, 1e-9)
        found = {
            "seconds": round(seconds, 4),
            "images_per_second": round(steps * self.images / seconds, 2),
            "waiting": round(self._waited / seconds, 4),
        }
        self._restart()
        return found


class Trackers:
    """All trackers of a run, possibly none.

    Args:
        names: keys of NAMES. TensorBoard is left out if it is not installed; a missing wandb or mlflow is an error.
        run: the run's folder.
        step: the step that the run starts at; later events, written by a process that was killed, are hidden.
    """

    def __init__(self, names: Sequence[str], run: RunFolder, step: int = 0) -> None:
        self.board: Any = None
        self.others: list[Any] = []
        self.missing: list[str] = []
        self.failed: str | None = None  # why tracking has ended
        for name in names:
            pick(NAMES, name, "tracker")
            if name != "tensorboard":
                self.others.append(tracker(name, "vitkit", str(run.path), run.path.name))
                self.others[-1].store_init_configuration(flatten(run.info.get("recipe", {}), "/"))
                continue
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                self.missing.append(name)
                continue
            self.board = SummaryWriter(str(run.path / "tb"), purge_step=step or None)

    def log(self, row: Mapping[str, Any]) -> None:
        """Send one line of metrics to every tracker.

        Args:
            row: the line, as in metrics.jsonl.
        """
        values = {
            f"{row['event']}/{name}": float(value)
            for name, value in flatten(row, "/").items()
            if name not in ("event", "step") and isinstance(value, int | float)
        }
        with self._tolerant():
            if self.board is not None:
                for name, value in values.items():
                    self.board.add_scalar(name, value, row["step"])
            for other in self.others:
                other.log(values, step=row["step"])

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        """A context in which an error (a full disk, no network) ends the tracking but not the run."""
        try:
            yield
        except Exception as error:
            self.board, self.others = None, []
            self.failed = f"Metrics are no longer sent to the trackers: {error}. metrics.jsonl has them all."

    def close(self) -> None:
        """Flush and close every tracker."""
        with self._tolerant():
            if self.board is not None:
                self.board.close()
            for other in self.others:
                other.finish()
