"""What a run says while it trains: lines in a pipe, a bar on a terminal, one line per epoch in both."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import rich
from rich.console import Console

import vitkit
from tests.training.test_loop import stop_at
from tests.training.tiny import CONFIG, run, tiny
from tests.training.tiny import vitkit as command
from vitkit.jobs.watch import Watch
from vitkit.results import Run
from vitkit.training.run_folder import RunFolder

EPOCHS = tiny(steps=None, epochs=2, batch_size=400, warmup=0)  # 1,618 images: epochs end after steps 5 and 9
EPOCH = re.compile(
    r"epoch [12]/2  step (\d+)/9  \|  training loss \d\.\d{4} accuracy \d+\.\d%"
    r"  \|  validation loss \d\.\d{4} accuracy \d+\.\d%"
)


def test_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Watch() as watch:
        run(tmp_path / "r", EPOCHS, settings={"evaluate_every": None, "log_every": 100}, watch=watch)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1/9  loss ")  # at once, whatever log_every is
    assert re.fullmatch(r"step 1/9  loss \S+  accuracy \S+%  \S+ images/s  lr 0.001  \S+ \w+ left", lines[0])
    assert [EPOCH.fullmatch(line)[1] for line in lines if line.startswith("epoch")] == ["5", "9"]  # type: ignore[index]


def test_a_line_of_steps_comes_when_it_is_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(1.0)  # one between any two looks at the clock
    monkeypatch.setattr("vitkit.jobs.watch.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    for quiet, expected in ((0.0, [1, 2, 3]), (1e9, [1])):
        watch = Watch(quiet)
        watch({"event": "start", "step": 0, "total": 3, "images": 8, "epochs": 1.0})
        for step in (1, 2, 3):
            watch({"event": "step", "step": step, "total": 3, "loss": 1.0, "accuracy": 0.5, "lr": 0.1})
        assert [int(line[5]) for line in capsys.readouterr().out.splitlines()] == expected


def test_plain_lines_of_a_run_that_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It first does what was due after the step that it was stopped at, when it has no speed yet."""
    settings = {"evaluate_every": None}
    run(tmp_path / "r", EPOCHS, settings=settings, watch=stop_at(3))
    with Watch() as watch:
        run(tmp_path / "r", EPOCHS, settings=settings, resume=True, watch=watch)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "resuming from step 3"
    assert lines[1].startswith("step 4/9  loss ")


def test_a_bar_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(rich, "_console", Console())  # the shared one, made when the terminal was narrow
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Watch() as watch:
        run(tmp_path / "r", EPOCHS, settings={"evaluate_every": None}, watch=watch)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out).replace("\r", "\n")
    lines = [line.strip() for line in text.splitlines()]
    assert [EPOCH.fullmatch(line)[1] for line in lines if line.startswith("epoch")] == ["5", "9"]  # type: ignore[index]
    assert any(re.match(r"(training|validating) \S+ +\d/9 .*loss \S+  accuracy", line) for line in lines)
    assert not any(line.startswith("step") for line in lines)


def test_epochs_are_logged_exactly_and_survive_a_cut(tmp_path: Path) -> None:
    """Their training numbers are means over all of the epoch's images, in a run that was resumed too."""
    settings = {"evaluate_every": None, "log_every": 1}
    for name in ("whole", "cut"):
        if name == "cut":
            run(tmp_path / name, EPOCHS, settings=settings, watch=stop_at(3))
        run(tmp_path / name, EPOCHS, settings=settings, resume=name == "cut")
    whole, cut = (RunFolder.open(tmp_path / name).metrics() for name in ("whole", "cut"))
    steps = [row for row in whole if row["event"] == "train"]
    epochs = [row for row in whole if row["event"] == "epoch"]
    assert [(row["epoch"], row["step"]) for row in epochs] == [(1, 5), (2, 9)]
    for row, part in zip(epochs, (steps[:5], steps[5:]), strict=True):
        for value in ("loss", "accuracy"):
            assert row[value] == pytest.approx(sum(step[value] for step in part) / len(part), rel=1e-6)
    assert epochs == [
        row | {"time": epoch["time"]}
        for row, epoch in zip([row for row in cut if row["event"] == "epoch"], epochs, strict=True)
    ]
    found = Run(tmp_path / "cut").results
    assert found["train_loss"] == [row["loss"] for row in epochs]
    assert found["test_acc"] == [row["top1"] for row in whole if row["event"] == "val"]


def test_the_command_speaks_before_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import vitkit.jobs.train as job

    def prepare(*args: object, **how: object) -> None:
        assert capsys.readouterr().out == f"preparing {tmp_path / 'r'}\n"
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "prepare", prepare)
    command(monkeypatch, capsys, "train", "digits", "--out", str(tmp_path / "r"))


@pytest.mark.parametrize("progress", [True, False])
def test_python_talks_too(progress: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    vitkit.train(
        "digits",
        tmp_path / "r",
        model=CONFIG,
        recipe=EPOCHS,
        report=False,
        progress=progress,
        watch=lambda event: seen.append(event["event"]),
        workers=0,
    )
    out = capsys.readouterr().out
    assert bool(out) == progress
    assert (out.count("epoch "), "parameters, on 1,618 images" in out) == ((2, True) if progress else (0, False))
    assert seen.count("epoch") == 2
