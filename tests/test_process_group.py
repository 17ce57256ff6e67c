"""Processes find each other after a restart, give up in time, and end with their launcher."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from tests.training import tiny
from tests.training.tiny import forked
from vitkit import cli, process_group
from vitkit.errors import (
    ConfigError,
    HubError,
    LostWorker,
    OutOfMemory,
    OutputError,
    SaveFailed,
    Unreachable,
    VitkitError,
)

# A launcher that starts one process, which says `ready` and, if nothing ends it, `survived`.
LAUNCHER = """
import os, signal, sys, time
if os.fork():
    time.sleep(600)
    sys.exit()
from vitkit import process_group
process_group.GRACE = 0.2
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
process_group.end_with_launcher()
print("ready", flush=True)
time.sleep(60)
print("survived", flush=True)
"""


@pytest.fixture
def store() -> TCPStore:
    """What torchrun's agent keeps for all restarts."""
    return TCPStore("127.0.0.1", 0, is_master=True)


def as_restarted(store: TCPStore, **more: str) -> None:
    os.environ |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", **more}


def test_a_restarted_group_joins_in_the_same_store(store: TCPStore) -> None:
    """torch alone reads the addresses of the first group there, and cannot connect."""

    def work(rank: int) -> None:
        import torch.distributed as dist

        from vitkit.runtime import Runtime

        as_restarted(store)
        runtime = Runtime("cpu")
        assert runtime.sum(torch.ones(1)).item() == runtime.ranks
        assert runtime.gather(rank) == list(range(runtime.ranks))
        if runtime.ranks == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.destroy_process_group()

    assert forked(work, ranks=2) == [0, -signal.SIGKILL]
    assert forked(work, ranks=2) == [0, -signal.SIGKILL]
    assert forked(work, ranks=3) == [0, 0, 0]


def test_a_copy_of_this_process_that_hangs_says_where(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def hang(rank: int) -> None:
        time.sleep(600)

    monkeypatch.setattr(tiny, "HANGS", 0.5)
    assert forked(hang) == [1]
    assert "in hang" in capfd.readouterr().err


@pytest.mark.parametrize(("rank", "missing"), [(0, "missing: 1"), (1, "missing: 0")])
def test_who_does_not_come_is_named(store: TCPStore, rank: int, missing: str) -> None:
    def work(_: int) -> None:
        as_restarted(store, MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE="2", VITKIT_JOIN_SECONDS="60")
        minutes = itertools.count(step=61.0)  # one at every look at the clock
        process_group.time = SimpleNamespace(monotonic=lambda: next(minutes), sleep=time.sleep)
        with pytest.raises(LostWorker, match=rf"Process {rank} of 2 .*within 60 s.*\({missing}\).*VITKIT_JOIN_SECONDS"):
            process_group.join("gloo", rank, 2)

    assert forked(work) == [0]


def test_a_host_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_JOIN_SECONDS", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        port = str(deaf.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(LostWorker, match=re.escape(f"join the others at 127.0.0.1:{port} within 1 s")):
            process_group.join("gloo", 1, 2)
    monkeypatch.setenv("VITKIT_JOIN_SECONDS", "soon")
    with pytest.raises(ConfigError, match="VITKIT_JOIN_SECONDS must be a whole number of seconds"):
        process_group.join("gloo", 1, 2)


@pytest.mark.parametrize("how", ["", "deaf"])
def test_no_process_outlives_its_launcher(how: str) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, how],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "job"},
    )
    assert launcher.stdout is not None
    with launcher.stdout:
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
        launcher.wait()
        assert launcher.stdout.read() == ""  # until both have ended


def launched(work: Callable[[], object], restart: int = 0) -> int:
    """Return how a launcher ended whose process does this work: its exit code, or the signal that it got."""

    def launcher(rank: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # other libraries may have set a handler in this process
        os.environ |= {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": str(restart)}
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
        if process := os.fork():
            os._exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        try:
            work()
        except SystemExit as end:
            os._exit(int(end.code or 0))

    return forked(launcher)[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "digits", "--out", "r", "--recipe", "nonsense"], "nonsense"),
        (["train", "digits", "--out", "r", "--nonsense"], "--nonsense"),
        (["train", "digits", "--out", "."], "exists and is not a run"),
    ],
)
def test_a_mistake_in_the_command_ends_the_launcher(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun would start the process again, and it would meet the same error; the last attempt just fails."""
    importlib.import_module("vitkit.jobs.train")  # once, for all processes
    monkeypatch.setattr(sys, "argv", ["vitkit", *words])
    assert launched(cli.main) == -signal.SIGTERM
    assert launched(cli.main, restart=3) == 2
    assert capfd.readouterr().err.count(message) == 2


@pytest.mark.parametrize("error", [LostWorker, Unreachable, HubError, OutputError, SaveFailed, OutOfMemory])
def test_what_may_succeed_later_is_tried_again(error: type[VitkitError], monkeypatch: pytest.MonkeyPatch) -> None:
    def app() -> None:
        raise error("Try again.")

    monkeypatch.setattr(cli, "app", app)
    assert launched(cli.main) == error.exit_code


@pytest.mark.slow
def test_torchrun_ends_at_a_mistake(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["--max-restarts", "3", "-m", "vitkit", "train", "digits", "--out", str(tmp_path / "r")]
    done = subprocess.run([*command, "--recipe", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 1 <= done.stderr.count("'nonsense'") <= 2  # of the two processes, not of their restarts


def test_without_torchrun_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    process_group.end_with_launcher()
    assert process_group.launch() == ""


def test_a_job_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    assert process_group.launch() == "job-7"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert str(os.getppid()) in process_group.launch()
    assert process_group.launch() == process_group.launch()


LEAVING = """
import atexit, sys, threading, time
from vitkit.process_group import leave

class Noisy:
    def __init__(self, name):
        self.name, self.itself = name, self
    def __del__(self):
        print(self.name)

sys.kept = Noisy("a module, taken apart")
Noisy("a database, closed")
atexit.register(print, "at the end")

def work():
    time.sleep(0.2)
    print("a thread")

threading.Thread(target=work).start()
print("the answer")
leave(3)
print("left in the usual way")
"""


LEFT = ["the answer", "a thread", "a database, closed"]


def test_a_process_leaves_nothing_undone_but_takes_no_module_apart() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, check=False)
    assert (done.stdout.splitlines(), done.stderr) == ([*LEFT, "at the end"], "")
    assert done.returncode == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_process_that_cannot_write_its_answer_says_so() -> None:
    with open("/dev/full", "w") as full:
        code = "from vitkit.process_group import leave; print('the answer'); leave(3)"
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert "No space left on device" in done.stderr
    assert done.returncode not in (0, 3)


@pytest.mark.parametrize(
    ("code", "environment", "library", "left"),
    [
        (0, {}, "torch", [0]),
        (None, {}, "torch", [0]),
        (2, {}, "torch", [2]),
        ("a sentence", {}, "torch", []),
        (0, {"RANK": "1"}, "torch", []),  # others may still need what it holds
        (0, {}, "not torch", []),
    ],
)
def test_a_command_that_used_torch_leaves_at_once(
    code: object, environment: dict[str, str], library: str, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "modules", {**{k: v for k, v in sys.modules.items() if k != "torch"}, library: object()})
    monkeypatch.setattr("vitkit.process_group.leave", found.append)
    monkeypatch.setattr(cli, "main", lambda: sys.exit(code))  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        cli.program()
    assert found == left
