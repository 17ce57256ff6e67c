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
def test_failing_operations_and_a_jumping_clock() -> None:
    command = [sys.executable, "-m", "benchmarks.disk", "--every", "45", "--kinds", "ENOSPC,EIO"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a clock that jumps by up to 10 days: finished, equal" in done.stdout
    assert "lost: 0" in done.stdout
