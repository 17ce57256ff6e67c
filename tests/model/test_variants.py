"""Table 1 and its later rows: exact parameter counts, and the names under which they can be asked for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import vitkit
from tests.peers import peer
from vitkit.errors import ConfigError, UnknownName
from vitkit.model.config import NUMERICS, VARIANTS, variant

# At 224 px with 1000 classes; typed by hand, checked against timm's own models below where timm has the row.
PARAMETERS = {
    "vit-ti/16": 5_717_416,
    "vit-s/8": 22_055_272,
    "vit-s/14": 22_004_584,
    "vit-s/16": 22_050_664,
    "vit-s/32": 22_878_952,
    "vit-b/8": 86_576_872,
    "vit-b/14": 86_475_496,
    "vit-b/16": 86_567_656,
    "vit-b/32": 88_224_232,
    "vit-l/14": 304_203_752,
    "vit-l/16": 304_326_632,
    "vit-l/32": 306_535_400,
    "vit-h/14": 632_045_800,
    "vit-h/16": 632_199_400,
    "vit-so400m/14": 413_597_656,
    "vit-so400m/16": 413_735_896,
    "vit-g/14": 1_012_611_432,
    "vit-G/14": 1_844_440_680,
    "r+vit-ti/16": 6_337_704,
    "r26+vit-s/32": 36_431_912,
    "r26+vit-b/32": 101_383_976,
    "r50+vit-b/16": 98_659_112,
    "r50+vit-b/32": 110_945_832,
    "r50+vit-l/16": 316_483_624,
    "r50+vit-l/32": 328_994_856,
}
TIMM = {
    "vit_tiny_patch16_224": "vit-ti/16",
    "vit_small_patch8_224": "vit-s/8",
    "vit_small_patch16_224": "vit-s/16",
    "vit_small_patch32_224": "vit-s/32",
    "vit_base_patch8_224": "vit-b/8",
    "vit_base_patch16_224": "vit-b/16",
    "vit_base_patch32_224": "vit-b/32",
    "vit_large_patch14_224": "vit-l/14",
    "vit_large_patch16_224": "vit-l/16",
    "vit_large_patch32_224": "vit-l/32",
    "vit_huge_patch14_224": "vit-h/14",
    "vit_giant_patch14_224": "vit-g/14",
    "vit_gigantic_patch14_224": "vit-G/14",
    "vit_base_r50_s16_224": "r50+vit-b/16",
}


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_exact_parameters(name: str) -> None:
    assert name in PARAMETERS, f"{name} has no exact parameter count: add one here"
    with torch.device("meta"):
        assert count(vitkit.create(name)) == PARAMETERS[name]


def test_no_count_without_a_variant() -> None:
    assert set(PARAMETERS) == set(VARIANTS)


@pytest.mark.parametrize("name", TIMM)
def test_timm_names_and_counts(name: str) -> None:
    timm = peer("timm")
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=1000)
        assert count(theirs) == PARAMETERS[TIMM[name]]
        assert count(vitkit.create(name)) == count(theirs)


@pytest.mark.parametrize(
    "name",
    [
        "ViT-B/16",
        "vit-b/16",
        "B/16",
        "VIT-b/16",
        "vit_base_patch16_224",
        "google/vit-base-patch16-224",
        "vit_base_patch16",
    ],
)
def test_spellings_of_one_variant(name: str) -> None:
    assert variant(name) == VARIANTS["vit-b/16"]


def test_g_and_G_differ() -> None:
    assert variant("ViT-g/14").hidden_size == 1408
    assert variant("ViT-G/14").hidden_size == 1664


def test_size_in_a_timm_name() -> None:
    assert variant("vit_base_patch16_384").image_size == 384
    assert variant("vit_base_patch16_384", image_size=256).image_size == 256


def test_numerics() -> None:
    row = variant("vit-b/16")
    assert (row.layer_norm_eps, row.hidden_act, row.position_resize) == (1e-6, "gelu", "google")
    assert variant("vit-b/16", numerics="google").hidden_act == "gelu_tanh"
    assert variant("vit-b/16", numerics="huggingface").layer_norm_eps == 1e-12
    for numerics in NUMERICS.values():
        dataclasses.replace(row, **numerics)


def test_overrides() -> None:
    model = vitkit.create("vit-ti/16", num_classes=3, image_size=(64, 32), num_channels=1)
    assert model(torch.randn(2, 1, 64, 32)).shape == (2, 3)
    assert model.input_spec.size == (64, 32)
    assert model.input_spec.channels == "gray"
    assert variant("vit-ti/16", num_labels=7).num_classes == 7


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: variant("vit-x/16"), UnknownName, ["'vit-x/16'", "did you mean", "vit-b/16, "]),
        (lambda: variant("vit-b/17"), UnknownName, ["'vit-b/17'", "vit-b/16"]),
        (lambda: variant("vit-b/16", numerics="gogle"), UnknownName, ["numerics", "did you mean 'google'?"]),
        (lambda: variant("vit-b/16", num_clases=3), ConfigError, ["'num_clases'", "did you mean 'num_classes'?"]),
        (lambda: variant("vit_base_patch16_224.augreg_in21k"), ConfigError, ["trained weights", "vitkit.load('timm/"]),
        (lambda: variant("vit_base_patch16_clip_224"), UnknownName, ["vit_base_patch16_clip_224"]),
    ],
)
def test_mistakes(call, error, words) -> None:
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("ViT-Base", "vit-b/16"),
        ("ViT-Large", "vit-l/16"),
        ("ViT-Huge", "vit-h/14"),  # the paper's
        ("vit_huge", "vit-h/14"),
        ("ViT-Base/32", "vit-b/32"),
        ("vit_b_16", "vit-b/16"),  # torchvision's
        ("vit_h_14", "vit-h/14"),
        ("ViT Tiny", "vit-ti/16"),
        ("so400m", "vit-so400m/14"),
        ("G", "vit-G/14"),
        ("giant", "vit-g/14"),
    ],
)
def test_names_that_people_type(name: str, row: str) -> None:
    assert variant(name) == VARIANTS[row]
