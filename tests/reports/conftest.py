"""Small runs to report on: made by the project's own jobs, once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitkit.jobs.report import report
from vitkit.jobs.train import train

TINY = {"steps": 6, "batch_size": 16, "warmup": 0.0}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def digits(folder: Path) -> Path:
    """A few steps on scikit-learn's digits."""
    run, _ = train(
        "digits",
        folder / "digits",
        recipe="digits",
        changes=TINY,
        settings={"log_every": 2, "evaluate_every": 3, "workers": 0, "trackers": ()},
    )
    return run.path


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures with two classes, one with a name that HTML must not take for its own."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 4)):
        for name, colour in (('<b>red & "blue"', (200, 30, 30)), ("grün", (20, 180, 40))):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                noise = rng.integers(0, 40, (24, 40, 3)) + np.array(colour)
                Image.fromarray(noise.clip(0, 255).astype(np.uint8)).save(root / split / name / f"{i} ö.png")
    return root


@pytest.fixture(scope="session")
def food(folder: Path, photos: Path) -> Path:
    """A few steps on that folder."""
    run, _ = train(
        photos,
        folder / "deep" / "food",
        recipe="digits",
        image_size=8,
        changes={"steps": 2, "batch_size": 6, "warmup": 0.0},
        settings={"workers": 0, "trackers": ()},
    )
    return run.path


@pytest.fixture(scope="session")
def digits_page(digits: Path) -> Path:
    return report(digits)


@pytest.fixture(scope="session")
def food_page(food: Path) -> Path:
    return report(food)
