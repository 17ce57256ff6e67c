"""Alternating runs and their ratios. Import this before torch: spinning threads would starve each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import statistics

from vitkit.jobs.bench.turns import alternate, ratio

__all__ = ["alternate", "table"]


def table(seconds: dict[str, list[float]], ours: str, work: float = 1.0, unit: str = "runs/s") -> str:
    """Return a Markdown table: rates, and how much faster ours is (median of the rounds, smallest to largest)."""
    lines = [f"| | {unit} | {ours} is faster by |", "|---|---|---|"]
    for name, values in seconds.items():
        middle, least, most = ratio(values, seconds[ours])
        spread = "" if name == ours else f"{middle:.2f}x ({least:.2f} to {most:.2f})"
        lines.append(f"| {name} | {work / statistics.median(values):.2f} | {spread} |")
    return "\n".join(lines)
