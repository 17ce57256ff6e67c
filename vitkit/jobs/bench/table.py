"""What a measurement gives: a table, as Markdown and in a log."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from vitkit.errors import OutputError


@dataclass(frozen=True)
class Row:
    """One contender.

    Args:
        name: what it is.
        kind: `ours`, `peer` or `limit`.
        rate: how many a second, the median of the rounds.
        milliseconds: of one run.
        ratio: how many times the best peer's speed: median, smallest, largest; None without peers.
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
        best_peer: its name; empty without peers.
        notes: contenders that did not run, and why.
        machine: where.
        unit: of the rates.
        run: what one run is.
    """

    title: str
    rows: tuple[Row, ...]
    best_peer: str
    notes: tuple[str, ...]
    machine: str
    unit: str = "images/s"
    run: str = "batch"

    def markdown(self) -> str:
        """The table as docs/log.md holds it."""
        against = f"against {self.best_peer}" if self.best_peer else "against the best peer"
        lines = [
            f"| {self.title} | {self.unit} | ms a {self.run} | {against} (smallest to largest) |",
            "|---|---|---|---|",
        ]
        for row in self.rows:
            ratio = "" if row.ratio is None else f"{row.ratio[0]:.2f}x ({row.ratio[1]:.2f} to {row.ratio[2]:.2f})"
            name = {"ours": f"**vitkit {row.name}**", "peer": row.name, "limit": f"limit: {row.name}"}[row.kind]
            took = f"{row.milliseconds:,.{1 if row.milliseconds >= 10 else 2}f}"
            lines.append(f"| {name} | {row.rate:,.1f} | {took} | {ratio} |")
        return "\n".join([*lines, "", f"{self.machine}.", *(f"Not measured: {note}" for note in self.notes)])


def machine(device: torch.device, load: float) -> str:
    """Where it was measured, in words.

    Args:
        device: what computed.
        load: of the machine, before.
    """
    what = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{_processor()}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    )
    return f"{what}, torch {torch.__version__}, load {load:.1f} before"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def check_log(path: Path) -> None:
    """Refuse a log that is not there, before anything is measured.

    Args:
        path: a Markdown file.
    """
    if not path.is_file():
        raise OutputError(f"There is no log {str(path)!r} to add to; name a Markdown file that is there.")


def append(path: Path, tables: Sequence[Benchmark]) -> None:
    """Add dated tables to the end of a log.

    Args:
        path: a Markdown file that is there.
        tables: what was measured.
    """
    check_log(path)
    text = "\n\n".join(table.markdown() for table in tables)
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"\n## {datetime.now(UTC):%Y-%m-%d}: vitkit bench\n\n{text}\n")
