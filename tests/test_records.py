"""The benchmark of records from scratch: times to each percent, changes to a recipe, and the picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import records
from benchmarks.records import STEPPING, _fitting, changed, picture, reached
from vitkit.errors import ConfigError
from vitkit.training.recipes import RECIPES

CURVE = [{"seconds": s, "top1": t} for s, t in ((5.0, 0.021), (9.0, 0.039), (12.0, 0.03), (20.0, 0.0512))]


def test_the_time_to_each_percent_is_that_of_the_first_validation_that_reached_it() -> None:
    assert reached(CURVE) == {"1": 5.0, "2": 5.0, "3": 9.0, "4": 20.0, "5": 20.0}
    assert reached([]) == {}


def test_changes_reach_the_parts_of_a_recipe() -> None:
    found = changed(RECIPES["cifar10"], {"config.patch_size": 2, "augment.pad": 2, "mix.mixup": 0.0, "steps": 5})
    assert (found.config.patch_size, found.augment.pad, found.mix.mixup, found.steps, found.epochs) == (
        2,
        2,
        0,
        5,
        None,
    )
    assert found.config.hidden_size == RECIPES["cifar10"].config.hidden_size
    with pytest.raises(ConfigError, match="no field 'epoch'"):
        changed(RECIPES["cifar10"], {"epoch": 5})


def test_the_picture_has_a_line_per_curve(tmp_path: Path) -> None:
    picture({"a": CURVE, "b": CURVE[:2], "none": []}, "title", tmp_path / "curve.png")
    with Image.open(tmp_path / "curve.png") as found:
        assert found.width > 500
    picture({"none": []}, "title", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_kept_runs_are_drawn_as_the_mean_of_their_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {}
    monkeypatch.setattr(records, "picture", lambda curves, title, out: drawn.update(curves))
    records.draw_kept(tmp_path / "records.png")
    kept = json.loads(records.KEPT.read_text())
    assert [name.split(" (")[0] for name in drawn] == ["CIFAR-10", "Fashion-MNIST"]
    for curve, what in zip(drawn.values(), ("cifar10", "fashion"), strict=True):
        runs = [run for run in kept if run["recipe"] == what]
        assert [run["seed"] for run in runs] == [1, 2]
        first = [max(row["top1"] for row in run["curve"][:2]) for run in runs]  # the weights, and their average
        assert curve[0]["top1"] == pytest.approx(sum(first) / 2)
        assert len(curve) == records.VALIDATIONS


def test_the_steps_that_fit_follow_the_second_half_of_the_trial() -> None:
    slow_start = [0.0, 9.0, 10.0, 10.5, 11.0, 11.5, 12.0]
    assert _fitting(slow_start, 60.0) == int(STEPPING * 60 / 0.5)
    assert _fitting([0.0, 50.0], 1.0) == 1
