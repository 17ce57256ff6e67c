"""Contenders that take turns in one process.

A machine's speed changes from minute to minute, so two things are compared only round by round: a ratio is the median
over the rounds, with the smallest and the largest beside it.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vitkit.errors import ConfigError, VitkitError
from vitkit.jobs.bench.table import Benchmark, Row, machine

Run = Callable[[], Any]
Clock = Callable[[], float]


class Contenders:
    """What takes part in one table, and what does not.

    Args:
        device: what computes.
    """

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # the models of the table before
        self.device = device
        self.load = os.getloadavg()[0]  # before building: compiling and exporting are loads of our own
        self.runs: dict[str, Run] = {}
        self.kinds: dict[str, str] = {}
        self.notes: list[str] = []

    def add(self, kind: str, name: str, build: Callable[[], Run]) -> None:
        """Build a contender and run it once; one that cannot is named with its reason.

        Args:
            kind: see Row.
            name: what it is.
            build: gives what is measured.
        """
        try:
            run = build()
            run()  # a compiler, a memory's end: some fail here, not when built
        except (VitkitError, ImportError, OSError, RuntimeError) as error:
            self.note(name, (str(error).strip() or type(error).__name__).splitlines()[0])
            return
        self.runs[name], self.kinds[name] = run, kind

    def note(self, name: str, why: str) -> None:
        """Say of a contender why it does not take part."""
        self.notes.append(f"{name}: {why}")

    def table(
        self,
        title: str,
        work: int,
        rounds: int,
        seconds: float,
        *,
        unit: str = "images/s",
        run: str = "batch",
        clock: Clock = time.perf_counter,
    ) -> Benchmark:
        """Measure all of them.

        Args:
            title: see Benchmark.
            work: how many of the unit one run does.
            rounds: turns of each.
            seconds: of one turn, at least.
            unit: see Benchmark.
            run: see Benchmark.
            clock: seconds since some moment.
        """
        if not self.runs:
            raise ConfigError(f"Nothing of {title!r} could be measured. {' '.join(self.notes)}")
        took = alternate(self.runs, rounds, seconds, self.device, clock)
        middle = {name: statistics.median(values) for name, values in took.items()}
        peers = [name for name, kind in self.kinds.items() if kind == "peer"]
        best = min(peers, key=lambda name: middle[name], default="")
        rows = [
            Row(
                name,
                self.kinds[name],
                work / middle[name],
                1e3 * middle[name],
                ratio(took[best], values) if best else None,
            )
            for name, values in took.items()
        ]
        return Benchmark(title, tuple(rows), best, tuple(self.notes), machine(self.device, self.load), unit, run)


def alternate(
    runs: dict[str, Run], rounds: int, seconds: float, device: torch.device, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of one run of each contender in each round, all of them taking one turn a round.

    Args:
        runs: the contenders.
        rounds: how many.
        seconds: that a turn takes at least, repeating the run.
        device: waited for, before and after a turn.
        clock: seconds since some moment.
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
        turn(run, 1)  # choosing kernels, filling caches
        times[name] = max(1, round(seconds / max(turn(run, 1), 1e-6)))
    found: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for n in range(rounds):
        for name in order[n % len(order) :] + order[: n % len(order)]:
            found[name].append(turn(runs[name], times[name]))
    return found


def ratio(theirs: Sequence[float], mine: Sequence[float]) -> tuple[float, float, float]:
    """How many times as fast as theirs mine is, round by round: median, smallest, largest."""
    ratios = sorted(a / b for a, b in zip(theirs, mine, strict=True))
    return statistics.median(ratios), ratios[0], ratios[-1]
