"""The benchmark of records from scratch: times to each percent, changes to a recipe, and the picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

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


def test_the_steps_that_fit_follow_the_second_half_of_the_trial() -> None:
    slow_start = [0.0, 9.0, 10.0, 10.5, 11.0, 11.5, 12.0]
    assert _fitting(slow_start, 60.0) == int(STEPPING * 60 / 0.5)
    assert _fitting([0.0, 50.0], 1.0) == 1
