"""Sweeps over cells and the paper's studies: what a cell changes, the numbers by hand, continuing after a kill."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitkit
from tests.training.test_masked import photos
from tests.training.tiny import CONFIG, SETTINGS, forked, tiny
from tests.training.tiny import vitkit as command
from vitkit.cli.study import STUDIES as WORDS
from vitkit.cli.study import parse_over
from vitkit.cli.sweep import numeric_axis
from vitkit.data.sources import open_source
from vitkit.errors import ConfigError, LostWorker, OutputError, UnreadableFile
from vitkit.explanations import draw
from vitkit.features import ridge
from vitkit.jobs import cells
from vitkit.jobs.cells import SIZES, Request, arguments, deaf_children, name_of, product, sweep_cells
from vitkit.jobs.study import STUDIES, recipe_of, summary, table
from vitkit.jobs.train import train
from vitkit.model.count import flops
from vitkit.training.lock import locked
from vitkit.training.recipes import RECIPES
from vitkit.training.run_folder import RunFolder

RECIPE = tiny(steps=6, warmup=0)


def request(out: Path, **changes: Any) -> Request:
    return Request(**{"data": "digits", "out": out, "recipe": RECIPE, "settings": SETTINGS, **changes})


def silent(text: str) -> None:
    pass


def timeless(rows: list[dict[str, Any]] | int) -> list[dict[str, Any]]:
    assert isinstance(rows, list)
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_every_combination() -> None:
    found = product({"positions": ["none", "1d"], "lr": [0.1, 0.2]}, [0, 1])
    assert len(found) == 8
    assert found[3] == {"positions": "none", "lr": 0.2, "seed": 1}
    assert name_of(found[3]) == "positions-none,lr-0.2,seed-1"
    assert len({name_of(cell) for cell in found}) == 8
    assert name_of({"model": "vit-ti/16"}) == "model-vit-ti_16"


def test_what_a_cell_changes() -> None:
    cell = {"positions": "2d", "lr": 0.1, "seed": 3, "model": "vit-ti/16", "image_size": 64, "images": 0.5}
    assert arguments(cell) == {
        "fields": {"positions": "2d"},
        "changes": {"lr": 0.1, "images": 0.5},
        "settings": {"seed": 3},
        "model": "vit-ti/16",
        "image_size": 64,
    }
    assert arguments({"size": "small"})["fields"] == SIZES["small"]
    with pytest.raises(ConfigError, match="'position', did you mean 'positions'"):
        arguments({"position": "2d"})
    with pytest.raises(ConfigError, match="Unknown size"):
        arguments({"size": "huge"})


def test_cells_are_runs_of_their_own(tmp_path: Path) -> None:
    """A cell gives what `train` gives with the same settings."""
    rows = sweep_cells(request(tmp_path / "s"), [{"lr": 0.002, "hidden_size": 16, "seed": 1}], say=silent)
    config = dataclasses.replace(CONFIG, hidden_size=16)
    settings = {**SETTINGS, "seed": 1}
    alone, _ = train(
        "digits", tmp_path / "r", recipe=tiny(steps=6, warmup=0, lr=0.002, config=config), settings=settings
    )
    folder = tmp_path / "s" / "lr-0.002,hidden_size-16,seed-1"
    assert (folder / "last.safetensors").read_bytes() == (tmp_path / "r" / "last.safetensors").read_bytes()
    assert isinstance(rows, list)
    (row,) = rows
    judged = [line["top1"] for line in alone.metrics() if line["event"] == "val"]
    assert row["top1"] == judged[-1]
    assert (row["train"], row["val"]) == (1618, 179)
    assert row["parameters"] == sum(p.numel() for p in vitkit.load(tmp_path / "r").parameters())
    assert row["flops"] == 3 * flops(vitkit.load(tmp_path / "r").config) * 6 * 16


def test_the_average_is_measured_where_there_is_one(tmp_path: Path) -> None:
    rows = sweep_cells(request(tmp_path / "s", recipe=tiny(steps=6, warmup=0, ema=0.5)), [{"seed": 0}], say=silent)
    assert isinstance(rows, list)
    judged = [line for line in RunFolder.open(tmp_path / "s" / "seed-0").metrics() if line["event"] == "val"]
    assert rows[0]["top1"] == next(line["top1"] for line in reversed(judged) if line["weights"] == "ema")


def test_a_killed_sweep_continues_where_it_stopped(tmp_path: Path) -> None:
    todo = product({"lr": [0.001, 0.003, 0.01]})
    whole = sweep_cells(request(tmp_path / "whole"), todo, say=silent)

    def die(event: dict[str, Any]) -> None:
        folder = tmp_path / "cut" / "lr-0.003,seed-0"
        if event["event"] == "step" and event["step"] == 5 and folder.is_dir():
            os.kill(os.getpid(), signal.SIGKILL)

    assert forked(lambda rank: sweep_cells(request(tmp_path / "cut"), todo, say=silent, watch=die)) == [-signal.SIGKILL]
    kept = json.loads((tmp_path / "cut" / "results.json").read_text())["rows"]
    assert [row["name"] for row in kept] == ["lr-0.001,seed-0"]
    started: list[int] = []
    said: list[str] = []
    found = sweep_cells(
        request(tmp_path / "cut"),
        todo,
        resume=True,
        say=said.append,
        watch=lambda event: started.append(event["step"]) if event["event"] == "start" else None,
    )
    assert timeless(found) == timeless(whole)
    assert started == [4, 0]  # the second cell from its last save, the third from the start; the first not at all
    assert "1 of 3 cells are finished" in said
    for cell in todo:
        one, two = (tmp_path / place / name_of(cell) / "last.safetensors" for place in ("whole", "cut"))
        assert one.read_bytes() == two.read_bytes()


def test_cells_can_be_added_but_not_changed(tmp_path: Path) -> None:
    sweep_cells(request(tmp_path / "s"), product({"lr": [0.001]}), say=silent)
    with pytest.raises(OutputError, match="--resume"):
        sweep_cells(request(tmp_path / "s"), product({"lr": [0.001]}), say=silent)
    with pytest.raises(ConfigError, match="another recipe or other settings"):
        sweep_cells(request(tmp_path / "s", changes={"steps": 9}), product({"lr": [0.001]}), resume=True, say=silent)
    rows = sweep_cells(request(tmp_path / "s"), product({"lr": [0.001, 0.01]}), resume=True, say=silent)
    assert isinstance(rows, list)
    assert [row["cell"]["lr"] for row in rows] == [0.001, 0.01]


def test_what_is_damaged_in_the_results_is_measured_again(tmp_path: Path) -> None:
    todo, results = product({"lr": [0.001]}), tmp_path / "s" / "results.json"
    whole = timeless(sweep_cells(request(tmp_path / "s"), todo, say=silent))
    same, (row,) = (json.loads(results.read_text())[key] for key in ("same", "rows"))
    assert cells._finished(request(tmp_path / "s")) == {row["name"]: row}
    wrong = ({"top1": "x"}, {"flops": 10**400}, {"few_shot": 0.5}, {"cell": 7}, {"name": "x"})
    texts = [json.dumps({"same": same, "rows": rows}) for rows in (7, [7], *([row | change] for change in wrong))]
    for text in (*texts, "[]", "[" * 100_000, "{"):
        results.write_text(text, encoding="utf-8")
        assert cells._finished(request(tmp_path / "s")) == {}, text[:100]
    results.unlink()
    os.mkfifo(results)  # which must not be waited for
    assert timeless(sweep_cells(request(tmp_path / "s"), todo, resume=True, say=silent)) == whole


def test_a_lost_score_and_a_file_in_the_way_are_named(tmp_path: Path) -> None:
    todo, place = product({"lr": [0.001]}), tmp_path / "s" / "lr-0.001,seed-0"
    sweep_cells(request(tmp_path / "s"), todo, say=silent)
    (tmp_path / "s" / "results.json").unlink()
    (place / "metrics.jsonl").write_text('{"event": "val", "step": 6}\n' + "[" * 100_000, encoding="utf-8")
    with pytest.raises(UnreadableFile, match=r"Expected a validation of the final weights.*Remove the folder"):
        sweep_cells(request(tmp_path / "s"), todo, resume=True, say=silent)
    with pytest.raises(OutputError, match=r"--out must be a folder; .* is a file"):
        sweep_cells(request(place / "run.json"), todo, resume=True, say=silent)


def test_a_cell_that_cannot_work_stops_the_sweep_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_attention_heads must divide"):
        sweep_cells(request(tmp_path / "s"), product({"num_attention_heads": [2, 3]}), say=silent)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("values", [[0.1, 0.1], [0.001, 1e-3]])
def test_a_value_that_comes_twice_is_refused(tmp_path: Path, values: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"Expected every combination once; lr-0\.\d+,seed-0 comes several times"):
        sweep_cells(request(tmp_path / "s"), product({"lr": values}), say=silent)
    assert not (tmp_path / "s").exists()


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="Windows has no masks of signals")
def test_ctrl_c_does_not_reach_processes_that_start(tmp_path: Path) -> None:
    code = "import signal, sys; sys.exit(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with deaf_children():
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_several_at_a_time_give_the_same(tmp_path: Path) -> None:
    todo = product({"lr": [0.001, 0.01]})
    one = sweep_cells(request(tmp_path / "one"), todo, say=silent)
    two = sweep_cells(request(tmp_path / "two"), todo, say=silent, jobs=2)
    assert timeless(one) == timeless(two)


def endless(out: Path) -> Request:
    return request(out, recipe=tiny(steps=10**6, warmup=0), settings={**SETTINGS, "evaluate_every": 10**5})


def cut(out: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Send a signal to a process that trains two cells at a time, once both train; return how it ended."""
    monkeypatch.setattr(cells, "START", "fork")  # importing everything again would take seconds
    todo = product({"lr": [0.001, 0.01]})

    def send() -> None:
        while len(list(out.glob("*/metrics.jsonl"))) < len(todo):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    def work(rank: int) -> None:
        threading.Thread(target=send, daemon=True).start()
        assert sweep_cells(endless(out), todo, say=silent, jobs=2) == number
        assert multiprocessing.active_children() == []

    return forked(work)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_several_at_a_time_stop_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Every cell is saved and no process is left behind, even if the parent process was killed."""
    assert cut(tmp_path / "s", number, monkeypatch) == [-number if number == signal.SIGKILL else 0]
    for place in (tmp_path / "s").glob("*"):
        for _ in range(3000):
            with suppress(OutputError), locked(place):  # another process of this machine holds it
                break
            time.sleep(0.01)
        else:
            pytest.fail(f"{place} is still in use")
        assert RunFolder.open(place).latest() is not None


def test_a_killed_process_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool waited for ever for the other processes."""
    monkeypatch.setattr(cells, "START", "fork")
    out, todo = tmp_path / "s", product({"lr": [0.001, 0.01]})

    def kill() -> None:
        while len(list(out.glob("*/metrics.jsonl"))) < len(todo):
            time.sleep(0.01)
        victim = multiprocessing.active_children()[0].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)

    def work(rank: int) -> None:
        threading.Thread(target=kill, daemon=True).start()
        with pytest.raises(LostWorker, match=r"was killed.*The other cells are saved"):
            sweep_cells(endless(out), todo, say=silent, jobs=2)
        assert multiprocessing.active_children() == []

    assert forked(work) == [0]
    assert sum(RunFolder.open(place).latest() is not None for place in out.glob("*")) == 1


