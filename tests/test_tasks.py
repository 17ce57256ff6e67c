"""The benchmark of ten tasks: what it compares, and the stand-ins for libraries that a machine may lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import linear_model

from benchmarks import tasks
from benchmarks.stand_ins import LogisticRegression, StratifiedKFold
from vitkit.features.head import Standard


def features(n: int = 120, classes: int = 4) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    y = np.arange(n) % classes
    X = rng.standard_normal((n, 12)) + 1.5 * rng.standard_normal((classes, 12))[y]
    return Standard.of(X)(X), y


@pytest.mark.parametrize("balanced", [None, "balanced"])
@pytest.mark.parametrize("C", [1e-3, 1.0])
def test_the_stand_in_solves_what_scikit_learn_solves(C: float, balanced: str | None) -> None:
    X, y = features()
    X, y = X[20:], np.where(y[20:] == 3, 2, y[20:])  # unequal classes
    ours = LogisticRegression(C, 1000, class_weight=balanced).fit(X, y)
    theirs: Any = linear_model.LogisticRegression(C=C, max_iter=1000, tol=1e-8, class_weight=balanced).fit(X, y)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=2e-4)
    assert (ours.predict(X) == theirs.predict(X)).all()


def test_folds_hold_every_image_out_once() -> None:
    _, y = features()
    parts = list(StratifiedKFold(5, random_state=1).split(y, y))
    assert sorted(np.concatenate([held for _, held in parts])) == list(range(len(y)))
    assert all(np.bincount(y[held]).min() == 6 for _, held in parts)
    assert all(not set(inside) & set(held) for inside, held in parts)


def pool(seed: int = 0) -> dict[str, Any]:
    X = np.random.default_rng(seed).integers(0, 255, (2000, 4, 4, 3), np.uint8)
    return {"cifar10/0/images": X, "cifar10/0/labels": np.arange(2000) % 10, "fashion/0/images": X[:, :, :, :1]} | {
        "fashion/0/labels": np.arange(2000) % 10
    }


def test_ten_tasks_and_their_training_parts() -> None:
    assert len(tasks.TASKS) == 10
    arrays = pool()
    for task in tasks.TASKS[:6]:
        _, y = tasks.training_part(arrays, task, 0)
        assert np.bincount(y).tolist() == [int(task.rpartition("-")[2])] * 10
    few, _ = tasks.training_part(arrays, "cifar10-10", 0)
    more, _ = tasks.training_part(arrays, "cifar10-50", 0)
    assert np.array_equal(more[:100], few)  # the larger task contains the smaller one
    _, y = tasks.training_part(arrays, "cifar10-imbalanced", 0)
    assert np.bincount(y)[[0, 9]].tolist() == [100, 10]
    _, noisy = tasks.training_part(arrays, "fashion-50-noisy", 0)
    assert (noisy != np.arange(500) % 10).mean() == tasks.NOISE


def test_the_table_and_its_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, right = [], {"tune": 9, "probe": 8, "finetune": 7, "sklearn": 9}
    for seed in tasks.SEEDS:
        for method, count in right.items():
            bits = np.arange(10) < count
            more = {"chosen": "from-probe"} if method == "tune" else {}
            values = {"accuracy": count / 10, "right": np.packbits(bits).tobytes().hex(), "n": 10, "seconds": 1.0}
            rows.append({"task": "digits-10", "seed": seed, "method": method, **values, **more})
    (tmp_path / "r.json").write_text(json.dumps([*rows, {"task": "x", "seed": 0, "method": "tune", "error": "no"}]))
    tasks.show([tmp_path / "r.json"])
    text = capsys.readouterr().out
    assert "| digits-10 | 90.0, 1 s | 80.0, 1 s | 70.0, 1 s | 90.0, 1 s | +10.0, 10.0 |" in text
    assert "below the probe by more than one standard error on 0 of 1 tasks" in text
    assert "above that of finetune on 1 of 1" in text
    assert "above that of sklearn on 0 of 1" in text
