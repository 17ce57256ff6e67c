"""Class weights and balanced sampling: the loss by hand, equal to each other on average, and exact resuming."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from tests.training.test_loop import distance, stop_at
from tests.training.tiny import bytes_of, forked, run, tiny
from vitkit.data.base import Numbered, Pixels
from vitkit.data.batch import Batch
from vitkit.data.mix import Mix
from vitkit.errors import ConfigError
from vitkit.runtime import Runtime
from vitkit.training.class_weights import balanced, weigh
from vitkit.training.loss import LOSSES
from vitkit.training.objectives import Classify
from vitkit.training.recipe import Recipe

K = 4
COUNTS = [5, 30, 1, 12]
LABELS = np.repeat(np.arange(K), COUNTS)


def source(labels: np.ndarray = LABELS) -> Pixels:
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 8, 8), dtype=np.uint8)
    return Pixels(pixels, labels, list("abcd"), Numbered(len(labels)))


def batch(mixed: bool) -> Batch:
    g = torch.Generator().manual_seed(0)
    labels, others = torch.randint(K, (2, 9), generator=g)
    share = torch.rand(9, generator=g) if mixed else torch.ones(9)
    pixels = torch.randn(9, 1, 8, 8, generator=g)
    return Batch(pixels, labels, torch.arange(9), others if mixed else labels, share)


def test_balanced_weights_are_scikit_learns() -> None:
    expected = compute_class_weight("balanced", classes=np.arange(K), y=LABELS)
    assert balanced(COUNTS).numpy() == pytest.approx(expected, rel=1e-6)
    assert float((balanced(COUNTS)[LABELS]).mean()) == pytest.approx(1.0)


def test_a_class_without_images_counts_for_nothing() -> None:
    assert balanced([6, 0, 2]).tolist() == pytest.approx([2 / 3, 0.0, 2.0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_weighted_loss_by_hand(loss: str, mixed: bool, smoothing: float) -> None:
    """s w_a L(a) + (1 - s) w_b L(b): each part of a mixed image counts as an image of its class does."""
    images, weights = batch(mixed), balanced(COUNTS)
    logits = torch.randn(9, K, generator=torch.Generator().manual_seed(1))

    def against(labels: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(len(labels))
        y = torch.eye(K)[labels] * (1 - smoothing) + smoothing / K
        p = logits.softmax(1) if loss == "softmax" else logits.sigmoid()
        return -(y * p.log() + (0 if loss == "softmax" else (1 - y) * (1 - p).log())).sum(1) * ones

    s, own, other = images.weight, weights[images.labels], weights[images.others]
    expected = s * own * against(images.labels) + (1 - s) * other * against(images.others)
    recipe = tiny(
        loss=loss, label_smoothing=smoothing, class_weights="balanced", mix=Mix(mixup=0.5) if mixed else Mix()
    )
    objective = Classify(recipe, 0, source())
    found, correct = objective.loss(lambda pixels: logits, images, 0, Runtime("cpu"))
    torch.testing.assert_close(found, expected.sum(), rtol=1e-5, atol=1e-5)
    truth = torch.where(s >= 0.5, images.labels, images.others)  # weights change no answer
    assert correct == (logits.argmax(1) == truth).sum()
    shared, factor = weigh(images, weights)
    each = LOSSES[loss](logits, shared, smoothing, mixed) * factor
    torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-5)


def test_weights_and_sampling_agree_on_average() -> None:
    """The weighted mean over all images is the mean over images that are drawn equally often from every class."""
    from vitkit.data.order import BalancedOrder

    each = torch.rand(len(LABELS), generator=torch.Generator().manual_seed(0)).double()
    weighted = (each * balanced(COUNTS)[LABELS]).mean()
    order = BalancedOrder(LABELS, len(LABELS))
    drawn = [index for step in range(300) for _, index in order.rows(step)]
    assert float(each[drawn].mean()) == pytest.approx(float(weighted), rel=2e-3)
    assert abs(float(each.mean()) - float(weighted)) > 0.01


def test_validation_is_not_weighted(tmp_path: Path) -> None:
    still = {"steps": 2, "warmup": 0, "lr": 1e-30}
    rows = []
    for name in ("equal", "balanced"):
        folder, _ = run(tmp_path / name, tiny(**still, class_weights=name), settings={"log_every": 1})
        rows.append([row for row in folder.metrics() if row["event"] == "val"])
    for a, b in zip(*rows, strict=True):
        assert (a["loss"], a["top1"]) == (b["loss"], b["top1"])


BALANCES = [{"class_weights": "balanced", "mix": Mix(cutmix=1.0), "label_smoothing": 0.1}, {"sampling": "balanced"}]


@pytest.mark.parametrize("changes", BALANCES)
def test_resume_is_exact(changes: dict, tmp_path: Path) -> None:
    recipe = tiny(steps=5, warmup=1, **changes)
    run(tmp_path / "whole", recipe)
    run(tmp_path / "cut", recipe, watch=stop_at(2))
    run(tmp_path / "cut", recipe, resume=True, settings={"workers": 1})
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")
    plain = tiny(steps=5, warmup=1, **{k: v for k, v in changes.items() if v != "balanced"})
    run(tmp_path / "plain", plain)
    assert distance(tmp_path / "whole", tmp_path / "plain") > 0


@pytest.mark.parametrize("changes", BALANCES)
def test_two_processes_end_where_one_does(changes: dict, tmp_path: Path) -> None:
    recipe = tiny(steps=6, warmup=0, **changes)
    run(tmp_path / "one", recipe)
    assert forked(lambda rank: run(tmp_path / "two", recipe), ranks=2) == [0, 0]
    assert distance(tmp_path / "one", tmp_path / "two") < 1e-4


def test_combinations_without_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="balance the classes twice"):
        tiny(class_weights="balanced", sampling="balanced")
    with pytest.raises(ConfigError, match=r"sampling must be one of uniform, balanced; got 'balance', did you mean"):
        tiny(sampling="balance")
    masked = dataclasses.replace(tiny(), objective="masked-patch")
    for field in ("class_weights", "sampling"):
        option = "--" + field.replace("_", "-")
        with pytest.raises(ConfigError, match=rf"{option} balanced needs labels, and masked-patch uses none"):
            run(tmp_path / "r", dataclasses.replace(masked, **{field: "balanced"}))


def test_recipes_written_before_have_neither() -> None:
    values = tiny().to_dict()
    for name in ("class_weights", "sampling", "early_stop"):
        del values[name]
    assert Recipe.from_dict(values) == tiny()
