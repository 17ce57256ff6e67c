"""Recipes: against a second, hand-typed copy of Tables 3 and 4; each runs, ends, and resumes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.training.tiny import CONFIG, bytes_of, run
from vitkit.errors import ConfigError, UnknownName, pick
from vitkit.training.recipe import Recipe
from vitkit.training.recipes import RECIPES

# Typed from the paper (v2, page 13), not from the code: models, epochs, base LR, decay, weight decay, dropout.
TABLE_3 = {
    "pretrain-jft-b": (("vit-b/16", "vit-b/32"), 7, 8e-4, "linear", 0.1, 0.0),
    "pretrain-jft-l32": (("vit-l/32",), 7, 6e-4, "linear", 0.1, 0.0),
    "pretrain-jft-l16": (("vit-l/16",), 7, 4e-4, "linear", 0.1, 0.0),
    "pretrain-jft-l16-14": (("vit-l/16",), 14, 4e-4, "linear", 0.1, 0.0),
    "pretrain-jft-h14": (("vit-h/14",), 14, 3e-4, "linear", 0.1, 0.0),
    "pretrain-21k-b": (("vit-b/16", "vit-b/32"), 90, 1e-3, "linear", 0.03, 0.1),
    "pretrain-21k-l-30": (("vit-l/16", "vit-l/32"), 30, 1e-3, "linear", 0.03, 0.1),
    "pretrain-21k-l-90": (("vit-l/16", "vit-l/32"), 90, 1e-3, "linear", 0.03, 0.1),
    "pretrain-imagenet": ((), 300, 3e-3, "cosine", 0.3, 0.1),
}
# Steps, learning rates, held-out share; from Table 4 and the text of B.1.1.
TABLE_4 = {
    "finetune-imagenet": (20_000, (0.003, 0.01, 0.03), 0.01),
    "finetune-cifar100": (10_000, (0.001, 0.003, 0.01, 0.03), 0.02),
    "finetune-cifar10": (10_000, (0.001, 0.003, 0.01, 0.03), 0.02),
    "finetune-pets": (500, (0.001, 0.003, 0.01, 0.03), 0.1),
    "finetune-flowers": (500, (0.001, 0.003, 0.01, 0.03), 0.1),
    "finetune-vtab": (2_500, (0.01,), 0.1),
}
# MixUp, RandAugment's layers and magnitude.
AUGREG = {
    "none": (0, 0, None),
    "light1": (0, 2, 0),
    "light2": (0.2, 2, 10),
    "medium1": (0.2, 2, 15),
    "medium2": (0.5, 2, 15),
    "strong1": (0.5, 2, 20),
    "strong2": (0.8, 2, 20),
}


@pytest.mark.parametrize("name", TABLE_3)
def test_table_3(name: str) -> None:
    r = RECIPES[name]
    assert (r.models, r.epochs, r.lr, r.decay, r.weight_decay, r.dropout) == TABLE_3[name]
    assert (r.batch_size, r.warmup, r.image_size, r.optimizer, r.betas) == (4096, 10_000, 224, "adamw", (0.9, 0.999))
    assert r.clip == (1.0 if name == "pretrain-imagenet" else None)
    assert r.pre_logits
    assert (r.loss, r.head_bias) == (("sigmoid", -10.0) if "21k" in name else ("softmax", 0.0))
    assert r.final_lr == (0.0 if r.decay == "cosine" else 1e-5)


def test_table_3_is_complete() -> None:
    assert {name for name in RECIPES if name.startswith("pretrain-")} == set(TABLE_3)


@pytest.mark.parametrize("name", TABLE_4)
def test_table_4(name: str) -> None:
    r = RECIPES[name]
    assert (r.steps, r.lr_choices, r.val) == TABLE_4[name]
    assert (r.optimizer, r.momentum, r.batch_size, r.decay, r.weight_decay, r.clip, r.image_size) == (
        "sgd",
        0.9,
        512,
        "cosine",
        0.0,
        1.0,
        384,
    )
    assert r.lr in r.lr_choices
    assert not r.pre_logits


@pytest.mark.parametrize(
    ("name", "size", "model"), [("finetune-512", 512, "vit-l/16"), ("finetune-518", 518, "vit-h/14")]
)
def test_table_2_has_polyak_averages(name: str, size: int, model: str) -> None:
    r = RECIPES[name]
    assert (r.image_size, r.models, r.ema, r.steps, r.batch_size) == (size, (model,), 0.9999, 20_000, 512)


@pytest.mark.parametrize("level", AUGREG)
def test_augreg_levels(level: str) -> None:
    r = RECIPES[f"augreg-{level}"]
    mixup, layers, magnitude = AUGREG[level]
    assert (r.mix.mixup, r.augment.rand_layers) == (mixup, layers)
    if layers:
        assert r.augment.rand_magnitude == magnitude


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_source_and_survives_json(name: str) -> None:
    import json

    r = RECIPES[name]
    assert r.source
    assert Recipe.from_dict(json.loads(json.dumps(r.to_dict()))) == r


@pytest.mark.parametrize("name", RECIPES)
def test_every_schedule_ends(name: str) -> None:
    r = RECIPES[name]
    images = 300_000_000 if "jft" in name else 14_000_000 if "21k" in name else 1_281_167
    total = r.total(images if r.batch_size > 1000 else 60_000)
    assert r.lr_at(total, total) == pytest.approx(r.final_lr, abs=1e-12)
    assert r.lr_at(total - 1, total) < r.lr * 0.01 + r.final_lr
    assert max(r.lr_at(step, total) for step in range(0, total, max(1, total // 500))) <= r.lr
    assert max(r.lr_at(step, total) for step in range(0, total, max(1, total // 500))) > r.lr * 0.8


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_and_resumes_after_its_first_step(name: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(
        RECIPES[name], config=CONFIG, image_size=None, batch_size=4, steps=2, epochs=None, warmup=0, val=0.1
    )
    settings = {"evaluate_every": 10, "save_every": 1}
    run(tmp_path / "whole", recipe, settings=settings)

    class Cut(Exception):
        pass

    def cut(event: dict) -> None:
        if event["event"] == "step" and event["step"] == 2:
            raise Cut

    with pytest.raises(Cut):
        run(tmp_path / "cut", recipe, settings=settings, watch=cut)
    run(tmp_path / "cut", recipe, settings=settings, resume=True)
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")


def test_no_recipe_for_digits_flips() -> None:
    assert RECIPES["digits"].augment.flip == 0


def test_change() -> None:
    deit, digits = RECIPES["deit"], RECIPES["digits"]
    assert deit.change(batch_size=512).lr == pytest.approx(deit.lr / 2)  # linear
    assert digits.change(batch_size=64).lr == digits.lr  # fixed
    assert digits.change(batch_size=128, lr_rule="sqrt").lr == pytest.approx(2 * digits.lr)
    assert deit.change(batch_size=512, lr=0.1).lr == 0.1
    assert digits.change(steps=5).epochs is None
    assert RECIPES["finetune-pets"].change(epochs=2).steps is None
    assert digits.change(lr=None) == digits


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epochs": 1, "steps": 1}, "either epochs or steps; got both"),
        ({"leraning_rate": 1}, "no field 'leraning_rate'"),
        ({"lr": -1.0}, "lr must be"),
        ({"optimizer": "sgd"}, "decoupled"),
        ({"optimizer": "adam"}, "one of adamw, sgd"),
        ({"warmup": 10.5}, "whole number of steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"final_lr": 1.0}, "must not exceed lr"),
        ({"val": 1.0}, "something to train on"),
        ({"ema": 1.5}, "ema"),
        ({"lr_rule": "cubic", "batch_size": 4}, "lr_rule"),
    ],
)
def test_settings_that_cannot_work(given: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RECIPES["digits"].change(**given)


def test_coupled_l2_cannot_be_expressed() -> None:
    """The course's Adam with weight_decay=0.3 inside the gradient: no value of Recipe says that."""
    with pytest.raises(ConfigError, match="not decoupled as the paper's"):
        dataclasses.replace(RECIPES["digits"], optimizer="sgd", weight_decay=0.3)


def test_unknown_recipe_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'finetune-cifar10'"):
        pick(RECIPES, "finetune-cifar", "recipe")
