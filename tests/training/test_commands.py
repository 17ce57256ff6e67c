"""The commands around training: runs and diff, the sweep, the recipes, the demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.tiny import run, tiny, vitkit
from vitkit.cli.demo import activation
from vitkit.cli.runs import short
from vitkit.errors import ConfigError, OutputError, UnknownName
from vitkit.jobs.listing import diff, list_runs
from vitkit.jobs.sweep import sweep
from vitkit.training.recipes import RECIPES
from vitkit.training.run_folder import RunFolder


def test_runs_and_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, changes in (("a", {}), ("b", {}), ("deep/c", {"lr": 5e-3})):
        run(tmp_path / name, tiny(ema=0.9, **changes))
    rows = {row.path.name: row for row in list_runs(tmp_path)}
    assert list(rows) == ["a", "b", "c"]
    assert (rows["a"].step, rows["a"].total, rows["a"].recipe) == (12, 12, "custom")
    tops = [r["top1"] for r in RunFolder.open(tmp_path / "a").metrics() if r["event"] == "val"]
    assert rows["a"].best == max(tops)
    same = diff(tmp_path / "a", tmp_path / "b")
    assert same.same
    assert (same.settings, same.metrics) == ({}, None)
    assert same.weights == {"best": 0.0, "last": 0.0, "ema": 0.0}
    other = diff(tmp_path / "a", tmp_path / "deep" / "c")
    assert not other.same
    assert other.settings == {"recipe.lr": (1e-3, 5e-3)}
    assert other.metrics is not None
    assert other.weights["last"] > 1e-4

    code, out, _ = vitkit(monkeypatch, capsys, "runs", str(tmp_path))
    assert code == 0
    assert "12/12" in out
    assert "last accuracy" in out
    assert "best accuracy" in out
    assert len(json.loads(vitkit(monkeypatch, capsys, "runs", str(tmp_path), "--json")[1])) == 3
    code, out, _ = vitkit(monkeypatch, capsys, "diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert code == 0
    assert "bit-identical" in out
    code, out, _ = vitkit(monkeypatch, capsys, "diff", str(tmp_path / "a"), str(tmp_path / "deep" / "c"))
    assert code == 1
    assert "recipe.lr" in out
    assert "top1" in out
    assert "mean_ap" not in out  # neither run has one
    code, out, _ = vitkit(monkeypatch, capsys, "diff", str(tmp_path / "a"), str(tmp_path / "deep" / "c"), "--json")
    assert json.loads(out)["same"] is False
    lines = (tmp_path / "b" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b" / "metrics.jsonl").write_text("".join(lines[:2]))
    for pair, which in ((("a", "b"), "second"), (("b", "a"), "first")):
        code, out, _ = vitkit(monkeypatch, capsys, "diff", *(str(tmp_path / name) for name in pair))
        assert code == 1
        assert f"\n  the {which} run ends here" in out
        assert "null" not in out.partition("first difference")[2]
    code, _, err = vitkit(monkeypatch, capsys, "diff", str(tmp_path / "a"), str(tmp_path / "x"))
    assert code == 2
    assert "Expected a run folder" in err
    code, _, err = vitkit(monkeypatch, capsys, "runs", str(tmp_path / "x"))
    assert code == 2


def test_a_model_is_listed_by_the_name_of_its_file() -> None:
    assert short(str(Path("/home/jo/weights/ti16.timm.pth"))) == "ti16.timm.pth"
    assert short("weights/ti16.safetensors") == "ti16.safetensors"
    assert short(str(Path("/home/jo/runs/first"))) == "first"
    for name in ("vit-ti/16", "google/vit-base-patch16-224", "timm/vit_tiny_patch16_224.augreg_in21k", ""):
        assert short(name) == name


def test_what_to_resume_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "r", tiny(steps=1, warmup=0))
    for command in ("train", "pretrain"):
        code, _, err = vitkit(monkeypatch, capsys, command, "--resume", str(tmp_path / "r"))
        assert code == 2
        assert err.rstrip().endswith(f"To continue a run: vitkit {command} --resume --out {tmp_path / 'r'}")
        code, _, err = vitkit(monkeypatch, capsys, command, "--resume", "--out", str(tmp_path / "nope"))
        assert code == 2
        assert f"There is no run at {tmp_path / 'nope'}." in err
    assert not (tmp_path / "nope").exists()


def test_listing_runs_needs_no_torch(tmp_path: Path) -> None:
    run(tmp_path / "a", tiny(steps=1, warmup=0))
    code = (
        "import sys; from vitkit.jobs.listing import list_runs; "
        f"print(len(list_runs({str(tmp_path)!r})), 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == [
        "1",
        "False",
    ]


def test_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(RECIPES, "digits", tiny(steps=30, warmup=0, lr_choices=(1e-6, 5e-3)))
    code, out, err = vitkit(
        monkeypatch, capsys, "sweep", "digits", "--recipe", "digits", "--out", str(tmp_path / "s"), "--workers", "0"
    )
    assert code == 0, err
    found = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert found["lr"] == 5e-3
    assert found["lrs"]["0.005"] > found["lrs"]["1e-06"]
    final = RunFolder.open(tmp_path / "s" / "final")
    assert final.info["recipe"]["lr"] == 5e-3
    assert final.info["data"]["train"] == 1797  # everything
    assert final.info["data"]["val"] == 0
    assert "best: 0.005" in out
    with pytest.raises(OutputError, match="is not empty"):
        sweep("digits", tmp_path / "s", recipe="digits")
    again = sweep("digits", tmp_path / "s", recipe="digits", resume=True, say=lambda text: None)
    assert again["lrs"] == found["lrs"]
    with pytest.raises(ConfigError, match="held-out part"):
        sweep("digits", tmp_path / "t", recipe="digits", changes={"val": 0.0})
    with pytest.raises(ConfigError, match="--lrs"):
        sweep("digits", tmp_path / "t", recipe="fashion")
    with pytest.raises(ConfigError, match="--lrs instead"):
        sweep("digits", tmp_path / "t", recipe="digits", changes={"lr": 1.0})
    with pytest.raises(UnknownName):
        sweep("digits", tmp_path / "t", recipe="nothing")
    assert vitkit(monkeypatch, capsys, "sweep", "digits", "--recipe", "digits", "--out", "x", "--lrs", "a,b")[0] == 2


def test_recipes_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = vitkit(monkeypatch, capsys, "recipes")
    assert code == 0
    for name, recipe in RECIPES.items():
        row = next(line for line in out.splitlines() if line.split()[:1] == [name])
        assert recipe.source.split()[0] in row
    assert json.loads(vitkit(monkeypatch, capsys, "recipes", "--json")[1])["digits"]["lr"] == RECIPES["digits"].lr
    assert "batch_size" in vitkit(monkeypatch, capsys, "recipes", "finetune-pets")[1]
    assert vitkit(monkeypatch, capsys, "recipes", "nothing")[0] == 2


def test_demo_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = vitkit(monkeypatch, capsys, "demo", "--epochs", "1")
    assert code == 0, err
    assert "of the 179 held-out digits are recognised" in out
    found = json.loads((tmp_path / "runs" / "demo" / "demo.json").read_text())
    assert found["images"] == 179
    assert (tmp_path / "runs" / "demo" / "last.safetensors").is_file()
    assert list((tmp_path / "runs" / "demo" / "tb").iterdir())
    assert vitkit(monkeypatch, capsys, "demo", "--epochs", "0.1")[0] == 0  # beside the first
    assert (tmp_path / "runs" / "demo-2" / "run.json").is_file()


@pytest.mark.skipif(os.name != "posix", reason="shells of other systems activate differently")
def test_demo_says_how_a_shell_finds_vitkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "env" / "bin", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir(parents=True)
        (place / "vitkit").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["env/bin/vitkit", "demo"])  # as `make demo` calls it
    monkeypatch.setenv("PATH", os.defpath)
    assert activation() == ""  # not a virtual environment
    (folder / "activate").touch()
    assert activation() == f"  source {Path('env/bin/activate')}\n"
    monkeypatch.setenv("PATH", str(elsewhere))
    assert activation() == ""


@pytest.mark.slow
def test_demo_reaches_97_percent(tmp_path: Path) -> None:
    from vitkit.jobs.demo import demo

    found = demo(tmp_path / "r")
    assert found["accuracy"] > 0.97
