"""kill -9 at chosen and at random moments: a resumed run ends exactly as an uninterrupted one.

The full version, with processes of their own and many more kills, is `python -m benchmarks.kills`.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training.tiny import bytes_of, extra_of, forked, run, tiny
from vitkit.training.run_folder import RunFolder

RECIPE = tiny(steps=24, dropout=0.1, drop_path=0.1, ema=0.9)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(monkey: Any, where: str, call: int) -> None:
    """Replace a function so that its n-th call kills this process half-way through."""
    from vitkit.checkpoints import containers

    calls = {"n": 0}
    if where == "write":  # while the bytes of a state or a checkpoint are being written
        plain = containers.write

        def write(tensors: Any, path: Path, metadata: Any = None) -> None:
            calls["n"] += 1
            plain(tensors, path, metadata)
            if calls["n"] == call:
                with open(path, "r+b") as file:
                    file.truncate(path.stat().st_size // 2)
                die()

        monkey.setattr(containers, "write", write)
    else:  # before or after a file takes its place
        replace = os.replace

        def instead(a: Any, b: Any) -> None:
            calls["n"] += 1
            if calls["n"] == call and where == "before rename":
                die()
            replace(a, b)
            if calls["n"] == call:
                die()

        monkey.setattr(os, "replace", instead)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("whole") / "r"
    run(out, RECIPE)
    return bytes_of(out)


# A save writes four files (state, last, ema, best where it is one), each with one rename; run.json has one of its own.
@pytest.mark.parametrize(
    ("where", "calls"),
    [
        ("write", (1, 2, 3, 5, 1)),
        ("before rename", (1, 3, 2, 4)),
        ("after rename", (2, 3, 1, 6)),
    ],
)
def test_killed_while_saving(where: str, calls: tuple[int, ...], whole: dict[str, Any], tmp_path: Path) -> None:
    for call in calls:

        def work(rank: int, call: int = call) -> None:
            kill_at(pytest.MonkeyPatch(), where, call)
            run(tmp_path / "r", RECIPE, resume=True)

        assert forked(work) == [-signal.SIGKILL]
    assert forked(lambda rank: run(tmp_path / "r", RECIPE, resume=True)) == [0]
    assert bytes_of(tmp_path / "r") == whole
    assert not list((tmp_path / "r").rglob(".vitkit-*"))


def test_killed_at_random_moments(whole: dict[str, Any], tmp_path: Path) -> None:
    draw = random.Random(0)

    def watch(event: dict) -> None:
        if event["event"] == "step" and event["step"] == RECIPE.steps:  # the run was faster than the kill
            time.sleep(60)

    for kill in range(4):

        def work(rank: int, kill: int = kill, seconds: float = draw.uniform(0.05, 0.5)) -> None:
            threading.Thread(target=lambda: (time.sleep(seconds), die()), daemon=True).start()
            run(tmp_path / "r", RECIPE, resume=True, settings={"workers": kill % 2}, watch=watch)

        assert forked(work) == [-signal.SIGKILL]
    assert forked(lambda rank: run(tmp_path / "r", RECIPE, resume=True)) == [0]
    assert bytes_of(tmp_path / "r") == whole


def test_metrics_after_the_last_state_are_forgotten(tmp_path: Path) -> None:
    out = tmp_path / "r"

    def watch(event: dict) -> None:
        if event["event"] == "train" and event["step"] == 15:
            die()

    assert forked(lambda rank: run(out, RECIPE, watch=watch)) == [-signal.SIGKILL]
    before = [row["step"] for row in RunFolder.open(out).metrics()]
    assert max(before) == 15
    assert RunFolder.open(out).latest().name == "step-000000000012.safetensors"
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"event": "train", "st')  # a line that was cut
    forked(lambda rank: run(out, RECIPE, resume=True))
    steps = [row["step"] for row in RunFolder.open(out).metrics() if row["event"] == "train"]
    assert steps == [5, 10, 15, 20, 24]


def test_best_survives_a_kill_between_saves(tmp_path: Path) -> None:
    """Killed right after a new best was found, long before the next save is due."""
    settings = {"save_every": 100, "evaluate_every": 3}
    recipe = tiny(steps=24, lr=5e-3, dropout=0.1, ema=0.9)
    run(tmp_path / "whole", recipe, settings=settings)
    found = bytes_of(tmp_path / "whole")
    step = int(extra_of(tmp_path / "whole" / "best.safetensors")["step"])
    assert step % 3 == 0

    def watch(event: dict) -> None:
        if event["event"] == "step" and event["step"] == min(step + 1, 23):
            die()

    assert forked(lambda rank: run(tmp_path / "r", recipe, settings=settings, watch=watch)) == [-signal.SIGKILL]
    assert forked(lambda rank: run(tmp_path / "r", recipe, settings=settings, resume=True)) == [0]
    assert bytes_of(tmp_path / "r") == found