def test_an_interrupted_sweep_says_so(tmp_path: Path) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    found = sweep_cells(request(tmp_path / "s"), product({"lr": [0.001, 0.01]}), say=silent, watch=stop)
    assert found == signal.SIGINT
    assert len(list((tmp_path / "s").glob("lr-*"))) == 1


def test_few_shot_is_that_of_the_features_room() -> None:
    """Only the chosen images are embedded; the accuracies are those of all features."""
    torch.manual_seed(0)
    model = vitkit.ViT(CONFIG).eval()
    train_part, held = open_source("digits", "train"), open_source("digits", "val")
    found = cells.few_shot(model, train_part, held, 3)
    X, Xt = (cells.logits_of(cells._Features(model), part).logits.astype(np.float64) for part in (train_part, held))
    (expected,) = ridge.few_shot(X, train_part.labels, Xt, held.labels, 10, shots=(3,))
    assert found == pytest.approx(expected.accuracies)
    with pytest.raises(ConfigError, match="too many"):
        cells.few_shot(model, train_part, held, 500)


def test_summary_by_hand() -> None:
    rows = [
        {"cell": {"lr": lr, "seed": seed}, "top1": top1, "few_shot": 0.5, "shots": 5, "train": 1000}
        for lr, scores in ((0.1, (0.8, 0.9)), (0.2, (0.7,)))
        for seed, top1 in enumerate(scores)
    ]
    first, second = summary(rows)
    assert (first["cell"], first["seeds"], first["top1"]) == ({"lr": 0.1}, 2, pytest.approx(0.85))
    assert first["top1_std"] == pytest.approx(0.1 / 2**0.5)
    assert (second["seeds"], second["top1"], second["top1_std"]) == (1, 0.7, None)
    heads, lines = table([first, second], paper=(0.64206,))
    assert heads == ["lr", "images#", "held-out accuracy#", "5-shot#", "paper#"]
    assert lines == [
        ("0.1", "1,000", "85.00% ± 7.07%", "50.00% ± 0.00%", "64.21%"),
        ("0.2", "1,000", "70.00%", "50.00%", ""),
    ]


