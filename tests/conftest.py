"""What all tests share: one thread each (the suite runs in two processes), the folder of real data, and the command."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from tests.forks import forking

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

LONGEST = {"test_docs.py", "test_book.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest tests, so that no process waits for the other at the end."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from visiting the modules of all libraries again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real photos and weights; tests that need it are skipped without it."""
    folder = os.environ.get("VITKIT_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs real photos and weights: set VITKIT_TEST_DATA to their folder")
    return Path(folder)


@pytest.fixture(scope="session")
def command() -> Iterator[Path]:
    """The program `vitkit`, each time in a process of its own. On Linux that is a fork, which starts sooner."""
    script = Path(sys.executable).with_name("vitkit")
    threads = os.environ["OMP_NUM_THREADS"] != "1"
    if sys.platform != "linux" or threads or torch.cuda.is_available():  # neither threads nor CUDA survive a fork
        yield script
        return
    with forking(script) as program:
        yield program


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Make random inputs the same in every run, and no test depend on the draws of another."""
    torch.manual_seed(0)
