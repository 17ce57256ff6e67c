"""What all tests share: one thread each (the suite runs in two processes), the folder of real data, and the command."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "VITKIT_CACHE" not in os.environ:  # so that nothing depends on what earlier commands left in the user's folder
    _cache = tempfile.TemporaryDirectory(prefix="vitkit-cache-", ignore_cleanup_errors=True)
    os.environ["VITKIT_CACHE"] = _cache.name  # the processes of pytest-xdist inherit it

import pytest
import torch

from tests.forks import ENVIRONMENT, forking

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
with suppress(ImportError):
    import hypothesis

    hypothesis.settings.register_profile(  # the same cases in every run, however long a busy machine takes to draw them
        "vitkit",
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("vitkit")

LONGEST = {"test_docs.py", "test_book.py"}
OTHERS: list[str] = []  # tests that have run in this process and may have left threads behind


class Command(Protocol):
    def __call__(self, *args: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(autouse=True)
def our_messages_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what earlier tests, or libraries that they imported, have done to our logger."""
    ours = logging.getLogger("vitkit")
    monkeypatch.setattr(ours, "disabled", False)
    monkeypatch.setattr(ours, "propagate", True)


@pytest.fixture(autouse=True)
def hangups_count() -> Iterator[None]:
    """Let SIGHUP mean what it means in a terminal, also if the tests run under nohup, whose children ignore it."""
    if not hasattr(signal, "SIGHUP"):  # on Windows
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests that fork, before others leave threads behind, and then with the longest ones.

    A lock that a thread holds during a fork stays locked in the copy for ever. Long tests at the end would let one
    process wait for the other.
    """
    items.sort(key=lambda item: (not forks(item), item.path.name not in LONGEST))


def forks(item: pytest.Item) -> bool:
    """Whether a test belongs to a module whose tests fork."""
    return hasattr(getattr(item, "module", None), "forked")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that forks in a fresh process if others have run in this one.

    That is rare, given their order, but with many processes one may take such tests from another at the end.
    """
    if not forks(pyfuncitem):
        OTHERS.append(pyfuncitem.nodeid)
        return None
    if not OTHERS:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", pyfuncitem.nodeid]
    done = subprocess.run(command, cwd=pyfuncitem.config.rootpath, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"in a fresh process, after {OTHERS[-1]}:\n{done.stdout}{done.stderr}"
    return True


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


@pytest.fixture(scope="session")
def vitkit(command: Path) -> Command:
    """A function that runs `vitkit` with these arguments and returns what it printed."""

    def run(*args: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command, *args],
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            env=ENVIRONMENT | {"COLUMNS": "160"} | environment,
        )

    return run


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Make random inputs the same in every run, and no test depend on the draws of another."""
    torch.manual_seed(0)