# --- the paper's studies


def test_table_8() -> None:
    study = STUDIES["positions"]
    places = ("first", "every", "shared")
    assert list(study.cells) == [
        {"positions": "none"},
        *({"positions": "1d", "positions_in": place} for place in places),
        *({"positions": "2d", "positions_in": place} for place in places),
        {"positions": "none", "relative": "offsets"},
        {"positions": "sincos"},
    ]
    assert study.paper == (0.61382, 0.64206, 0.63964, 0.64292, 0.64001, 0.64046, 0.64022, 0.64032)
    assert study.epochs == 15


@pytest.mark.parametrize("name", STUDIES)
def test_every_cell_is_a_model_that_can_be_built(name: str) -> None:
    base = RECIPES["fashion-adamw"].config
    assert base is not None
    for cell in STUDIES[name].cells:
        found = arguments(cell)
        vitkit.ViT(dataclasses.replace(base, **found["fields"]))
        recipe_of("digits").change(**found["changes"])
    assert WORDS.split(", ") == list(STUDIES)


def test_the_recipe_of_a_study_is_plain() -> None:
    assert recipe_of("digits").config == RECIPES["digits"].config
    fashion = recipe_of("digits", "fashion")
    assert (fashion.ema, bool(fashion.mix), fashion.drop_path) == (None, False, 0.0)


