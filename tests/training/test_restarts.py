"""A group of processes that torchrun starts again resumes its own run, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.tiny import bytes_of, forked, run, tiny
from vitkit.errors import OutputError
from vitkit.training.run_folder import RunFolder

RECIPE = tiny(steps=12)


class Killed(Exception):
    pass


@pytest.mark.parametrize("job", ["job-7", "none"])
def test_a_restarted_process_resumes_its_own_run(job: str, tmp_path: Path) -> None:
    """With --rdzv-id the job has a name; without one it is known by the process that launched it."""

    def die(event: dict) -> None:
        if event["event"] == "step" and event["step"] == 7:
            raise Killed

    def started(watch=None, job: str = job):  # type: ignore[no-untyped-def]
        def work(rank: int) -> None:
            os.environ["TORCHELASTIC_RUN_ID"] = job
            run(tmp_path / "r", RECIPE, watch=watch)

        return work

    assert forked(started(die)) == [1]
    assert RunFolder.open(tmp_path / "r").latest() is not None

    def other(rank: int) -> None:
        with pytest.raises(OutputError, match="holds a run"):
            started(job="job-8")(rank)

    assert forked(other) == [0]
    with pytest.raises(OutputError, match="holds a run"):  # by hand
        run(tmp_path / "r", RECIPE)
    assert forked(started()) == [0]
    run(tmp_path / "whole", RECIPE)
    assert bytes_of(tmp_path / "r") == bytes_of(tmp_path / "whole")
    assert forked(started()) == [0]  # restarted after its end: there is nothing left to do
    assert bytes_of(tmp_path / "r") == bytes_of(tmp_path / "whole")


def test_the_user_is_told(tmp_path: Path) -> None:
    from vitkit.jobs.train import prepare

    def work(rank: int) -> None:
        os.environ["TORCHELASTIC_RUN_ID"] = "job-7"
        if not (tmp_path / "r").exists():
            run(tmp_path / "r", RECIPE)
        else:
            ready = prepare("digits", tmp_path / "r", recipe=RECIPE)
            assert ready.resume
            assert ready.notes == (f"{tmp_path / 'r'} was started by this torchrun job, so the run is resumed.",)

    assert forked(work) == [0]
    assert forked(work) == [0]


def test_three_processes_resume_to_the_bit(tmp_path: Path) -> None:
    """The sum of three numbers depends on their order, which DDP chooses in its first backward pass."""

    def cut(event: dict) -> None:
        if event["event"] == "step" and event["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    recipe = tiny(steps=8, lr=1e-2)
    assert forked(lambda rank: run(tmp_path / "cut", recipe, watch=cut), ranks=3) == [0, 0, 0]
    assert forked(lambda rank: run(tmp_path / "cut", recipe, resume=True), ranks=3) == [0, 0, 0]
    assert forked(lambda rank: run(tmp_path / "whole", recipe), ranks=3) == [0, 0, 0]
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_ranks_and_agents_killed_at_random() -> None:
    """4 -> 3 -> 2 -> 4 processes: the same global batches, and the weights of an undisturbed run."""
    command = [sys.executable, "-m", "benchmarks.elastic", "--kills", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("global batches as ordered") == 2
    assert done.stdout.count("bit-identical") >= 1
