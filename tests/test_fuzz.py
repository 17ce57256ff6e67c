"""The cases of `python -m benchmarks.fuzz`, a few of each kind; the log has the results of many more."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fuzz


def outcomes(kind: str, count: int, seed: int = 1) -> Counter[str]:
    said: list[dict[str, Any]] = []
    fuzz.run_cases(kind, seed, 0, count, said.append)
    ended = [line for line in said if "how" in line]
    assert len(ended) == count
    lost = [line for line in ended if line["how"].startswith("lost")]
    assert not lost, lost[:3]
    return Counter(line["how"] for line in ended)


def test_mutated_images_are_read_or_refused(capfd: pytest.CaptureFixture[str]) -> None:
    found = outcomes("images", 400)
    assert found["read"] > 10
    assert found["BadImage"] > 100
    assert capfd.readouterr().err == ""  # C libraries included


def test_mutated_checkpoints_are_read_or_refused() -> None:
    found = outcomes("checkpoints", 250)
    assert found["read"] > 10
    assert found["UnreadableFile"] > 20
    assert found["UnsafeFile"] > 3


def test_mutated_files_of_runs_are_read_or_refused() -> None:
    found = outcomes("runs", 60)
    assert found["read"] > 10
    assert found["ConfigError"] + found["UnreadableFile"] > 10


@pytest.mark.slow
def test_mutated_exports_are_read_or_refused() -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("openvino")
    lines = list(fuzz.watch("exports", 1, 0, 30))
    found = {line["n"]: line["how"] for line in lines if "how" in line}
    assert len(found) == 30
    assert not [line for line in lines if "noise" in line]  # printed by OpenVINO or ONNX Runtime
    assert not [how for how in found.values() if how.startswith("lost")]


def test_a_case_is_the_same_every_time() -> None:
    corpus = fuzz.pictures()
    name = "rgb.png"

    def case(number: int) -> bytes:
        return fuzz.mutate(corpus[name], fuzz.generator("images", 0, number), corpus["rgb.jpg"])

    assert case(3) == case(3)
    assert len({case(number) for number in range(20)}) > 15
    one, two = (fuzz.mutate_json({"a": [1, {"b": 2}]}, random.Random(5)) for _ in range(2))
    assert json.dumps(one) == json.dumps(two)


class Faulty:
    """A kind whose doors fail in ways that must be counted as lost."""

    def __init__(self, folder: Path) -> None:
        self.number = 0

    def case(self, rng: random.Random) -> Any:
        from vitkit.errors import BadImage

        self.number += 1
        error = [KeyError("x"), BadImage("short"), BadImage("y" * 900), RecursionError()][self.number - 1]

        def door() -> None:
            raise error

        return "a file", door


def test_what_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fuzz.KINDS, "faulty", Faulty)
    monkeypatch.setattr(fuzz, "LONGEST", 500)
    said: list[dict[str, Any]] = []
    fuzz.run_cases("faulty", 0, 0, 4, said.append)
    lost = [line["how"].startswith("lost") for line in said if "how" in line]
    assert lost == [True, False, True, True]


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_stopped_run_continues(jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    interrupted: list[int] = []

    def watch(kind: str, seed: int, start: int, stop: int) -> Any:
        asked.append((start, stop))
        for number in range(start, stop):
            if number == 12 and not interrupted:
                interrupted.append(number)
                raise KeyboardInterrupt
            yield {"n": number, "file": "f", "how": "lost: x" if number == 2 else "read", "mb": 1.0}

    monkeypatch.setattr(fuzz, "watch", watch)
    monkeypatch.setattr(fuzz, "BATCH", 5)
    state = tmp_path / "s.json"
    with pytest.raises(KeyboardInterrupt):
        fuzz.fuzz("images", 18, 0, state, lambda line: None, jobs=jobs)
    kept = json.loads(state.read_text())
    assert [10, 15] not in kept["batches"]
    asked.clear()
    summary = fuzz.fuzz("images", 18, 0, state, lambda line: None, jobs=jobs)
    assert not [pair for pair in asked if list(pair) in kept["batches"]]  # nothing is done twice
    assert sorted(summary["batches"]) == [[0, 5], [5, 10], [10, 15], [15, 18]]
    assert summary["how"] == {"read": 17, "lost": 1}
    assert [one["n"] for one in summary["lost"]] == [2]
    assert fuzz.fuzz("images", 30, 0, state, lambda line: None, seconds=-1)["done"] == 18  # no time left
    assert fuzz.fuzz("images", 22, 0, state, lambda line: None)["batches"][-2:] == [[18, 20], [20, 22]]
    with pytest.raises(SystemExit, match="belongs to images, seed 0"):
        fuzz.fuzz("checkpoints", 20, 0, state)
