"""What ends a run early: it says why, saves what it can, leaves no process behind, and resumes bit-identically."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.tiny import bytes_of, forked, run, tiny
from vitkit.checkpoints import containers
from vitkit.cli import main
from vitkit.data import workers
from vitkit.data.decode import bad
from vitkit.errors import BadImage, Diverged, LostWorker, OutOfMemory, OutputError, SaveFailed, Unreachable
from vitkit.runtime import stop_requests
from vitkit.training import loop
from vitkit.training.failures import advice, explain
from vitkit.training.lock import locked
from vitkit.training.objectives import Classify
from vitkit.training.run_folder import RunFolder

RECIPE = tiny(steps=12, dropout=0.1, ema=0.9)
SETTINGS = {"save_every": 100, "evaluate_every": 4, "workers": 1}  # nothing is saved before the failure
SAVED = r"Everything up to step {} is saved\. Resume with: vitkit train --out .* --resume$"
SOON = SAVED.format("([6-9]|1.)")  # a worker may have sent some batches in advance
Watch = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("whole") / "r"
    run(out, RECIPE, settings=SETTINGS)
    return bytes_of(out)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch wait less for workers that do not end."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)


def at(step: int, work: Callable[[], Any], event: str = "step") -> Watch:
    """Return a watch that does some work once a step is done."""
    return lambda seen: work() if (seen["event"], seen.get("step")) == (event, step) else None


def signal_workers(number: int) -> None:
    for process in multiprocessing.active_children():
        assert process.pid is not None
        os.kill(process.pid, number)


def check_resumes(out: Path, whole: dict[str, Any]) -> None:
    """Check that no worker is left, that the lock is free, and that the resumed run ends as an uninterrupted one."""
    assert multiprocessing.active_children() == []
    run(out, RECIPE, resume=True, settings=SETTINGS)
    assert bytes_of(out) == whole


def test_a_killed_worker(tmp_path: Path, whole: dict[str, Any]) -> None:
    watch = at(6, lambda: signal_workers(signal.SIGKILL))
    with pytest.raises(LostWorker, match=f"worker process .* was killed by SIGKILL.*fewer --workers. {SOON}"):
        run(tmp_path / "r", RECIPE, settings=SETTINGS, watch=watch)
    check_resumes(tmp_path / "r", whole)


def test_a_worker_that_hangs(tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "TICK", 0.1)
    monkeypatch.setattr(loop, "SILENCE", 0.0)
    notes: list[str] = []

    def hang() -> None:
        signal_workers(signal.SIGSTOP)
        monkeypatch.setattr(workers, "PATIENCE", 0.5)  # not before: a worker may take longer to start

    def watch(event: dict[str, Any]) -> None:
        at(6, hang)(event)
        notes.append(event.get("text", ""))

    with pytest.raises(LostWorker, match=rf"No worker process has sent images for \d+ s.*--workers 0. {SOON}"):
        run(tmp_path / "r", RECIPE, settings=SETTINGS, watch=watch)
    assert any("Waiting for images: no worker process has sent any" in note for note in notes)
    monkeypatch.undo()
    check_resumes(tmp_path / "r", whole)


def test_a_wait_is_told_once_even_if_a_look_at_it_comes_late() -> None:
    waiting, notes = loop.Loop.__new__(loop.Loop), list[str]()
    waiting._waited, waiting._note = -1.0, notes.append  # type: ignore[method-assign]
    for seconds in (1.0, 59.9, 60.4, 61.4, 62.4, 1.0, 65.0, 66.0, 64.0):  # three waits
        waiting._on_wait([], seconds)
    assert [note.split()[-2] for note in notes] == ["60", "65", "64"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_request_while_a_worker_hangs(tmp_path: Path, whole: dict[str, Any], number: int) -> None:
    def work() -> None:
        signal_workers(signal.SIGSTOP)
        os.kill(os.getpid(), number)

    _, outcome = run(tmp_path / "r", RECIPE, settings=SETTINGS, watch=at(6, work))
    assert (outcome.stopped, outcome.signal) == (True, number)
    check_resumes(tmp_path / "r", whole)


def test_a_killed_worker_during_a_validation(
    tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: Any, **how: Any) -> Any:
        raise LostWorker("A worker was killed.")

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 8:
            monkeypatch.setattr(Classify, "validate", killed)

    with pytest.raises(LostWorker, match=r"Everything up to step 8 is saved"):
        run(tmp_path / "r", RECIPE, settings={**SETTINGS, "log_every": 4}, watch=watch)
    monkeypatch.undo()
    run(tmp_path / "whole", RECIPE, settings={**SETTINGS, "log_every": 4})
    run(tmp_path / "r", RECIPE, settings={**SETTINGS, "log_every": 4}, resume=True)
    assert bytes_of(tmp_path / "r") == bytes_of(tmp_path / "whole")


def test_a_stop_request_does_not_wait_for_a_validation(
    tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request comes with the step after which the run validates; a service manager may wait a few seconds only."""
    watch = at(7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    folder, outcome = run(tmp_path / "r", RECIPE, settings=SETTINGS, watch=watch)
    assert (outcome.step, outcome.signal) == (8, signal.SIGTERM)
    assert not [row for row in folder.metrics() if row["step"] == 8]
    check_resumes(tmp_path / "r", whole)


@pytest.mark.parametrize("kind", ["torch", "python", "system"])
def test_no_memory(tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def exhaust(*args: Any, **how: Any) -> Any:
        if kind == "torch":
            return torch.empty(1 << 50)  # the allocator's own error
        if kind == "python":
            raise MemoryError
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    watch = at(6, lambda: monkeypatch.setattr(Classify, "loss", exhaust))
    with pytest.raises(
        OutOfMemory, match=f"No memory was left at step 6.*--checkpointing or fewer --workers. {SAVED.format(6)}"
    ):
        run(tmp_path / "r", RECIPE, settings=SETTINGS, watch=watch)
    monkeypatch.undo()
    check_resumes(tmp_path / "r", whole)


def test_no_memory_in_the_middle_of_an_update(
    tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some weights may have changed and others not: such a state must not be saved."""

    def exhaust(self: Any) -> None:
        raise MemoryError

    watch = at(6, lambda: monkeypatch.setattr("vitkit.training.optim.Average.update", exhaust))
    with pytest.raises(OutOfMemory, match=r"Nothing was saved yet\.$"):
        run(tmp_path / "a", RECIPE, settings={**SETTINGS, "evaluate_every": 100}, watch=watch)
    monkeypatch.undo()
    watch = at(6, lambda: monkeypatch.setattr("vitkit.training.optim.Average.update", exhaust))
    with pytest.raises(OutOfMemory, match=r"The state of step 5 is kept\. Resume with"):
        run(tmp_path / "r", RECIPE, settings={**SETTINGS, "save_every": 5}, watch=watch)
    monkeypatch.undo()
    check_resumes(tmp_path / "r", whole)


def test_the_folder_is_deleted(tmp_path: Path) -> None:
    out = tmp_path / "r"
    watch = at(6, lambda: shutil.rmtree(out))
    with pytest.raises(SaveFailed, match=r"The run folder .* no longer exists: it was deleted, renamed or unmounted\."):
        run(out, RECIPE, settings=SETTINGS, watch=watch)
    assert not out.exists()  # and it is not made again


def test_the_folder_is_renamed(tmp_path: Path) -> None:
    settings = {**SETTINGS, "save_every": 4}
    watch = at(6, lambda: (tmp_path / "r").rename(tmp_path / "moved"))
    with pytest.raises(SaveFailed, match=r"no longer exists: .* If it was renamed, resume it .* new name\.$"):
        run(tmp_path / "r", RECIPE, settings=settings, watch=watch)
    run(tmp_path / "moved", RECIPE, settings=settings, resume=True)
    run(tmp_path / "whole", RECIPE, settings=settings)
    assert bytes_of(tmp_path / "moved") == bytes_of(tmp_path / "whole")


def test_the_folder_is_renamed_while_a_state_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, out = containers.write, tmp_path / "r"

    def write(tensors: Any, path: Path, metadata: Any = None) -> None:
        if "step-000000000008" in path.name:
            out.rename(tmp_path / "moved")
        plain(tensors, path, metadata)

    monkeypatch.setattr(containers, "write", write)
    with pytest.raises(SaveFailed, match=r"^The run folder .* no longer exists: .* with --out and its new name\.$"):
        run(out, RECIPE, settings={**SETTINGS, "save_every": 4})
    assert not out.exists()
    assert len(RunFolder.open(tmp_path / "moved").states()) == 1


def test_a_save_that_fails_ends_every_process(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with pytest.raises(SaveFailed, match=r"no longer exists"):
            run(tmp_path / "r", RECIPE, settings=settings, watch=watch)

    settings = {**SETTINGS, "evaluate_every": 100, "log_every": 100, "save_every": 6}
    watch = at(6, lambda: shutil.rmtree(tmp_path / "r"))  # called in the main process alone

    assert forked(work, ranks=2) == [0, 0]


def test_a_process_that_dies_ends_the_other(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            calls = []

            def die(*args: Any, **how: Any) -> None:
                calls.append(1)
                if len(calls) == 7:  # of step 6: several processes compute the gradients of their first step twice
                    os.kill(os.getpid(), signal.SIGKILL)

            torch.optim.Optimizer.zero_grad = die  # type: ignore[method-assign,assignment]
        with pytest.raises(
            LostWorker, match=r"Another process of this run has ended.*Everything up to step 5 is saved"
        ):
            run(tmp_path / "r", RECIPE, settings={**SETTINGS, "workers": 0})

    assert forked(work, ranks=2) == [0, -signal.SIGKILL]
    assert RunFolder.open(tmp_path / "r").latest().name == "step-000000000005.safetensors"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_output_that_goes_nowhere_does_not_end_a_run(tmp_path: Path, whole: dict[str, Any], number: int) -> None:
    """A closed terminal, or a log on a full disk."""
    seen = []

    def watch(event: dict[str, Any]) -> None:
        seen.append(event)
        if event.get("step") == 6:
            raise OSError(number, "gone")

    run(tmp_path / "r", RECIPE, settings=SETTINGS, watch=watch)
    assert max(event.get("step", 0) for event in seen) == 6
    assert bytes_of(tmp_path / "r") == whole


def test_a_reader_that_is_gone_ends_a_run_and_saves_it(tmp_path: Path, whole: dict[str, Any]) -> None:
    def stop() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(OutputError, match=r"Nobody reads the output any more.*Everything up to step 6 is saved"):
        run(tmp_path / "r", RECIPE, settings=SETTINGS, watch=at(6, stop))
    check_resumes(tmp_path / "r", whole)


def test_a_tracker_that_fails_does_not_end_a_run(
    tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensorboard.SummaryWriter, "add_scalar", full)
    notes: list[str] = []
    settings = {**SETTINGS, "trackers": ("tensorboard",)}
    run(tmp_path / "r", RECIPE, settings=settings, watch=lambda event: notes.append(event.get("text", "")))
    assert [note for note in notes if note] == [
        "Metrics are no longer sent to the trackers: [Errno 28] No space left on device. metrics.jsonl has them all."
    ]
    assert bytes_of(tmp_path / "r") == whole


def test_sighup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as requests:
            os.kill(os.getpid(), signal.SIGHUP)
        assert requests == []
    finally:
        signal.signal(signal.SIGHUP, before)
    with stop_requests() as requests:
        os.kill(os.getpid(), signal.SIGHUP)
    assert requests == [signal.SIGHUP]


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_second_sighup_does_not_end_a_run_that_saves(first: int) -> None:
    """A closing terminal sends two, by the shell and by the system, and a service manager one after SIGTERM."""

    def work(rank: int) -> None:
        with stop_requests() as requests:
            for number in (first, signal.SIGHUP, signal.SIGHUP):
                os.kill(os.getpid(), number)
        assert requests == [first]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL

    assert forked(work) == [0]


@pytest.mark.skipif(os.name != "posix", reason="needs a terminal of its own")
def test_a_closed_terminal_saves_the_run(tmp_path: Path) -> None:
    import fcntl
    import pty
    import termios

    place, (master, slave) = tmp_path / "r", pty.openpty()
    options = "--recipe digits --steps 10000 --evaluate-every 50 --workers 1 --device cpu --out"
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # no thread of ours holds a lock here
        pid = os.fork()
    if pid == 0:
        code: Any = 1
        try:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)  # from now on this process gets SIGHUP if the terminal is closed
            os.close(master)
            for number in range(3):
                os.dup2(slave, number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            sys.argv = ["vitkit", "train", "digits", *options.split(), str(place)]
            os.environ["TERM"] = "xterm"
            warnings.simplefilter("ignore")
            main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(slave)
    text = b""
    while b"loss" not in text:
        try:
            text += os.read(master, 1000)
        except OSError:
            pytest.fail(text.decode())
    os.close(master)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert RunFolder.open(place).latest() is not None
    with locked(place) as note:  # the lock is free
        assert note is None


def test_exit_codes_tell_failures_apart() -> None:
    codes = {kind: kind("").exit_code for kind in (SaveFailed, LostWorker, OutOfMemory, Diverged, BadImage)}
    assert codes == {SaveFailed: 3, LostWorker: 4, OutOfMemory: 5, Diverged: 2, BadImage: 2}


def test_what_to_do_fits_the_image_that_ended_a_run() -> None:
    """An image that its storage did not deliver may be there on the next attempt; a broken one is not."""
    broken, away = bad("a.jpg", "truncated"), Unreachable("a.jpg: could not be fetched.")
    kept = {error: f"Saved. {advice(error, Path('r'))}" for error in (broken, away)}
    assert str(explain(broken, 3, kept[broken], 1)) == (
        "a.jpg: truncated. Saved. Leave it out: vitkit train --out r --resume --bad-images skip; or repair it and "
        "start again with a new --out."
    )
    assert str(explain(away, 3, kept[away], 1)).endswith("Saved. Resume with: vitkit train --out r --resume")
    assert str(explain(broken, 0, "Nothing was saved yet.", 1)) == f"{broken} Nothing was saved yet."
