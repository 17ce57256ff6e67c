"""Worker processes end with the process that they work for."""

from __future__ import annotations

import subprocess
import sys

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
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, timeout=60, check=False)
    assert ran.returncode == -9, ran.stderr
