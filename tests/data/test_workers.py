"""Worker processes end with the process that they work for."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from vitkit.data import workers

SCRIPT = """
import itertools, os
from vitkit.data import slots
from vitkit.data.workers import parallel_map

def work(task):
    return b"x" * 1_000_000         # more than a pipe holds: a worker cannot end before somebody has read it

def fill(task, slot):
    return task

waiting = slots.Slots(fill, 9, 2, slots=1, size=1, pin=False) if slots.available() else None  # for a slot, for ever
for n, _ in enumerate(parallel_map(work, itertools.count(), 2, ahead=4)):
    if n == 3:
        os.kill(os.getpid(), 9)
"""


def test_workers_end_when_their_process_is_killed() -> None:
    # They hold its output: waiting for the end of that is waiting for them.
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, timeout=240, check=False)
    assert ran.returncode == -9, ran.stderr


class Enough(Exception):
    """Whoever waits has waited enough."""


def tensor(task: int) -> torch.Tensor:
    return torch.full((64, 64), task)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system cannot stop a process")
@pytest.mark.parametrize("stop", ["on_wait", "patience"])
def test_workers_that_hang_after_sending_results(stop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a tensor is fetched from its worker when its result has arrived."""
    monkeypatch.setattr(workers, "TICK", 0.1)
    stopped: list[str] = []

    def on_wait(waited: float) -> None:
        if stopped == ["on_wait"] and waited > 0.5:
            raise Enough

    before = multiprocessing.active_children()
    results = workers.parallel_map(tensor, itertools.count(), 2, ahead=4, on_wait=on_wait)
    assert next(results)[0, 0] == 0
    started = [process for process in multiprocessing.active_children() if process not in before]
    arrived = results.gi_frame.f_locals["results"]._worker_result_queue
    while arrived.empty():
        time.sleep(0.01)
    for process in started:
        os.kill(process.pid, signal.SIGSTOP)
    stopped.append(stop)  # not before: workers may take longer to start
    if stop == "patience":
        monkeypatch.setattr(workers, "PATIENCE", 0.5)
    with pytest.raises(Enough if stop == "on_wait" else workers.LostWorker):
        list(results)
    assert not any(process.is_alive() for process in started)
