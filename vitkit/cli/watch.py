"""The progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitkit.cli.text import console, printable


class Watch:
    """Prints the events of a run; a context manager.

    Args:
        quiet_seconds: seconds between lines of training metrics without a terminal (default: 10). Validations
            are always printed.
    """

    def __init__(self, quiet_seconds: float = 10.0) -> None:
        self.quiet, self._said, self._task = quiet_seconds, 0.0, None
        self._began, self._first, self.total = time.monotonic(), 0, 0
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=console(),
            )

    def __enter__(self) -> Watch:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(printable(text), markup=False, highlight=False)
        else:
            print(text, flush=True)

    def __call__(self, event: dict[str, Any]) -> None:
        """Show one event."""
        getattr(self, f"_{event['event']}", lambda event: None)(event)

    def _start(self, event: dict[str, Any]) -> None:
        self._first, self.total, self._began = event["step"], event["total"], time.monotonic()
        if event["step"]:
            self.say(f"resuming from step {event['step']:,}")
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task("training", total=event["total"], completed=event["step"], numbers="")

    def _step(self, event: dict[str, Any]) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[-1], completed=event["step"])

    def _train(self, event: dict[str, Any]) -> None:
        numbers = (
            f"loss {event['loss']:.4f}  accuracy {event['accuracy']:.1%}  "
            f"{event['time']['images_per_second']:,.0f} images/s"
        )
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[-1], numbers=numbers)
        elif time.monotonic() - self._said >= self.quiet or event["step"] == self.total:
            self._said = time.monotonic()
            self.say(
                f"step {event['step']:,}/{self.total:,}  {numbers}  lr {event['lr']:.3g}  "
                f"{self._left(event['step'])} left"
            )

    def _left(self, step: int) -> str:
        done = max(step - self._first, 1)
        seconds = (time.monotonic() - self._began) / done * (self.total - step)
        return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds:.0f} s"

    def _val(self, event: dict[str, Any]) -> None:
        which = " (average)" if event["weights"] == "ema" else ""
        self.say(
            f"step {event['step']:,}/{self.total:,}  validation{which}: {event['top1']:.2%} of "
            f"{event['images']:,} images, loss {event['loss']:.4f}"
        )

    def _skipped(self, event: dict[str, Any]) -> None:
        self.say(f"skipped {event['name']}: {event['why']}")

    def _note(self, event: dict[str, Any]) -> None:
        self.say(event["text"])
