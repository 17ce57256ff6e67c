"""The log that no client can fill, and that stops nobody when it is not read."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.fuzz_serve import request, save_tiny, send, wait_for
from vitkit.server import logs
from vitkit.server.logs import PER_PERIOD, PERIOD, WAITING, Apart


def line(text: str, number: int = 1) -> logging.LogRecord:
    return logging.LogRecord("some", logging.WARNING, "some.py", number, text, None, None)


@contextmanager
def full_pipe() -> Iterator[int]:
    """The writing end of a pipe without room, which nobody reads."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    try:
        yield writing
    finally:
        os.close(writing)
        os.close(reading)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the last lines are written."""
    monkeypatch.setattr(logs, "LAST_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
def test_few_lines_from_one_place_and_how_many_were_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    now, told = [0.0], io.StringIO()
    apart = Apart([logging.StreamHandler(told)], clock=lambda: now[0])
    for n in range(PER_PERIOD + 7):
        apart.emit(line(f"from one place {n}"))
        apart.emit(line("from another", number=n + 10))
    now[0] = PERIOD
    apart.emit(line("later"))
    apart.close()
    said = told.getvalue().splitlines()
    assert [one for one in said if "one place" in one] == [f"from one place {n}" for n in range(PER_PERIOD)]
    assert said.count("from another") == PER_PERIOD + 7
    assert said[-1] == "later"
    assert "7 lines like the next one were left out" in capfd.readouterr().err


@pytest.mark.usefixtures("patient")
def test_every_request_is_logged_if_asked_for() -> None:
    told = io.StringIO()
    apart = Apart([logging.StreamHandler(told)], few=False)
    for n in range(2 * PER_PERIOD):
        apart.emit(line(str(n)))
    apart.close()
    assert told.getvalue().splitlines() == [str(n) for n in range(2 * PER_PERIOD)]


def test_nobody_waits_for_a_reader_that_does_not_read(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LAST_SECONDS", 0.2)
    with full_pipe() as writing, os.fdopen(os.dup(writing), "w") as stuck:
        apart = Apart([logging.StreamHandler(stuck)], few=False)
        emitting = threading.Thread(
            target=lambda: [apart.emit(line("x" * 100)) for _ in range(WAITING + 50)], daemon=True
        )
        emitting.start()
        emitting.join(30)
        assert not emitting.is_alive()
        assert apart._lost in (49, 50)  # the thread may hold one
        apart.close()
        apart._thread.join(60)
        assert not apart._thread.is_alive()


@pytest.mark.usefixtures("patient")
def test_lines_that_were_written_do_not_count_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who is slow, so that there is room for one line at a time, and not for the note about those lost."""
    monkeypatch.setattr(logs, "WAITING", 1)
    handled, go, told = threading.Semaphore(0), threading.Semaphore(0), io.StringIO()

    class Slow(logging.StreamHandler):
        def emit(self, record: logging.LogRecord) -> None:
            handled.release()
            assert go.acquire(timeout=60)
            super().emit(record)

    apart = Apart([Slow(told)], few=False)
    apart.emit(line("0"))
    assert handled.acquire(timeout=60)  # the thread holds the first line
    for text in ("1", "lost"):
        apart.emit(line(text))
    for text in ("2", "3"):
        go.release()
        assert handled.acquire(timeout=60)
        apart.emit(line(text))  # there is room, because the thread has taken the line before it
    assert apart._lost == 1
    for _ in range(3):
        go.release()
    apart.close()
    assert told.getvalue().splitlines() == ["0", "1", "2", "3"]


def test_a_server_whose_log_is_not_read_answers_and_stops(tmp_path: Path) -> None:
    """It hung at the first line that did not fit into the pipe."""
    weights = save_tiny(tmp_path)
    command = [sys.executable, "-m", "vitkit", "serve", str(weights), "--port", "0"]
    with full_pipe() as writing:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, text=True)
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().split("http://127.0.0.1:")[1].split()[0].rstrip("/"))
            wait_for(port)
            for _ in range(3):
                assert send(port, b"this is not HTTP\r\n\r\n", seconds=20).status == 400
            assert send(port, request("GET", "/healthz"), seconds=20).status == 200
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.communicate()
