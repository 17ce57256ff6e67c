"""Recipes: every number against a second copy typed from the sources, every schedule against its formula."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from tests.peers import peer
from tests.training.tiny import CONFIG, bytes_of, run
from vitkit import ViT, save
from vitkit.errors import ConfigError, UnknownName, pick
from vitkit.training.build import new_model
from vitkit.training.recipe import Recipe
from vitkit.training.recipes import RECIPES

# Typed from the paper (v2, page 13), not from the code: models, epochs, base LR, decay, weight decay, dropout.
TABLE_3 = {
    "pretrain-jft-b": (("vit-b/16", "vit-b/32"), 7, 8e-4, "linear", 0.1, 0.0),
    "pretrain-jft-l32": (("vit-l/32",), 7, 6e-4, "linear", 0.1, 0.0),
    "pretrain-jft-l16": (("vit-l/16",), 7, 4e-4, "linear", 0.1, 0.0),
    "pretrain-jft-l16-14": (("vit-l/16",), 14, 4e-4, "linear", 0.1, 0.0),
    "pretrain-jft-h14": (("vit-h/14",), 14, 3e-4, "linear", 0.1, 0.0),
    "pretrain-jft-r50": (("r50x1", "r50x2"), 7, 1e-3, "linear", 0.1, 0.0),
    "pretrain-jft-r101": (("r101x1",), 7, 8e-4, "linear", 0.1, 0.0),
    "pretrain-jft-r152": (("r152x1", "r152x2"), 7, 6e-4, "linear", 0.1, 0.0),
    "pretrain-jft-r50-b": (("r50+vit-b/16", "r50+vit-b/32"), 7, 8e-4, "linear", 0.1, 0.0),
    "pretrain-jft-r50-l32": (("r50+vit-l/32",), 7, 2e-4, "linear", 0.1, 0.0),
    "pretrain-jft-r50-l16": (("r50+vit-l/16",), 7, 4e-4, "linear", 0.1, 0.0),
    "pretrain-jft-r50-l16-14": (("r50+vit-l/16",), 14, 4e-4, "linear", 0.1, 0.0),
    "pretrain-21k-b": (("vit-b/16", "vit-b/32"), 90, 1e-3, "linear", 0.03, 0.1),
    "pretrain-21k-l-30": (("vit-l/16", "vit-l/32"), 30, 1e-3, "linear", 0.03, 0.1),
    "pretrain-21k-l-90": (("vit-l/16", "vit-l/32"), 90, 1e-3, "linear", 0.03, 0.1),
    "pretrain-imagenet": ((), 300, 3e-3, "cosine", 0.3, 0.1),
}
# Steps, learning rates, held-out share; from Table 4 and the text of B.1.1.
TABLE_4 = {
    "finetune-imagenet": (20_000, (0.003, 0.01, 0.03), 0.01),
    "finetune-imagenet-resnet": (20_000, (0.003, 0.01, 0.03, 0.06), 0.01),
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
    assert r.pre_logits == (not r.models or "vit" in r.models[0])  # a ResNet's head is one layer
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
    assert (r.epochs, r.batch_size, r.lr, r.weight_decay, r.dropout) == (300, 4096, 1e-3, 0.1, 0.0)
    if layers:
        assert r.augment.rand_magnitude == magnitude


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_source_and_survives_json(name: str) -> None:
    import json

    r = RECIPES[name]
    assert r.source
    assert Recipe.from_dict(json.loads(json.dumps(r.to_dict()))) == r


CROP = {
    "scale": (0.05, 1.0),
    "ratio": (3 / 4, 4 / 3),
    "interpolation": None,
    "pad": 0,
    "flip": 0.5,
    "color_jitter": 0.0,
    "rand_layers": 0,
    "rand_magnitude": 10.0,
    "trivial": False,
    "erase": 0.0,
    "erase_area": (0.02, 1 / 3),
    "erase_fill": "mean",
}
UNMIXED = {"mixup": 0.0, "cutmix": 0.0, "probability": 1.0, "switch": 0.5}
# Every number that a recipe has unless the rows below say otherwise.
USUAL = {
    "objective": "classify",
    "target": "mean",
    "images": None,
    "image_size": None,
    "eval_crop": None,
    "epochs": None,
    "steps": None,
    "optimizer": "adamw",
    "lr_choices": (),
    "lr_rule": "fixed",
    "betas": (0.9, 0.999),
    "momentum": 0.9,
    "weight_decay": 0.0,
    "decay": "cosine",
    "decay_from": "warmup",
    "final_lr": 0.0,
    "warmup_lr": 0.0,
    "clip": None,
    "ema": None,
    "layer_decay": None,
    "loss": "softmax",
    "label_smoothing": 0.0,
    "class_weights": "equal",
    "sampling": "uniform",
    "teacher": None,
    "teacher_share": None,
    "teacher_temperature": None,
    "early_stop": None,
    "dropout": 0.0,
    "drop_path": 0.0,
    "pre_logits": False,
    "head_bias": 0.0,
    "freeze": (),
    "from_probe": False,
    "lora": None,
    "val": 0.1,
    "augment": CROP,
    "augment_on": "cpu",
    "mix": UNMIXED,
}
TABLE3 = {
    "image_size": 224,
    "batch_size": 4096,
    "warmup": 10_000,
    "decay": "linear",
    "final_lr": 1e-5,
    "pre_logits": True,
    "val": 0.01,
}
JFT = {**TABLE3, "epochs": 7, "weight_decay": 0.1}
I21K = {**TABLE3, "lr": 1e-3, "weight_decay": 0.03, "dropout": 0.1, "loss": "sigmoid", "head_bias": -10.0}
IMAGENET = {
    **TABLE3,
    "epochs": 300,
    "lr": 3e-3,
    "decay": "cosine",
    "final_lr": 0.0,
    "weight_decay": 0.3,
    "dropout": 0.1,
    "clip": 1.0,
}
TABLE4 = {"image_size": 384, "optimizer": "sgd", "batch_size": 512, "lr": 0.01, "warmup": 500, "clip": 1.0}
FOUR, THREE = (0.001, 0.003, 0.01, 0.03), (0.003, 0.01, 0.03)
AUGREG_BASE = {**IMAGENET, "lr": 1e-3, "weight_decay": 0.1, "dropout": 0.0, "pre_logits": False}
# arXiv 2012.12877, Table 9, and the defaults of DeiT's main.py: --warmup-lr, --min-lr, --reprob, --mixup, --cutmix.
DEIT = {
    "image_size": 224,
    "epochs": 300,
    "batch_size": 1024,
    "lr": 1e-3,
    "lr_rule": "linear",
    "weight_decay": 0.05,
    "decay_from": "start",
    "final_lr": 1e-5,
    "warmup": 5 / 300,
    "warmup_lr": 1e-6,
    "label_smoothing": 0.1,
    "drop_path": 0.1,
    "val": 0.01,
    "augment": {
        **CROP,
        "scale": (0.08, 1.0),
        "interpolation": "bicubic",
        "rand_layers": 2,
        "rand_magnitude": 9,
        "erase": 0.25,
        "erase_fill": "noise",
    },
    "mix": {**UNMIXED, "mixup": 0.8, "cutmix": 1.0},
}
# B.1.2
MASKED = {
    "objective": "masked-patch",
    "image_size": 224,
    "optimizer": "adam",
    "batch_size": 4096,
    "lr": 2e-4,
    "warmup": 10_000,
    "val": 0.01,
}
MASKED_SMALL = {
    "objective": "masked-patch",
    "lr": 1e-3,
    "weight_decay": 0.05,
    "warmup": 0.05,
    "clip": 1.0,
    "augment": {**CROP, "scale": (0.5, 1.0)},
}
OURS = {"batch_size": 32, "warmup": 0.1, "clip": 1.0, "label_smoothing": 0.1}
FROM_PROBE = {
    **OURS,
    "epochs": 6,
    "lr": 3e-4,
    "weight_decay": 0.05,
    "layer_decay": 0.75,
    "augment": {**CROP, "scale": (0.4, 1.0)},
    "from_probe": True,
}
SCRATCH = {
    **OURS,
    "batch_size": 512,
    "optimizer": "muon",
    "lr": 3e-3,
    "momentum": 0.95,
    "weight_decay": 0.05,
    "warmup": 0.05,
    "ema": 0.999,
    "augment_on": "device",
}
NUMBERS = {
    "pretrain-jft-b": {**JFT, "lr": 8e-4},
    "pretrain-jft-l32": {**JFT, "lr": 6e-4},
    "pretrain-jft-l16": {**JFT, "lr": 4e-4},
    "pretrain-jft-l16-14": {**JFT, "lr": 4e-4, "epochs": 14},
    "pretrain-jft-h14": {**JFT, "lr": 3e-4, "epochs": 14},
    "pretrain-jft-r50": {**JFT, "lr": 1e-3, "pre_logits": False},
    "pretrain-jft-r101": {**JFT, "lr": 8e-4, "pre_logits": False},
    "pretrain-jft-r152": {**JFT, "lr": 6e-4, "pre_logits": False},
    "pretrain-jft-r50-b": {**JFT, "lr": 8e-4},
    "pretrain-jft-r50-l32": {**JFT, "lr": 2e-4},
    "pretrain-jft-r50-l16": {**JFT, "lr": 4e-4},
    "pretrain-jft-r50-l16-14": {**JFT, "lr": 4e-4, "epochs": 14},
    "pretrain-21k-b": {**I21K, "epochs": 90},
    "pretrain-21k-l-30": {**I21K, "epochs": 30},
    "pretrain-21k-l-90": {**I21K, "epochs": 90},
    "pretrain-imagenet": IMAGENET,
    "masked-patch": {**MASKED, "steps": 1_000_000},
    "masked-patch-100k": {**MASKED, "steps": 100_000},
    "masked-patch-small": {**MASKED_SMALL, "epochs": 100, "batch_size": 128},
    "masked-patch-fashion": {**MASKED_SMALL, "epochs": 50, "batch_size": 512, "val": 0.05},
    "finetune-imagenet": {**TABLE4, "steps": 20_000, "lr_choices": THREE, "val": 0.01},
    "finetune-imagenet-resnet": {**TABLE4, "steps": 20_000, "lr_choices": (*THREE, 0.06), "val": 0.01},
    "finetune-cifar10": {**TABLE4, "steps": 10_000, "lr_choices": FOUR, "val": 0.02},
    "finetune-cifar100": {**TABLE4, "steps": 10_000, "lr_choices": FOUR, "val": 0.02},
    "finetune-pets": {**TABLE4, "steps": 500, "lr_choices": FOUR, "warmup": 100},
    "finetune-flowers": {**TABLE4, "steps": 500, "lr_choices": FOUR, "warmup": 100},
    "finetune-vtab": {**TABLE4, "steps": 2_500, "lr_choices": (0.01,)},
    "finetune-512": {**TABLE4, "image_size": 512, "steps": 20_000, "lr_choices": THREE, "val": 0.01, "ema": 0.9999},
    "finetune-518": {**TABLE4, "image_size": 518, "steps": 20_000, "lr_choices": THREE, "val": 0.01, "ema": 0.9999},
    "augreg-none": AUGREG_BASE,
    **{
        f"augreg-{level}": {
            **AUGREG_BASE,
            "augment": {**CROP, "rand_layers": 2, "rand_magnitude": magnitude},
            "mix": {**UNMIXED, "mixup": mixup},
        }
        for level, (mixup, _, magnitude) in AUGREG.items()
        if level != "none"
    },
    "deit": DEIT,
    "imagenet-s16-90": {
        "image_size": 224,
        "eval_crop": 0.875,
        "epochs": 90,
        "batch_size": 1024,
        "lr": 1e-3,
        "weight_decay": 0.1,
        "warmup": 10_000,
        "clip": 1.0,
        "pre_logits": True,
        "val": 0.01,
        "augment": {**CROP, "rand_layers": 2, "rand_magnitude": 10},
        "mix": {**UNMIXED, "mixup": 0.2},
    },
    "small-data": {**DEIT, "batch_size": 128, "lr": 5e-4, "warmup": 0.05, "val": 0.1},
    "finetune": {
        **OURS,
        "epochs": 20,
        "lr": 1e-3,
        "weight_decay": 0.05,
        "layer_decay": 0.75,
        "augment": {**CROP, "scale": (0.4, 1.0)},
    },
    "from-probe": FROM_PROBE,
    "from-probe-long": {**FROM_PROBE, "epochs": 20, "lr": 1e-3},
    "from-probe-lora": {**FROM_PROBE, "epochs": 10, "lr": 2e-3, "layer_decay": None, "lora": 8},
    "digits": {
        **OURS,
        "epochs": 45,
        "lr": 3e-3,
        "weight_decay": 0.1,
        "augment": {**CROP, "scale": (0.85, 1.0), "ratio": (0.9, 1.1), "flip": 0.0},
    },
    "fashion": {
        **SCRATCH,
        "epochs": 150,
        "drop_path": 0.1,
        "val": 0.02,
        "augment": {**CROP, "scale": (0.7, 1.0), "ratio": (0.8, 1.25), "erase": 0.25},
        "mix": {**UNMIXED, "cutmix": 1.0, "probability": 0.3},
    },
    "fashion-adamw": {
        **OURS,
        "epochs": 123,
        "batch_size": 256,
        "lr": 1e-3,
        "weight_decay": 0.05,
        "warmup": 0.05,
        "ema": 0.9995,
        "drop_path": 0.1,
        "val": 0.05,
        "augment": {**CROP, "scale": (0.7, 1.0), "ratio": (0.8, 1.25), "erase": 0.25},
        "mix": {**UNMIXED, "cutmix": 1.0, "probability": 0.3},
    },
    "cifar10": {
        **SCRATCH,
        "epochs": 200,
        "drop_path": 0.15,
        "val": 0.02,
        "augment": {**CROP, "scale": None, "pad": 4, "trivial": True},
        "mix": {**UNMIXED, "cutmix": 1.0, "probability": 0.5},
    },
    "foodvision-scratch": {
        **OURS,
        "epochs": 100,
        "lr": 1e-3,
        "weight_decay": 0.1,
        "augment": {**CROP, "scale": (0.25, 1.0), "color_jitter": 0.4},
        "mix": {**UNMIXED, "mixup": 0.2, "cutmix": 0.5, "probability": 0.5},
    },
    "foodvision-finetune": {
        **OURS,
        "epochs": 5,
        "lr": 5e-4,
        "weight_decay": 0.05,
        "layer_decay": 0.75,
        "augment": {**CROP, "scale": (0.4, 1.0)},
    },
}


def test_every_recipe_has_a_row_of_numbers() -> None:
    assert list(NUMBERS) == list(RECIPES)
    described = {"source", "ours", "expect", "models", "config", "small_data"}
    assert {f.name for f in dataclasses.fields(Recipe)} - described == {*USUAL, "batch_size", "lr", "warmup"}


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_of_every_recipe(name: str) -> None:
    recipe, expected = RECIPES[name], {**USUAL, **NUMBERS[name]}
    found = {field: getattr(recipe, field) for field in expected}
    found |= {field: dataclasses.asdict(found[field]) for field in ("augment", "mix")}
    assert found == expected


def test_the_plain_baseline_is_evaluated_on_the_centre_of_256_pixels() -> None:
    """arXiv 2205.01580: mean pooling, fixed positions, a hidden layer in the head; resize to 256 and crop 224."""
    model = new_model(None, RECIPES["imagenet-s16-90"], ["a", "b"], 0)
    c, spec = model.config, model.input_spec
    assert (c.pool, c.class_token, c.positions, c.pre_logits, c.patch_size) == ("mean", False, "sincos", True, 16)
    assert (spec.size, spec.resize, spec.size[0] / spec.crop) == ((224, 224), "crop", 256)


def images(name: str) -> int:
    small = {"digits": 1618, "foodvision-scratch": 202, "foodvision-finetune": 202, "finetune": 900, "small-data": 5000}
    return small.get(name, 300_000_000 if "jft" in name else 14_000_000 if "21k" in name else 1_281_167)


def steps_to_check(warmup: int, total: int) -> list[int]:
    return sorted({0, 1, warmup // 2, max(warmup - 1, 0), warmup, warmup + 1, total // 3, total // 2, total - 1, total})


@pytest.mark.parametrize("name", [name for name in NUMBERS if name not in ("deit", "small-data")])
def test_the_schedule_is_the_authors(name: str) -> None:
    """As in vit_jax/utils.py: progress from the end of the warm-up, which multiplies by t / warmup."""
    numbers, recipe = {**USUAL, **NUMBERS[name]}, RECIPES[name]
    total = recipe.total(images(name))
    base, warmup = numbers["lr"], numbers["warmup"] if numbers["warmup"] >= 1 else round(numbers["warmup"] * total)
    for t in steps_to_check(warmup, total):
        progress = min(max((t - warmup) / (total - warmup), 0.0), 1.0)
        if numbers["decay"] == "linear":
            lr = 1e-5 + (base - 1e-5) * (1 - progress)
        else:
            lr = base * 0.5 * (1 + math.cos(math.pi * progress))
        assert recipe.lr_at(t, total) == pytest.approx(lr * min(1, t / warmup), rel=1e-9, abs=1e-15)
    assert recipe.lr_at(warmup, total) == base
    assert recipe.lr_at(total, total) == pytest.approx(numbers["final_lr"], abs=1e-12)


@pytest.mark.parametrize("name", ["deit", "small-data"])
def test_the_schedule_is_timms(name: str) -> None:
    numbers, recipe = NUMBERS[name], RECIPES[name]
    total = recipe.total(images(name))
    base, warmup = numbers["lr"], round(numbers["warmup"] * total)
    for t in steps_to_check(warmup, total):
        lr = 1e-6 + (base - 1e-6) * t / warmup
        if t >= warmup:
            lr = 1e-5 + (base - 1e-5) * 0.5 * (1 + math.cos(math.pi * t / total))
        assert recipe.lr_at(t, total) == pytest.approx(lr, rel=1e-9)
    scheduler = peer("timm.scheduler").CosineLRScheduler(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base),
        t_initial=total,
        lr_min=1e-5,
        warmup_t=warmup,
        warmup_lr_init=1e-6,
        t_in_epochs=False,
    )
    for t in steps_to_check(warmup, total):
        assert recipe.lr_at(t, total) == pytest.approx(scheduler._get_lr(t)[0], rel=1e-9), t


def test_recipes_state_their_formula() -> None:
    assert RECIPES["pretrain-jft-b"].formula == (
        "0.0008 t / w while t < w, then 1e-05 + (0.0008 - 1e-05) (1 - p), p = (t - w) / (T - w)"
    )
    assert RECIPES["finetune-pets"].formula == (
        "0.01 t / w while t < w, then 0.01 (1 + cos(pi p)) / 2, p = (t - w) / (T - w)"
    )
    assert RECIPES["deit"].formula == (
        "1e-06 + (0.001 - 1e-06) t / w while t < w, then 1e-05 + (0.001 - 1e-05) (1 + cos(pi p)) / 2, p = t / T"
    )
    assert dataclasses.replace(RECIPES["digits"], decay="constant", warmup=0).formula == "0.003"
    for name in ("finetune-pets", "finetune-flowers"):
        assert "warm-up" in RECIPES[name].ours


def test_deit_with_a_small_batch() -> None:
    with pytest.raises(ConfigError, match=r"7\.8125e-06 for lr.*Give --final-lr"):
        RECIPES["deit"].change(batch_size=8)
    assert RECIPES["deit"].change(batch_size=8, final_lr=0.0).lr == pytest.approx(1e-3 * 8 / 1024)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_and_resumes_after_its_first_step(name: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(
        RECIPES[name], config=CONFIG, image_size=None, batch_size=4, steps=2, epochs=None, warmup=0, val=0.1
    )
    settings = {"evaluate_every": 10, "save_every": 1}
    how = {"weights": save(ViT(CONFIG), tmp_path / "backbone.safetensors")} if recipe.from_probe else {}
    run(tmp_path / "whole", recipe, settings=settings, **how)

    class Cut(Exception):
        pass

    def cut(event: dict) -> None:
        if event["event"] == "step" and event["step"] == 2:
            raise Cut

    with pytest.raises(Cut):
        run(tmp_path / "cut", recipe, settings=settings, watch=cut, **how)
    run(tmp_path / "cut", recipe, settings=settings, resume=True, **how)
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
        ({"optimizer": "adamax"}, "one of adamw, adam, sgd, muon"),
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
