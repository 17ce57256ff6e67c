"""What all tests share: one thread each (the suite runs in two processes), and the folder of real data."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real photos and weights; tests that need it are skipped without it."""
    folder = os.environ.get("VITKIT_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs real photos and weights: set VITKIT_TEST_DATA to their folder")
    return Path(folder)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Make random inputs the same in every run, and no test depend on the draws of another."""
    torch.manual_seed(0)
