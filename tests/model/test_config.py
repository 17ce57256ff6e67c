"""ViTConfig and InputSpec: the mission's defaults, one config class, and nonsense refused with the value and a cure."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from vitkit.errors import ConfigError, UnreadableFile
from vitkit.model import config
from vitkit.model.config import InputSpec, ViTConfig


def test_defaults_are_the_published_ones() -> None:
    c = ViTConfig()
    expected = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "image_size": 224,
        "patch_size": 16,
        "num_channels": 3,
        "qkv_bias": True,
    }
    assert {name: getattr(c, name) for name in expected} == expected


def test_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ViTConfig().hidden_size = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        ViTConfig(768)  # type: ignore[misc]


def test_num_labels_is_num_classes() -> None:
    c = ViTConfig(num_labels=5)  # type: ignore[call-arg]
    assert c.num_classes == c.num_labels == 5  # type: ignore[attr-defined]
    assert dataclasses.replace(c, num_classes=6).num_labels == 6
    with pytest.raises(ConfigError, match="two names for the same field"):
        ViTConfig(num_labels=5, num_classes=6)  # type: ignore[call-arg]


def test_round_trip_through_json() -> None:
    c = ViTConfig(image_size=(64, 32), pruned_heads={3: [1, 0], 1: [2]}, layer_scale=1e-5)  # type: ignore[arg-type]
    assert c.pruned_heads == ((1, (2,)), (3, (0, 1)))
    assert ViTConfig.from_dict(json.loads(json.dumps(c.to_dict()))) == c
    spec = InputSpec(size=(64, 32), resize="crop", crop=0.9, class_names=("a", "b"))
    assert InputSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert hash(c)
    assert hash(spec)


def test_a_file_holds_what_differs_from_the_defaults() -> None:
    assert ViTConfig().to_dict() == {"format": 1}
    c = ViTConfig(hidden_size=192, num_attention_heads=3, image_size=(64, 32), layer_scale=1e-5)
    assert c.to_dict() == {
        "format": 1,
        "hidden_size": 192,
        "num_attention_heads": 3,
        "image_size": [64, 32],
        "layer_scale": 1e-5,
    }
    whole = c.to_dict(whole=True)
    assert list(whole) == [f.name for f in dataclasses.fields(ViTConfig)]
    assert ViTConfig.from_dict(whole) == c  # as files were before they had a format


# What `format: 1` stands for in files that exist. If this fails, do not change it: keep the old default in
# config.FORMER_DEFAULTS, raise config.FORMAT, and add the new format's table here. Only a new field, whose default
# computes what was computed before it, is added to every table.
DEFAULTS_OF_FORMAT = {
    1: {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "image_size": 224,
        "patch_size": 16,
        "num_channels": 3,
        "qkv_bias": True,
        "num_classes": 1000,
        "chunk_size_feed_forward": 0,
        "pruned_heads": [],
        "pool": "cls",
        "norm_after_pool": False,
        "class_token": True,
        "pre_logits": False,
        "layer_scale": None,
        "num_register_tokens": 0,
        "drop_path_rate": 0.0,
        "position_resize": "google",
        "pad_input": False,
        "block": "pre-norm",
        "norm": "layer",
        "norms": ["final"],
        "without_bias": [],
        "stem": "none",
        "positions": "1d",
        "positions_in": "first",
        "prefix_positions": True,
        "relative": "none",
        "relative_grid": None,
        "pool_prefix": False,
        "pool_heads": None,
        "pool_intermediate_size": None,
        "standardisation": "google",
    }
}


@pytest.mark.parametrize("format", DEFAULTS_OF_FORMAT)
def test_the_defaults_of_a_format_never_change(format: int) -> None:
    found = ViTConfig.from_dict({"format": format}).to_dict(whole=True)
    assert found == DEFAULTS_OF_FORMAT[format]
    assert max(DEFAULTS_OF_FORMAT) == config.FORMAT


def test_a_changed_default_leaves_old_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if two defaults had changed: patch_size with formats 2 and 3, num_channels with format 3."""
    monkeypatch.setattr(config, "FORMAT", 3)
    monkeypatch.setattr(config, "FORMER_DEFAULTS", {1: {"patch_size": 8}, 2: {"patch_size": 32, "num_channels": 1}})
    found = {f: ViTConfig.from_dict({"format": f} if f else {}) for f in range(4)}
    assert {f: (c.patch_size, c.num_channels) for f, c in found.items()} == {
        0: (8, 1),
        1: (8, 1),
        2: (32, 1),
        3: (16, 3),
    }
    assert ViTConfig.from_dict({"format": 1, "patch_size": 4}).patch_size == 4
    assert ViTConfig().to_dict() == {"format": 3}


