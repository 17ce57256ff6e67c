"""Alternating runs and their ratios: the machines are noisy, so two things are compared only when they took turns."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve each other

import statistics
import time
from collections.abc import Callable
from typing import Any


def alternate(contenders: dict[str, Callable[[], Any]], rounds: int = 7, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each contender in each round, all of them taking one turn a round."""
    for run in contenders.values():
        for _ in range(warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        order = list(contenders)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            start = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def table(seconds: dict[str, list[float]], ours: str, work: float = 1.0, unit: str = "runs/s") -> str:
    """A Markdown table: rate, and the ratio of ours to each (median of the rounds, smallest and largest)."""
    lines = [f"| | {unit} | {ours} is faster by |", "|---|---|---|"]
    for name, values in seconds.items():
        ratios = sorted(theirs / mine for theirs, mine in zip(values, seconds[ours], strict=True))
        ratio = f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        lines.append(f"| {name} | {work / statistics.median(values):.2f} | {'' if name == ours else ratio} |")
    return "\n".join(lines)
