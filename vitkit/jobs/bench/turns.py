"""Contenders that take turns in one process.

A machine's speed changes from minute to minute, so two things are compared only round by round: a ratio is the median
over the rounds, reported with the smallest and the largest.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vitkit.errors import ConfigError
from vitkit.jobs.bench.options import Options
from vitkit.jobs.bench.table import Benchmark, Row, doubts, machine

Run = Callable[[], Any]
Clock = Callable[[], float]
CPU = torch.device("cpu")


class Contenders:
    """The rows of one table.

    Args:
        options: rounds, seconds per turn and the load before.
        device: the device that computes (default: the options' device).
    """

    def __init__(self, options: Options, device: torch.device | None = None) -> None:
        gc.collect()  # frees the models of the previous table
        self.options, self.device = options, device or options.torch_device
        self.runs: dict[str, Run] = {}
        self.kinds: dict[str, str] = {}
        self.notes: list[str] = []

    def add(self, kind: str, name: str, build: Callable[[], Run]) -> bool:
        """Build a contender and run it once. One that fails becomes a note with the reason, and False is returned.

        Args:
            kind: see Row.
            name: what it is.
            build: returns the function to measure.
        """
        try:
            run = build()
            run()  # compilers and memory fail here rather than when built
        except Exception as error:  # other libraries raise every kind of error
            self.note(name, (str(error).strip() or type(error).__name__).splitlines()[0])
            return False
        self.runs[name], self.kinds[name] = run, kind
        return True

    def note(self, name: str, why: str) -> None:
        """Record why a contender is not measured."""
        self.notes.append(f"{name}: {why}")

    def table(
        self, title: str, work: int, *, unit: str = "images/s", run: str = "batch", clock: Clock = time.perf_counter
    ) -> Benchmark:
        """Measure all contenders.

        Args:
            title: see Benchmark.
            work: units of work per run.
            unit: see Benchmark.
            run: see Benchmark.
            clock: returns a time in seconds.
        """
        if not self.runs:
            raise ConfigError(f"Nothing could be measured for {title!r}. {' '.join(self.notes)}")
        options = self.options
        took = alternate(self.runs, options.rounds, options.seconds, self.device, clock)
        middle = {name: statistics.median(values) for name, values in took.items()}
        peers = [name for name, kind in self.kinds.items() if kind == "peer"]
        best = min(peers, key=lambda name: middle[name], default="")
        against = {name: ratio(took[best], values) if best else None for name, values in took.items()}
        rows = [Row(name, self.kinds[name], work / t, 1e3 * t, against[name]) for name, t in middle.items()]
        where, why = machine(self.device, options.load), doubts(options.rounds, options.load)
        return Benchmark(title, tuple(rows), best, tuple(self.notes), where, unit, run, why)


def alternate(
    runs: dict[str, Run],
    rounds: int = 7,
    seconds: float = 0.0,
    device: torch.device = CPU,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Measure the seconds per run of each contender in each round; every contender has one turn per round.

    Args:
        runs: the contenders.
        rounds: number of rounds.
        seconds: minimum duration of a turn, which repeats the run to fill it.
        device: synchronized before and after a turn.
        clock: returns a time in seconds.
    """

    def turn(run: Run, times: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = clock()
        for _ in range(times):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (clock() - start) / times

    times = {}
    for name, run in runs.items():
        turn(run, 1)  # chooses kernels, fills caches
        times[name] = max(1, round(seconds / max(turn(run, 1), 1e-6))) if seconds else 1
    found: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for n in range(rounds):
        for name in order[n % len(order) :] + order[: n % len(order)]:
            found[name].append(turn(runs[name], times[name]))
    return found


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """How many times faster than theirs ours is, round by round: median, smallest, largest."""
    ratios = sorted(a / b for a, b in zip(theirs, ours, strict=True))
    return statistics.median(ratios), ratios[0], ratios[-1]
