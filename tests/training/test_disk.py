"""A disk that fails at any operation, below Python: the run says so, and resumes bit-identically.

The full version, at every point of a run, is `python -m benchmarks.disk`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("cc") is None, reason="needs Linux and a C compiler"
)
def test_failing_operations_small_disks_and_a_jumping_clock() -> None:
    rows = ("--every", "60", "--kinds", "ENOSPC,EIO,short", "--sizes", "2")
    command = [sys.executable, "-m", "benchmarks.disk", *rows]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a clock that jumps by up to 10 days: finished, equal" in done.stdout
    assert "2 sizes tried" in done.stdout
    assert "lost: 0" in done.stdout
