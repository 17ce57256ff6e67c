"""Early stopping: when a run stops, what it keeps and says, and that a resumed run stops at the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.test_loop import distance, stop_at, with_a_head
from tests.training.tiny import bytes_of, extra_of, forked, tiny, vitkit
from tests.training.tiny import run as run_any
from vitkit.errors import ConfigError
from vitkit.training.recipe import Recipe
from vitkit.training.run_folder import RunFolder
from vitkit.training.state import TrainingState
from vitkit.training.stopping import consider, reason_to_stop

STILL = tiny(steps=40, warmup=0, lr=1e-30, early_stop=2)  # nothing changes, so only the first validation is better


def run(out: Path, recipe: Recipe, **how: Any) -> Any:
    """Train from weights whose head is not zero: an update of 1e-30 would change the answers of one that is."""
    file = out.parent / "w.safetensors"
    if not file.exists():
        with_a_head(tiny(), file)
    return run_any(out, recipe, weights=file, **how)


def test_what_counts_as_better() -> None:
    progress, seen = TrainingState(), []
    for step, (score, loss) in enumerate([(0.5, 1.0), (0.5, 1.0), (0.5, 1.1), (0.5, 0.9), (0.4, 0.1), (0.6, 2.0)]):
        seen.append((consider(progress, {"last": (score, loss)}, step), progress.stale, progress.best_step))
    assert seen == [(True, 0, 0), (True, 1, 1), (False, 2, 1), (True, 0, 3), (False, 1, 3), (True, 0, 5)]


def test_either_of_the_weights_may_be_better() -> None:
    progress = TrainingState()
    consider(progress, {"last": (0.5, 1.0), "ema": (0.1, 2.0)}, 1)
    assert consider(progress, {"last": (0.4, 1.0), "ema": (0.6, 1.0)}, 2)
    assert (progress.best, progress.best_weights, progress.stale) == (0.6, "ema", 0)


def test_patience() -> None:
    assert [bool(reason_to_stop(TrainingState(stale=n), 3)) for n in range(5)] == [False, False, False, True, True]
    assert reason_to_stop(TrainingState(stale=100), None) == ""


@pytest.mark.parametrize("patience", [1, 3])
def test_a_run_stops_and_says_why(patience: int, tmp_path: Path) -> None:
    said: list[dict] = []
    recipe = tiny(steps=40, warmup=0, lr=1e-30, early_stop=patience)
    folder, outcome = run(tmp_path / "r", recipe, watch=said.append, settings={"save_every": 1000})
    step = 4 * (1 + patience)  # validated every 4 steps
    assert (outcome.step, outcome.total, outcome.stopped) == (step, 40, False)
    assert "no better than the best" in outcome.why
    assert RunFolder.open(tmp_path / "r").info["stopped_early"] == {"step": step, "why": outcome.why}
    rows = folder.metrics()
    assert rows[-1] == {"event": "stop", "step": step, "why": outcome.why}
    assert [row["step"] for row in rows if row["event"] == "train"][-1] == step  # every step has been logged
    assert said[-1]["event"] == "stop"
    assert folder.latest().name == f"step-{step:012d}.safetensors"


def test_the_best_weights_are_kept(tmp_path: Path) -> None:
    folder, outcome = run(tmp_path / "r", tiny(steps=400, warmup=0, lr=0.03, early_stop=3))
    judged = [row for row in folder.metrics() if row["event"] == "val"]
    assert outcome.step < 400
    best = max(judged, key=lambda row: (row["top1"], -row["loss"], row["step"]))
    assert best["step"] == outcome.step - 3 * 4
    assert extra_of(folder.weights())["step"] == str(best["step"])
    assert outcome.best == best["top1"]


def test_resume_counts_on_at_every_step(tmp_path: Path) -> None:
    run(tmp_path / "whole", STILL)
    run(tmp_path / "cut", STILL, watch=stop_at(1))
    for step in (3, 4, 5, 7, 8, 9, 11):  # before, at and after validations
        _, outcome = run(tmp_path / "cut", STILL, watch=stop_at(step), resume=True)
        assert outcome.stopped
    _, outcome = run(tmp_path / "cut", STILL, resume=True)
    assert (outcome.step, outcome.stopped) == (12, False)
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")


def test_cut_at_the_last_step_the_resumed_run_stops_without_another(tmp_path: Path) -> None:
    run(tmp_path / "whole", STILL)
    run(tmp_path / "cut", STILL, watch=stop_at(12))
    run(tmp_path / "cut", STILL, resume=True)
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")
    infos = [RunFolder.open(tmp_path / name).info for name in ("cut", "whole")]
    assert infos[0]["stopped_early"] == infos[1]["stopped_early"]


def test_a_run_that_stopped_early_is_finished(tmp_path: Path) -> None:
    run(tmp_path / "r", STILL)
    before, said = bytes_of(tmp_path / "r"), []
    _, outcome = run(tmp_path / "r", STILL, resume=True, watch=said.append)
    assert outcome.step == 12
    assert outcome.why
    assert bytes_of(tmp_path / "r") == before
    assert any("already finished: it stopped early" in event.get("text", "") for event in said)


def test_two_processes_stop_together(tmp_path: Path) -> None:
    recipe = tiny(steps=40, warmup=0, lr=1e-30, early_stop=2, ema=0.9)
    with_a_head(tiny(), tmp_path / "w.safetensors")
    assert forked(lambda rank: run(tmp_path / "two", recipe), ranks=2) == [0, 0]
    run(tmp_path / "one", recipe)
    assert RunFolder.open(tmp_path / "two").info["stopped_early"]["step"] == 12
    assert distance(tmp_path / "one", tmp_path / "two") < 1e-4


def test_without_validation_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--early-stop needs images to validate on"):
        run(tmp_path / "r", tiny(early_stop=2, val=0.0))
    for wrong in (0, -1, 1.5):
        with pytest.raises(ConfigError, match="early_stop must be a whole number of at least 1"):
            tiny(early_stop=wrong)
    assert not (tmp_path / "r").exists()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with_a_head(tiny(), tmp_path / "w.safetensors")
    options = "--recipe digits --epochs 30 --lr 1e-30 --warmup 0 --evaluate-every 2 --early-stop 2 --no-report"
    how = [*options.split(), "--device", "cpu", "--workers", "0", "--tracker", "none", "--out", str(tmp_path / "r")]
    how += ["--from", str(tmp_path / "w.safetensors")]
    code, out, err = vitkit(monkeypatch, capsys, "train", "digits", *how)
    assert code == 0, err
    assert "stopping early: 2 validations in a row were no better than the best, at step" in out
    assert "done: 6 of 1,517 steps" in out