def test_a_study_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two cells of data-size on digits: the table and the picture of Figures 3 and 4."""
    study = dataclasses.replace(STUDIES["data-size"], cells=[{"size": "small", "images": 0.1}, {"size": "small"}])
    monkeypatch.setitem(STUDIES, "data-size", study)
    monkeypatch.chdir(tmp_path)
    args = ["study", "data-size", "digits", "--out", "s", "--epochs", "0.2", "--device", "cpu", "--workers", "0"]
    code, out, err = command(monkeypatch, capsys, *args)
    assert code == 0, err
    assert "5-shot" in out
    rows = json.loads((tmp_path / "s" / "results.json").read_text())["rows"]
    assert [row["train"] for row in rows] == [pytest.approx(162, abs=5), 1618]
    assert (tmp_path / "s" / "sweep.png").stat().st_size > 5000
    code, _, err = command(monkeypatch, capsys, *args)
    assert code == 2
    assert "--resume" in err
    code, out, err = command(monkeypatch, capsys, *args, "--resume")
    assert code == 0
    assert "2 of 2 cells are finished" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["study", "position", "digits", "--out", "s"], "did you mean 'positions'"),
        (["study", "compute", "digits", "--out", "s", "--epochs", "3"], "set their own epochs"),
        (["sweep", "digits", "--out", "s", "--recipe", "digits", "--over", "positions"], "--over takes FIELD=A,B,C"),
        (["sweep", "digits", "--out", "s", "--recipe", "digits", "--over", "position=1d"], "did you mean 'positions'"),
        (["sweep", "digits", "--out", "s", "--recipe", "digits", "--over", "positions=3d"], "positions must be one of"),
        (["sweep", "digits", "--out", "s", "--recipe", "digits", "--over", "lr=1,2", "--lrs", "1"], "got --lrs"),
    ],
)
def test_mistakes(
    args: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = command(monkeypatch, capsys, *args)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_sweep_over_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "p", [f"{c}/{i}.png" for c in "ab" for i in range(8)])
    code, out, err = command(
        monkeypatch,
        capsys,
        "sweep",
        "p",
        "--recipe",
        "foodvision-scratch",
        "--out",
        "s",
        "--steps",
        "1",
        "--warmup",
        "0",
        "--batch-size",
        "4",
        "--over",
        "size=small",
        "--over",
        "positions=none,sincos",
        "--seeds",
        "2",
        "--workers",
        "0",
        "--val",
        "0.25",
    )
    assert code == 0, err
    assert "±" in out
    found = json.loads((tmp_path / "s" / "results.json").read_text())["rows"]
    assert [row["cell"]["positions"] for row in found] == ["none", "none", "sincos", "sincos"]
    assert vitkit.load(tmp_path / "s" / found[2]["name"]).config.positions == "sincos"
    assert (tmp_path / "s" / "sweep.png").is_file()


def test_what_the_picture_shows() -> None:
    assert parse_over(["lr=0.1,1e-3", "pool=cls,mean"]) == {"lr": [0.1, 0.001], "pool": ["cls", "mean"]}
    assert numeric_axis({"lr": [0.1, 0.2], "pool": ["cls", "mean"]}) == ("lr", "pool")
    assert numeric_axis({"pool": ["cls", "mean"]}) == (None, None)
    assert numeric_axis({"lr": [0.1]}) == (None, None)
    assert numeric_axis({"epochs": [1, 3]}) == ("epochs", None)
    axis = draw.lines({"a": ([1e12, 1e14], [0.1, 0.2])}, title="", x="", y="", log_x=True).axes[0]
    assert axis.xaxis.get_major_formatter()(1e12, 0) == "1e+12"  # text is not parsed as a formula
