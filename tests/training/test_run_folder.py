"""Damage to a run folder: a run resumes from what is intact, with the same result, or says why it cannot."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.training.tiny import bytes_of, run, tiny
from vitkit.errors import CheckpointError, UnreadableFile, VitkitError
from vitkit.jobs.listing import diff, list_runs
from vitkit.jobs.report import compare, report
from vitkit.jobs.train import train
from vitkit.training.run_folder import Header, RunFolder

RECIPE = tiny(steps=12, dropout=0.1, ema=0.9)
SETTINGS = {"save_every": 2, "evaluate_every": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("whole") / "r"
    run(out, RECIPE, settings=SETTINGS)
    return bytes_of(out)


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A run that was stopped after step 7."""

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r", RECIPE, settings=SETTINGS, watch=watch)
    return tmp_path / "r"


def steps_of(out: Path) -> list[int]:
    return [int(path.stem.rpartition("-")[2]) for path in RunFolder.open(out).states()]


def resume(out: Path) -> list[str]:
    """Resume a run to its end; return the notes that the user sees."""
    notes: list[str] = []
    run(out, RECIPE, resume=True, settings=SETTINGS, watch=lambda e: notes.append(e.get("text", "")))
    return [note for note in notes if note]


def flip(path: Path, place: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def test_two_states_are_kept_and_both_resume(cut: Path, whole: dict[str, Any]) -> None:
    assert steps_of(cut) == [6, 4]
    RunFolder.open(cut).states()[0].unlink()
    assert resume(cut) == []
    assert bytes_of(cut) == whole
    assert steps_of(cut) == [12, 10]


def places(path: Path) -> dict[str, int]:
    """Positions of every kind of byte in a state file: in the header, and in each kind of tensor."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size)
    found = {"the size of the header": 0, "the header's first byte": 8}
    for what in ("step", "best_loss", "logged", "created", "hidden_size"):
        found[what] = 8 + header.index(f'\\"{what}\\"'.encode()) + len(what) + 6
    draw, tensors = random.Random(0), json.loads(header)
    tensors.pop("__metadata__")
    for kind in ("model/", "ema/", "exp_avg", "exp_avg_sq", "/step"):
        name = draw.choice([name for name in tensors if kind in name])
        start, stop = tensors[name]["data_offsets"]
        found[name] = 8 + size + draw.randrange(start, stop)
        found[f"the name {name}"] = 8 + header.index(name.encode()) + len(name) - 1
    return found


def test_one_flipped_bit_falls_back_to_the_state_before(cut: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    newest = RunFolder.open(cut).states()[0]
    for number, (what, place) in enumerate(places(newest).items()):
        copy = tmp_path / str(number)
        shutil.copytree(cut, copy)
        damaged = copy / "state" / newest.name
        flip(damaged, place, bit=number % 7)
        notes = resume(copy)
        assert len(notes) == 1, what
        assert f"{damaged} is " in notes[0], what
        assert f"renamed to {newest.name}.damaged; the state before it is used" in notes[0], what
        assert bytes_of(copy) == whole, what
        assert damaged.with_name(f"{newest.name}.damaged").is_file(), what


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_state_falls_back_to_the_state_before(cut: Path, whole: dict[str, Any], size: int) -> None:
    newest = RunFolder.open(cut).states()[0]
    kept = newest.read_bytes()[:size]
    newest.write_bytes(kept)
    assert "the state before it is used" in resume(cut)[0]
    assert bytes_of(cut) == whole


def test_no_intact_state_is_told(cut: Path) -> None:
    for path in RunFolder.open(cut).states():
        flip(path, path.stat().st_size - 3)
    with pytest.raises(UnreadableFile, match=r"No state of .* can be resumed from\..*checksum does not match.*@last"):
        resume(cut)
    assert steps_of(cut) == [6, 4]  # nothing was renamed or removed


def test_a_state_of_an_older_version_is_told(tmp_path: Path) -> None:
    save_file({"model/a": torch.zeros(1)}, tmp_path / "a.safetensors", {"progress": "{}"})
    with pytest.raises(CheckpointError, match="older version"):
        Header.of(tmp_path / "a.safetensors")


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def work(path: Path) -> None:
        info = json.loads(path.read_text())
        change(info)
        path.write_text(json.dumps(info))

    return work


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\0" * 4096),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text("{}"),
        lambda path: path.unlink(),
        edit(lambda info: info["recipe"].update(lr=0.002)),
        edit(lambda info: info["settings"].update(seed=7)),
        edit(lambda info: info.pop("same")),
    ],
)
def test_a_damaged_run_json_is_rebuilt_from_the_state(cut: Path, whole: dict[str, Any], damage: Any) -> None:
    before = json.loads((cut / "run.json").read_text())
    damage(cut / "run.json")
    with pytest.warns(UserWarning, match="copy in state/ is used"):
        train(None, cut, resume=True)  # everything comes from run.json
    assert bytes_of(cut) == whole
    assert json.loads((cut / "run.json").read_text()) == before


@pytest.mark.parametrize("text", ["", '{"kind": "train"}', '{"same": {'])
def test_a_damaged_run_json_before_the_first_save_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UnreadableFile, match=r"is damaged.*Start another run with a new --out"):
        run(tmp_path, RECIPE, resume=True)


@pytest.mark.parametrize("size", [0, 1, 5, -5])
def test_shortened_metrics_are_not_padded(cut: Path, whole: dict[str, Any], size: int) -> None:
    path = cut / "metrics.jsonl"
    logged = path.read_bytes()
    path.write_bytes(logged[: logged.index(b"\n") + size] if size else b"")
    before = path.read_bytes()
    notes = resume(cut)
    assert "metrics.jsonl lacks at least" in notes[0]
    assert b"\0" not in path.read_bytes()
    kept = whole["metrics"][: before.count(b"\n")]
    later = [row for row in whole["metrics"] if row["step"] > 6]
    assert bytes_of(cut) == {**whole, "metrics": kept + later}
    assert all("event" in json.loads(line) for line in path.read_text().splitlines())


def test_damaged_lines_of_metrics_are_left_out(cut: Path) -> None:
    good = RunFolder.open(cut).metrics()
    whole = next(row for row in good if row["event"] == "train")
    wrong: list[dict[str, Any]] = [
        *({"event": 7}, {"step": None}, {"step": [1]}, {"loss": "x"}, {"lr": [0]}, {"accuracy": 10**400}),
        *({"time": True}, {"time": {"seconds": "x"}}),
    ]
    with open(cut / "metrics.jsonl", "ab") as file:
        file.write(b'5\nnull\n\xff\xfe\n{"step": 1}\n' + b"[" * 100_000 + b"\n")
        file.writelines(json.dumps(whole | change).encode() + b"\n" for change in wrong)
        file.write(b'{"event": "tr')
    assert RunFolder.open(cut).metrics() == good
    compare(cut)


def test_what_is_not_a_file_is_not_waited_for(cut: Path) -> None:
    for path in (cut / "run.json", cut / "metrics.jsonl", cut / "state" / "step-000000000009.safetensors"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    with pytest.warns(UserWarning, match="copy in state/ is used"):
        opened = RunFolder.open(cut)
    assert opened.metrics() == []
    assert opened.latest() != cut / "state" / "step-000000000009.safetensors"


DAMAGED: dict[str, list[dict[str, Any]]] = {  # file -> what is wrong in it
    "run.json": [{"data": 7}, {"steps": {}}, {"same": "x"}],
    "metrics.jsonl": [{"time": {}}],
    "evaluation.json": [{"per_class": 7}, {"per_class": [{}], "top1": 1.0, "n": 1}],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_wrong_values_are_a_sentence(cut: Path, name: str) -> None:
    path = cut / name
    shutil.rmtree(cut / "state")  # which has a copy of run.json
    rows = [row for row in RunFolder.open(cut).metrics() if row["event"] == "train"]
    whole = rows[-1] if name == "metrics.jsonl" else json.loads(path.read_text()) if path.is_file() else {}
    for change in DAMAGED[name]:
        path.write_text(json.dumps(whole | change))
        doors = [lambda: diff(cut, cut)] if name != "evaluation.json" else []
        for door in (*doors, lambda: report(cut)):
            with pytest.raises(UnreadableFile, match=r"was damaged or edited \("):
                door()
    if name == "metrics.jsonl":
        with pytest.warns(UserWarning, match="is not listed. Expected the run"):
            assert list_runs(cut) == []


def test_a_run_with_a_damaged_date_is_not_listed(cut: Path) -> None:
    info = json.loads((cut / "run.json").read_text())
    (cut / "run.json").write_text(json.dumps(info | {"created": "-1"}))
    with pytest.warns(UserWarning, match="is not listed. Expected the run .*Invalid isoformat string: '-1'"):
        assert list_runs(cut) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"recipe": {"head_bias": "x"}}, "head_bias of a recipe is like 0.0; got 'x'"),
        ({"recipe": {"from_probe": 1}}, "from_probe of a recipe is like False; got 1"),
        ({"settings": {"seeds": 1}}, r"was damaged or edited \(TypeError"),
        ({"same": 7}, r"was damaged or edited \(AttributeError"),
        ({"recipe": {"augment": 7}}, r"was damaged or edited \("),
        ({"same": {"config": "x"}}, r"was damaged or edited \("),
        ({"fields": "x"}, r"was damaged or edited \("),
        ({"model": ["x"]}, r"was damaged or edited \(TypeError: model is"),
    ],
)
def test_wrong_values_are_a_sentence_before_resuming(cut: Path, change: dict[str, Any], sentence: str) -> None:
    shutil.rmtree(cut / "state")
    info = json.loads((cut / "run.json").read_text())
    new = {name: info[name] | value if isinstance(value, dict) else value for name, value in change.items()}
    (cut / "run.json").write_text(json.dumps(info | new))
    with pytest.raises(VitkitError, match=sentence):
        train(None, cut, resume=True)
