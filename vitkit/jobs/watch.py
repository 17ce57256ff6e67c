"""The progress of a run, for people: a bar on a terminal, plain lines elsewhere, and one line per epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vitkit.jobs.train_checks import CUSTOM

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

LINES = 100  # of steps at most in a run without a terminal, besides one per epoch


class Watch:
    """Prints the events of a run; a context manager.

    Args:
        quiet_seconds: least number of seconds between two lines of steps without a terminal (default: 10). The first
            step and every epoch are always printed.
        console: where the bar is drawn (default: stdout).
        clean: applied to every line, which may name files (default: nothing).
    """

    def __init__(
        self, quiet_seconds: float = 10.0, console: Console | None = None, clean: Callable[[str], str] = str
    ) -> None:
        self.quiet, self.console, self.clean = quiet_seconds, console, clean
        self._bar: Progress | None = None
        self._validations: list[dict[str, Any]] = []  # since the last line of an epoch
        self._start({"step": 0, "total": 0, "images": 0, "epochs": 0.0})

    def __enter__(self) -> Watch:
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"))
            console = self.console or Console()  # not the process's shared one, whose width may be another terminal's
            self._bar = Progress(TextColumn("{task.description}"), *columns, transient=True, console=console)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(self.clean(text), markup=False, highlight=False, soft_wrap=True)
        else:
            print(self.clean(text), flush=True)

    def __call__(self, event: dict[str, Any]) -> None:
        """Show one event."""
        getattr(self, f"_{event['event']}", lambda event: None)(event)

    def _start(self, event: dict[str, Any]) -> None:
        self.total, self.images, self.epochs = event["total"], event["images"], event["epochs"]
        self._first, self._began = event["step"], time.monotonic()
        self._since, self._from, self._said = self._began, event["step"], 0.0
        if event["step"]:
            self.say(f"resuming from step {event['step']:,}")
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task("training", total=event["total"], completed=event["step"], numbers="")

    def _step(self, event: dict[str, Any]) -> None:
        now, step = time.monotonic(), event["step"]
        if step == self._first:  # the first event of a resumed run: no step was taken yet
            return
        rate = (step - self._from) * self.images / max(now - self._since, 1e-9)
        accuracy = f"accuracy {event['accuracy']:.1%}  " if "accuracy" in event else ""
        numbers = f"loss {event['loss']:.4f}  {accuracy}{rate:,.0f} images/s"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[-1], completed=step, description="training", numbers=numbers)
            return
        left = (now - self._began) / (step - self._first) * (self.total - step)
        if not self._said or now - self._said >= max(self.quiet, (now - self._began + left) / LINES):
            self._said = now
            self.say(f"step {step:,}/{self.total:,}  {numbers}  lr {event['lr']:.3g}  {_duration(left)} left")

    def _validating(self, event: dict[str, Any]) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[-1], description="validating")

    def _val(self, event: dict[str, Any]) -> None:
        self._validations.append(event)

    def _epoch(self, event: dict[str, Any]) -> None:
        parts = [
            f"epoch {event['epoch']:g}/{self.epochs:g}  step {event['step']:,}/{self.total:,}",
            f"training {_scores(event)}",
        ]
        for row in self._validations:
            which = "average " if row["weights"] == "ema" else ""
            parts.append(f"validation {which}{_scores(row)}")
        self.say("  |  ".join(parts))
        self._validations = []
        self._since, self._from = time.monotonic(), event["step"]

    def _skipped(self, event: dict[str, Any]) -> None:
        self.say(f"skipped {event['name']}: {event['why']}".replace("\n", r"\n"))

    def _stop(self, event: dict[str, Any]) -> None:
        self.say(f"stopping early: {event['why']}")

    def _note(self, event: dict[str, Any]) -> None:
        self.say(event["text"])


def summary(info: dict[str, Any]) -> str:
    """Return one line about a run: the model, the data, the steps and the device.

    Args:
        info: the contents of its run.json.
    """
    data = info["data"]
    labels = f"of {len(data['classes'])} classes" if data["classes"] else "without labels"
    if data.get("several"):
        labels = f"with any of {len(data['classes'])} labels"
    model = "your model" if info["model"] == CUSTOM else info["model"] or info["weights"] or "its own model"
    return (
        f"{info['recipe_name']}: {model}, "
        f"{info['trained']:,} parameters, on {data['train']:,} images {labels} "
        f"({data['val']:,} for validation), {info['steps']:,} steps of {info['recipe']['batch_size']}, "
        f"{info['settings']['precision']} on {info['device']}"
        + (f" x {info['processes']}" if info["processes"] > 1 else "")
    )


SCORES = {"accuracy": "accuracy", "top1": "accuracy", "mean_ap": "mAP"}  # the score of a line of metrics, for people


def _scores(row: dict[str, Any]) -> str:
    found = [f" {word} {row[name]:.1%}" for name, word in SCORES.items() if name in row]
    return f"loss {row['loss']:.4f}" + "".join(found)


def _duration(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds > 5400
        else f"{seconds / 60:.0f} min"
        if seconds > 90
        else f"{seconds:.0f} s"
    )