@pytest.mark.parametrize("format", [2, 0, "1", None])
def test_a_newer_format_is_refused(format: object) -> None:
    with pytest.raises(UnreadableFile, match=r"Expected a configuration of format 1 to 1; got .* newest vitkit"):
        ViTConfig.from_dict({"format": format})


def test_one_spelling_of_a_square() -> None:
    assert ViTConfig(image_size=(224, 224)) == ViTConfig(image_size=224)


def test_heads_that_remain() -> None:
    c = ViTConfig(pruned_heads=((2, (0, 11)),))
    assert c.heads_of(2) == tuple(range(1, 11))
    assert c.heads_of(0) == tuple(range(12))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": 100, "num_attention_heads": 12}, ["12 heads do not divide 100", "Try 10 heads"]),
        ({"image_size": 225}, ["225", "16", "Use 224", "pad_input=True"]),
        ({"image_size": (224, 230)}, ["230", "Use 224"]),
        ({"image_size": 8}, ["8 pixels", "Use 16"]),
        ({"image_size": "224"}, ["image_size", "'224'"]),
        ({"hidden_size": 0}, ["hidden_size", "at least 1", "got 0"]),
        ({"hidden_size": 76.8}, ["whole number", "76.8"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"layer_norm_eps": math.nan}, ["layer_norm_eps", "finite", "nan"]),
        ({"layer_norm_eps": 0.0}, ["layer_norm_eps", "over 0"]),
        ({"hidden_dropout_prob": 1.5}, ["hidden_dropout_prob", "at most 1", "1.5"]),
        ({"attention_probs_dropout_prob": math.nan}, ["attention_probs_dropout_prob", "nan"]),
        ({"initializer_range": math.inf}, ["initializer_range", "inf"]),
        ({"layer_scale": math.nan}, ["layer_scale", "nan"]),
        ({"drop_path_rate": -0.1}, ["drop_path_rate", "-0.1"]),
        ({"hidden_act": "tanh"}, ["hidden_act", "gelu, gelu_tanh", "'tanh'"]),
        ({"position_resize": "timm_npz"}, ["position_resize", "did you mean 'timm-npz'?"]),
        ({"pool": "avg"}, ["pool", "cls, mean", "'avg'"]),
        ({"class_token": False}, ["class token", "pool='mean'"]),
        ({"norm_after_pool": True}, ["norm_after_pool", "pool='mean'"]),
        ({"pruned_heads": {12: [0]}}, ["layer 12", "0 to 11"]),
        ({"pruned_heads": {0: [12]}}, ["[12]", "0 to 11"]),
        ({"pruned_heads": {0: range(12)}}, ["no head in layer 0", "at least one"]),
    ],
)
def test_nonsense_is_refused(values, words) -> None:
    with pytest.raises(ConfigError) as caught:
        ViTConfig(**values)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"crop": 0.9}, ["crop", "got 0.9", "resize='crop'"]),
        ({"resize": "crop", "crop": 1.1}, ["crop", "at most 1"]),
        ({"std": (0.5, 0.0, 0.5)}, ["std", "over 0"]),
        ({"mean": (0.5,)}, ["rgb", "3 numbers", "got 1 and 3"]),
        ({"channels": "bgr"}, ["channels", "rgb, gray, raw"]),
        ({"class_names": ("a", "b", "a")}, ["'a'", "twice"]),
        ({"size": (224, 0)}, ["size", "got 0"]),
    ],
)
def test_bad_input_spec_is_refused(values, words) -> None:
    with pytest.raises(ConfigError) as caught:
        InputSpec(**values)
    for word in words:
        assert word in str(caught.value)


def test_spec_and_config_must_fit() -> None:
    with pytest.raises(ConfigError, match=r"takes 1 channels.*has 3"):
        InputSpec().check(ViTConfig(num_channels=1))
    with pytest.raises(ConfigError, match=r"has 3 classes.*names 2"):
        InputSpec(class_names=("a", "b")).check(ViTConfig(num_classes=3))
    assert InputSpec.of(ViTConfig(num_channels=5)).channels == "raw"


def test_unknown_field_of_a_file_is_named() -> None:
    with pytest.raises(ConfigError, match="no field 'hiden_size', did you mean 'hidden_size'"):
        ViTConfig.from_dict({"hiden_size": 3})
