"""Training on several labels per image: loss and validation by hand, thresholds in checkpoints, exact resuming."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tests.pairs import pairs
from tests.training.tiny import CONFIG, apart, bytes_of, forked, run, tiny
from vitkit import load, save
from vitkit.data.augment import Augment
from vitkit.data.mix import Mix
from vitkit.data.sources import open_source
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.labels import best_thresholds, mean_average_precision, sigmoid
from vitkit.evaluation.logits import logits_of
from vitkit.jobs.evaluate import evaluate
from vitkit.jobs.splits import train_and_val
from vitkit.jobs.train import prepare

WIDE = dataclasses.replace(CONFIG, image_size=(8, 16))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of up to two of four digits."""
    return pairs(tmp_path_factory.mktemp("pairs"), 120, 40, classes=4)


@pytest.fixture(scope="module")
def trained(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with an average, so that two sets of thresholds are chosen."""
    out = tmp_path_factory.mktemp("labels") / "run"
    run(out, tiny(config=WIDE, ema=0.8), data=table)
    return out


def test_the_data_chooses_the_objective(table: Path, tmp_path: Path) -> None:
    ready = prepare(table, tmp_path / "r", recipe=tiny(config=WIDE, head_bias=-10.0))
    assert (ready.recipe.objective, ready.recipe.loss) == ("several-labels", "sigmoid")
    assert ready.model.input_spec.thresholds == (0.5,) * 4
    assert ready.info["data"]["several"] is True
    assert any("any number of 4 labels per image (column 'labels')" in note for note in ready.notes)
    # The head starts with each label's frequency, whatever the recipe says about classes.
    shares = (ready.train.labels.sum(0) + 0.5) / (len(ready.train) + 1)
    assert np.allclose(torch.sigmoid(ready.model.head.bias.detach()), shares, atol=1e-6)
    with pytest.raises(ConfigError, match="needs several labels per image"):
        prepare("digits", tmp_path / "r", recipe=tiny(objective="several-labels"))


def test_the_first_loss_by_hand(table: Path, tmp_path: Path) -> None:
    """One step of a new head with zero weights: only its bias and the smoothed targets decide."""
    recipe = tiny(config=WIDE, steps=1, warmup=0, batch_size=108, label_smoothing=0.1)
    folder, _ = run(tmp_path / "r", recipe, data=table, settings={"log_every": 1})
    (row,) = [row for row in folder.metrics() if row["event"] == "train"]
    assert "accuracy" not in row
    ready = prepare(table, tmp_path / "x", recipe=recipe)
    assert len(ready.train) == 108
    model, y = ready.model, torch.from_numpy(ready.train.labels).float()
    assert not model.head.weight.any()
    target = 0.9 * y + 0.05
    by_hand = F.binary_cross_entropy_with_logits(model.head.bias.expand_as(y), target, reduction="none").sum(1).mean()
    assert row["loss"] == pytest.approx(float(by_hand.detach()), rel=1e-5)


def test_validation_and_thresholds_by_hand(trained: Path, table: Path) -> None:
    _, val, _ = train_and_val(table, 0.1, 0)
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    vals = [row for row in rows if row["event"] == "val"]
    for which in ("last", "ema"):
        row = [row for row in vals if row["weights"] == which][-1]
        model = load(trained / f"{which}.safetensors")
        found = logits_of(model, val)
        p = sigmoid(found.logits)
        assert row["mean_ap"] == pytest.approx(mean_average_precision(p, val.labels))
        assert model.input_spec.thresholds == pytest.approx(best_thresholds(p, val.labels))
        assert model.input_spec.thresholds == tuple(row["thresholds"])
    best = max(vals, key=lambda row: (row["mean_ap"], -row["loss"], row["step"], row["weights"] == "ema"))
    assert load(trained / "best.safetensors").input_spec.thresholds == tuple(best["thresholds"])
    assert not any("top1" in row or "accuracy" in row for row in rows)


@pytest.mark.parametrize("changes", [{"ema": 0.8}, {"mix": Mix(mixup=0.8, cutmix=1.0), "label_smoothing": 0.1}])
def test_killed_and_resumed_to_the_bit(changes: dict, table: Path, tmp_path: Path) -> None:
    recipe = tiny(config=WIDE, **changes)
    run(tmp_path / "whole", recipe, data=table)

    def die_at(step: int):
        def watch(event: dict) -> None:
            if event["event"] == "step" and event["step"] == step:
                os.kill(os.getpid(), signal.SIGKILL)

        return watch

    for step in (6, 11):
        ended = forked(lambda rank, step=step: run(tmp_path / "r", recipe, data=table, resume=True, watch=die_at(step)))
        assert ended == [-signal.SIGKILL]
    assert forked(lambda rank: run(tmp_path / "r", recipe, data=table, resume=True)) == [0]
    assert bytes_of(tmp_path / "r") == bytes_of(tmp_path / "whole")


def test_two_processes_and_micro_batches_end_where_one_does(table: Path, tmp_path: Path) -> None:
    recipe = tiny(config=WIDE, steps=4, warmup=0, mix=Mix(mixup=0.8))
    run(tmp_path / "one", recipe, data=table)
    how = {"data": table, "settings": {"micro_batch": 4}}
    assert forked(lambda rank: run(tmp_path / "two", recipe, **how), ranks=2) == [0, 0]
    assert apart(tmp_path / "one", tmp_path / "two") < 1e-6
    assert len(load(tmp_path / "two").input_spec.thresholds) == 4


def test_a_head_for_the_same_labels_is_kept_and_one_for_classes_is_not(
    trained: Path, table: Path, tmp_path: Path
) -> None:
    recipe = tiny(config=None)
    kept = prepare(table, tmp_path / "r", recipe=recipe, weights=trained).model
    assert torch.equal(kept.head.weight, load(trained).head.weight)
    other = load(trained)
    other.input_spec = dataclasses.replace(other.input_spec, thresholds=())
    save(other, tmp_path / "classes.safetensors")
    new = prepare(table, tmp_path / "r", recipe=recipe, weights=tmp_path / "classes.safetensors").model
    assert not new.head.weight.any()


def test_it_learns(tmp_path: Path) -> None:
    """Is the left half bright, is the right half bright: any combination of the two, from images that it never saw."""
    rng, lines = np.random.default_rng(0), ["image,left,right,split"]
    for n in range(120):
        left, right = rng.integers(0, 2, 2)
        image = rng.integers(0, 100, (8, 8)) + np.repeat([[150 * left, 150 * right]], 4, axis=1)
        Image.fromarray(image.astype(np.uint8)).save(tmp_path / f"{n}.png")
        lines.append(f"{n}.png,{left},{right},{'train' if n < 80 else 'test'}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    recipe = tiny(steps=60, lr=3e-3, augment=Augment(scale=(0.9, 1.0), ratio=(0.9, 1.1), flip=0.0))
    _, outcome = run(tmp_path / "r", recipe, data=tmp_path / "t.csv", settings={"evaluate_every": 30})
    found = evaluate(load(tmp_path / "r"), open_source(tmp_path / "t.csv", "test")).measures
    assert outcome.best > 0.9
    assert found.mean_ap > 0.9
    assert found.micro_f1 > 0.8


def test_a_model_and_data_of_different_kinds(trained: Path, table: Path) -> None:
    with pytest.raises(DataError, match="any number of labels per image, as the model answers; digits has one class"):
        evaluate(load(trained), open_source("digits"), data="digits")
    model = load(trained)
    model.input_spec = dataclasses.replace(model.input_spec, thresholds=())
    with pytest.raises(DataError, match="one class per image, as the model answers; this data has any number"):
        evaluate(model, open_source(table, "test"))


@pytest.mark.parametrize("change", [{"class_weights": "balanced"}, {"sampling": "balanced"}])
def test_what_needs_one_class_per_image_is_refused(change: dict, table: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="balanced needs one class per image; this data has several labels"):
        prepare(table, tmp_path / "r", recipe=tiny(config=WIDE, **change))


def test_a_label_without_images_is_refused(tmp_path: Path) -> None:
    table = pairs(tmp_path / "x", 30, 0, columns=True, classes=3)
    lines = table.read_text().splitlines()
    table.write_text("\n".join([lines[0] + ",cat", *(line + ",0" for line in lines[1:])]))
    with pytest.raises(DataError, match=r"Label 'cat' of .* has no images to train on; add some or remove the label"):
        train_and_val(table, 0.1, 0)


def test_one_label_is_enough(tmp_path: Path) -> None:
    """Present or absent: a softmax over one class could learn nothing."""
    table = pairs(tmp_path / "x", 40, 10, columns=True, classes=2)
    lines = table.read_text().splitlines()
    table.write_text("\n".join(",".join([*line.split(",")[:2], line.split(",")[3]]) for line in lines))
    _, outcome = run(tmp_path / "r", tiny(config=WIDE, steps=2, warmup=0), data=table)
    assert math.isfinite(outcome.best)
    assert len(load(tmp_path / "r").input_spec.thresholds) == 1
