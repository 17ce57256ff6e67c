"""The lock of a run folder: one writer at a time, released by death."""

from __future__ import annotations

import errno
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.tiny import bytes_of, forked, run, tiny
from vitkit.errors import OutputError
from vitkit.training import lock
from vitkit.training.lock import NAME, locked

RECIPE = tiny(steps=4, warmup=1)


def in_a_child(work: Callable[[], Any]) -> int:
    """Start a copy of this process that does some work and then waits; return its number once the work is done."""
    ready, done = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # no thread of ours holds a lock here
        pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(done, b".")
            time.sleep(600)
        finally:
            os._exit(1)  # never go on as a second pytest
    os.close(done)
    assert os.read(ready, 1) == b"."
    os.close(ready)
    return pid


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


HELD: list[Any] = []  # or the lock would be released with the last reference to it


def take(folder: Path) -> None:
    HELD.append(locked(folder))
    HELD[-1].__enter__()


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_process_is_refused(tmp_path: Path, resume: bool) -> None:
    out = tmp_path / "r"
    if resume:
        run(out, RECIPE)
    before = bytes_of(out) if resume else None
    pid = in_a_child(lambda: take(out))
    try:
        with pytest.raises(OutputError, match=f"{out} is in use by process {pid} on .*choose another --out"):
            run(out, RECIPE, resume=resume)
    finally:
        end(pid)
    if resume:
        assert bytes_of(out) == before
    else:
        assert [path.name for path in out.iterdir()] == [NAME]
    run(out, RECIPE, resume=resume)  # the lock went with its owner


def test_of_two_new_runs_at_once_one_is_refused(tmp_path: Path) -> None:
    from vitkit.jobs.train import prepare, start

    out, settings = tmp_path / "r", {"trackers": (), "device": "cpu", "workers": 0}
    first, second = (prepare("digits", out, recipe=RECIPE, settings=settings) for _ in range(2))  # both find it free
    seen: list[str] = []

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "start":
            with pytest.raises(OutputError, match="in use"):
                start(second)
            seen.append("refused")

    start(first, watch)
    assert seen == ["refused"]
    with pytest.raises(OutputError, match="holds a run"):  # nor is it overwritten afterwards
        start(second)


def test_a_worker_that_outlives_its_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    read, write = os.pipe()

    def work() -> None:
        take(tmp_path)
        os.write(write, f"{in_a_child(lambda: None)} ".encode())

    end(in_a_child(work))
    orphan = int(os.read(read, 20))
    os.kill(orphan, 0)  # it is alive
    try:
        with locked(tmp_path) as note:
            assert note is None
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "_lock", refuse)
    notes: list[str] = []
    run(tmp_path / "r", RECIPE, watch=lambda event: notes.append(event.get("text", "")))
    assert [note for note in notes if note] == [
        f"The file system of {tmp_path / 'r'} has no locks (No locks available): make sure that no other process "
        f"writes to this folder."
    ]


def test_nothing_is_left_of_a_run_that_could_not_start(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "a" / "b"):
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="part of the path is a file"), locked(tmp_path / "file" / "b"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_processes_share_one_lock(tmp_path: Path) -> None:
    assert forked(lambda rank: run(tmp_path / "r", RECIPE), ranks=2) == [0, 0]
    with locked(tmp_path / "r"):
        pass
