"""A loop that launches a step before the numbers of the last one have arrived, as on a GPU: the same run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_loop import stop_at
from tests.training.tiny import bytes_of, run, tiny
from vitkit.errors import Diverged, OutOfMemory
from vitkit.runtime import Fetched
from vitkit.training import metrics as metrics_module
from vitkit.training import objectives
from vitkit.training.loop import Loop
from vitkit.training.optim import Average
from vitkit.training.run_folder import RunFolder

RECIPE = tiny(ema=0.9, drop_path=0.1)
SETTINGS = {"log_every": 50, "save_every": 5, "evaluate_every": 50}


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the loop run ahead on the CPU; returns how many steps were launched after each launch."""
    plain, launch, counts = Loop.__init__, Loop._launch, []

    def init(self: Loop, *args: Any, **how: Any) -> None:
        plain(self, *args, **how)
        assert not self.ahead  # nothing runs ahead on the CPU, which has nothing to wait for
        self.ahead = True

    def counted(self: Loop, *args: Any) -> None:
        launch(self, *args)
        counts.append(len(self._launched))

    monkeypatch.setattr(Loop, "__init__", init)
    monkeypatch.setattr(Loop, "_launch", counted)
    return counts


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "time"} for row in RunFolder.open(folder).metrics()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that waits for every step."""
    out = tmp_path_factory.mktemp("whole") / "r"
    run(out, RECIPE, settings=SETTINGS)
    return out


def test_running_ahead_changes_nothing(tmp_path: Path, whole: Path, ahead: list[int]) -> None:
    steps: list[tuple[int, float]] = []

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            steps.append((event["step"], event["lr"]))

    run(tmp_path / "r", RECIPE, settings=SETTINGS, watch=watch)
    assert ahead == [1, 2, 2, 2, 2, 1, 2, 2, 2, 2, 1, 2]  # what is saved after steps 5 and 10 waits for them
    assert [step for step, _ in steps] == list(range(1, 13))
    assert bytes_of(tmp_path / "r") == bytes_of(whole)
    assert metrics(tmp_path / "r") == metrics(whole)


@pytest.mark.parametrize("done", [False, True])
def test_waiting_for_data_counts_while_the_device_is_idle(
    tmp_path: Path, ahead: list[int], monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    """With a step to do, the device does not wait for the batch of the next one, however long the loop does."""
    seconds = itertools.count()
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(Fetched, "done", lambda self: done)
    run(tmp_path / "r", RECIPE, settings={**SETTINGS, "log_every": 12, "save_every": 50})
    (time,) = (row["time"] for row in RunFolder.open(tmp_path / "r").metrics() if row["event"] == "train")
    waits = 12 if done else 1  # before the first step there is nothing to do
    assert time["waiting"] * time["seconds"] == pytest.approx(waits, rel=0.01)


def test_a_stop_request_waits_for_what_was_launched(tmp_path: Path, whole: Path, ahead: list[int]) -> None:
    _, outcome = run(tmp_path / "r", RECIPE, settings=SETTINGS, watch=stop_at(8))
    assert (outcome.stopped, outcome.step) == (True, 9)  # step 8 had been launched when the signal came
    run(tmp_path / "r", RECIPE, settings=SETTINGS, resume=True)
    assert bytes_of(tmp_path / "r") == bytes_of(whole)


def test_broken_numbers_are_noticed_before_anything_is_saved(
    tmp_path: Path, whole: Path, ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = objectives.LOSSES["softmax"], []

    def broken(*args: Any) -> Any:
        calls.append(1)
        return plain(*args) * (float("nan") if len(calls) == 7 else 1.0)

    monkeypatch.setitem(objectives.LOSSES, "softmax", broken)
    with pytest.raises(Diverged, match=r"loss became nan at step 6.*state of step 5 is kept"):
        run(tmp_path / "r", RECIPE, settings=SETTINGS)
    assert len(calls) == 8  # one more step had been launched
    assert RunFolder.open(tmp_path / "r").latest().stem.endswith("05")
    monkeypatch.setitem(objectives.LOSSES, "softmax", plain)
    run(tmp_path / "r", RECIPE, settings=SETTINGS, resume=True)
    assert bytes_of(tmp_path / "r") == bytes_of(whole)


@pytest.mark.parametrize(
    ("where", "kept"), [("loss", "Everything up to step 7 is saved"), ("average", "step 5 is kept")]
)
def test_an_error_saves_the_steps_that_were_launched(
    tmp_path: Path, whole: Path, ahead: list[int], monkeypatch: pytest.MonkeyPatch, where: str, kept: str
) -> None:
    """An error in the middle of an update leaves nothing to save."""

    def exhaust(*args: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patched:

        def watch(event: dict[str, Any]) -> None:
            if event["event"] == "step" and event["step"] == 6:  # step 7 has been launched
                if where == "loss":
                    patched.setitem(objectives.LOSSES, "softmax", exhaust)
                else:
                    patched.setattr(Average, "update", exhaust)

        with pytest.raises(OutOfMemory, match=kept):
            run(tmp_path / "r", RECIPE, settings=SETTINGS, watch=watch)
    run(tmp_path / "r", RECIPE, settings=SETTINGS, resume=True)
    assert bytes_of(tmp_path / "r") == bytes_of(whole)
