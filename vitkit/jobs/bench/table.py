"""The result of a measurement: a table, as Markdown and in a log."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from vitkit.errors import OutputError

BUSY = 0.25  # share of the cores that other programs may keep busy before the numbers are in doubt


@dataclass(frozen=True)
class Row:
    """One contender.

    Args:
        name: what it is.
        kind: `ours`, `peer` or `limit`.
        rate: units per second, the median of the rounds.
        milliseconds: duration of one run.
        ratio: speed relative to the best peer's: median, smallest, largest; None without peers.
    """

    name: str
    kind: str
    rate: float
    milliseconds: float
    ratio: tuple[float, float, float] | None


@dataclass(frozen=True)
class Benchmark:
    """One table.

    Args:
        title: what was measured, and in which precision.
        rows: the contenders, ours first.
        best_peer: name of the fastest peer; empty without peers.
        notes: contenders that did not run, and why.
        machine: where it was measured.
        unit: unit of the rates.
        run: what one run is.
        doubts: reasons not to trust the numbers.
    """

    title: str
    rows: tuple[Row, ...]
    best_peer: str
    notes: tuple[str, ...]
    machine: str
    unit: str = "images/s"
    run: str = "batch"
    doubts: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Return the table as docs/log.md holds it."""
        against = f"compared with {self.best_peer or 'the best peer'}"
        lines = [
            f"| {self.title} | {self.unit} | ms per {self.run} | {against} (smallest to largest) |",
            "|---|---|---|---|",
        ]
        for row in self.rows:
            ratio = "" if row.ratio is None else f"{row.ratio[0]:.2f}x ({row.ratio[1]:.2f} to {row.ratio[2]:.2f})"
            name = {"ours": f"**vitkit {row.name}**", "peer": row.name, "limit": f"limit: {row.name}"}[row.kind]
            took = f"{row.milliseconds:,.{1 if row.milliseconds >= 10 else 2}f}"
            lines.append(f"| {name} | {row.rate:,.1f} | {took} | {ratio} |")
        notes = [
            *(f"Not measured: {note}" for note in self.notes),
            *(f"Do not trust this: {one}" for one in self.doubts),
        ]
        return "\n".join([*lines, "", f"{self.machine}.", *notes])


def machine(device: torch.device, load: float) -> str:
    """Describe the machine, with its load before the measurement."""
    what = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{_processor()}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    )
    return f"{what}, torch {torch.__version__}, load {load:.1f} before"


def doubts(rounds: int, load: float) -> tuple[str, ...]:
    """Return the reasons not to trust a measurement, given the rounds and the load before it."""
    cores = os.cpu_count() or 1
    found = []
    if rounds == 1:
        found.append("one round says nothing about the spread; measure again with --rounds 7.")
    if load > BUSY * cores:
        found.append(
            f"the load was {load:.1f} on {cores} cores before it began, so other programs were running; stop them and "
            f"measure again."
        )
    return tuple(found)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def check_log(path: Path) -> None:
    """Raise if the log does not exist: call this before measuring."""
    if not path.is_file():
        raise OutputError(f"--log must be an existing Markdown file; {str(path)!r} does not exist. Create it first.")


def append(path: Path, tables: Sequence[Benchmark]) -> None:
    """Append dated tables to an existing Markdown file."""
    check_log(path)
    text = "\n\n".join(table.markdown() for table in tables)
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"\n## {datetime.now(UTC):%Y-%m-%d}: vitkit bench\n\n{text}\n")
