"""load: what it infers, what may be changed, and what it says about it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

import vitkit
from tests.checkpoints import tiny
from vitkit.checkpoints import load, open_checkpoint, save, to_dialect
from vitkit.checkpoints.infer import _heads, to_channels
from vitkit.checkpoints.preprocessing_presets import DEFAULTS, KNOWN, preprocessing
from vitkit.errors import CannotExpress, ConfigError, TensorMismatch, UnknownName, UnreadableFile
from vitkit.model.config import NUMERICS, SHAPES, InputSpec
from vitkit.model.parts.positions import resize


@pytest.fixture
def native(tmp_path: Path) -> Path:
    return save(tiny.model(), tmp_path / "a.safetensors")


def bare(path: Path, dialect: str = "timm", **fields: Any) -> vitkit.ViT:
    """Weights alone, as most files on the web are."""
    model = tiny.model(**fields)
    torch.save({name: t.clone() for name, t in to_dialect(model, dialect).items()}, path)
    return model


def test_public_names(native: Path) -> None:
    assert isinstance(vitkit.load(native), vitkit.ViT)
    assert not vitkit.load(native).training
    assert all(parameter.requires_grad for parameter in vitkit.load(native).parameters())


def test_no_second_copy(native: Path) -> None:
    """The parameters are the tensors of the opened file, not copies of them."""
    from vitkit.checkpoints.reading import build

    opened = open_checkpoint(native)
    model = build(opened)
    assert all(parameter.data_ptr() == opened.state[name].data_ptr() for name, parameter in model.named_parameters())


def test_weights_can_be_trained_and_the_file_does_not_change(native: Path) -> None:
    before = native.read_bytes()
    model = load(native).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tiny.pixels(model)).sum().backward()
    optimiser.step()
    assert native.read_bytes() == before
    assert not tiny.same_tensors(model, load(native))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float64])
def test_dtype(native: Path, dtype: Any) -> None:
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert {p.dtype for p in load(native, dtype=dtype).parameters()} == {wanted}


@pytest.mark.parametrize("dtype", ["int8", "flout32", torch.int64])
def test_bad_dtype(native: Path, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        load(native, dtype=dtype)


# Image size


@pytest.mark.parametrize("size", [64, (24, 40), (32, 16)])
def test_resolution(native: Path, size: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, found = tiny.model(), load(native, image_size=size, position_resize="torchvision")
    expected = resize(model.positions.table, model.config.grid, found.config.grid, "torchvision")
    assert torch.equal(found.positions.table, expected)
    assert found.input_spec.size == found.config.image_hw
    assert "resized from 4 x 4" in caplog.text
    assert "'torchvision'" in caplog.text


def test_a_wide_table_needs_its_size(tmp_path: Path) -> None:
    model = bare(tmp_path / "a.pth", image_size=(16, 40))
    with pytest.raises(ConfigError, match=r"give image_size=\(height, width\).*= 10 patches"):
        load(tmp_path / "a.pth", num_attention_heads=4)
    found = load(tmp_path / "a.pth", num_attention_heads=4, image_size=(16, 40))
    assert tiny.same_tensors(found, model)


def test_a_wide_table_that_could_be_square(tmp_path: Path) -> None:
    """2 x 4 patches and a class token are nine rows: without a size 3 x 3 patches are read, and that is said."""
    model = bare(tmp_path / "a.pth", image_size=(16, 32))
    assert tiny.same_tensors(load(tmp_path / "a.pth", num_attention_heads=4, image_size=(16, 32)), model)
    opened = open_checkpoint(tmp_path / "a.pth", num_attention_heads=4)
    assert opened.config.grid == (3, 3)
    assert any("image_size=(height, width)" in note for note in opened.notes)


# Channels


def test_one_channel_sees_gray_as_three_did(native: Path) -> None:
    model, found = load(native), load(native, num_channels=1)
    x = torch.randn(2, 1, 32, 32)
    assert tiny.difference(found(x), model(x.expand(2, 3, 32, 32))) < 5e-6
    assert found.input_spec.channels == "gray"
    assert found.input_spec.mean == (0.5,)


@pytest.mark.parametrize("new", [2, 4, 6])
def test_other_channels_keep_equal_ones_equal(new: int) -> None:
    kernel, x = torch.randn(8, 3, 4, 4), torch.randn(1, 1, 4, 4)
    old = torch.nn.functional.conv2d(x.expand(1, 3, 4, 4), kernel.mean(1, keepdim=True).expand(8, 3, 4, 4))
    made = to_channels(kernel.mean(1, keepdim=True).expand(8, 3, 4, 4), new)
    assert torch.allclose(torch.nn.functional.conv2d(x.expand(1, new, 4, 4), made), old, atol=1e-5)


def test_four_channels(native: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = load(native, num_channels=4)
    assert (found.input_spec.channels, len(found.input_spec.mean)) == ("raw", 4)
    assert "repeated in turn and scaled by 3/4" in caplog.text


# Classes


def test_new_head(native: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = load(native, num_labels=3, class_names=("a", "b", "c"))
    assert found.head.weight.shape == (3, 32)
    assert not found.head.weight.any()
    assert not found.head.bias.any()
    assert found.input_spec.class_names == ("a", "b", "c")
    assert "The head is new and zero, with 3 classes instead of 5" in caplog.text
    assert torch.equal(found.features(tiny.pixels(found)), load(native).features(tiny.pixels(found)))


def test_a_new_head_replaces_the_pre_logits(tmp_path: Path) -> None:
    save(tiny.model(pre_logits=True), tmp_path / "a.safetensors")
    assert load(tmp_path / "a.safetensors", num_classes=2).pre_logits is None
    assert load(tmp_path / "a.safetensors", num_classes=2, pre_logits=True).pre_logits is not None
    assert load(tmp_path / "a.safetensors", num_classes=0).config.num_classes == 0


def test_same_count_keeps_the_head(native: Path) -> None:
    assert tiny.same_tensors(load(native, num_classes=5), tiny.model())


def test_class_names_that_do_not_fit(native: Path) -> None:
    with pytest.raises(ConfigError, match=r"5 classes.*names 2"):
        load(native, class_names=("a", "b"))


def test_stated_classes_against_the_head(tmp_path: Path) -> None:
    save(tiny.model(), tmp_path / "hf", "huggingface")
    config = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    config["id2label"] = {"0": "cat", "1": "dog"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(TensorMismatch, match=r"5 classes, but its JSON file states 2"):
        load(tmp_path / "hf")
    found = load(tmp_path / "hf", num_classes=2)
    assert found.head.weight.shape == (2, 32)
    assert found.input_spec.class_names == ("cat", "dog")


# Heads


@pytest.mark.parametrize(("size", "heads"), [("ti", 3), ("s", 6), ("b", 12), ("so400m", 16), ("g", 16)])
def test_heads_of_a_published_variant_are_stated(size: str, heads: int) -> None:
    fields = {name: value for name, value in SHAPES[size].items() if name != "num_attention_heads"}
    notes: list[str] = []
    assert _heads(fields, notes) == heads
    assert f"{heads} are assumed, as in vit-{size}," in notes[0]
    assert "num_attention_heads= (--heads)" in notes[0]


@pytest.mark.parametrize("other", ["hidden_size", "num_hidden_layers", "intermediate_size"])
def test_a_variant_must_agree_in_width_depth_and_mlp(other: str) -> None:
    fields = {**SHAPES["b"], other: SHAPES["b"][other] + 64}
    with pytest.raises(ConfigError, match=r"does not state its number of heads.*num_attention_heads= \(--heads\)"):
        _heads(fields, [])


@pytest.mark.parametrize(("dialect", "width", "heads"), [("course", 64, 4), ("torchvision", 128, 8), ("timm", 192, 3)])
def test_heads_are_never_guessed(dialect: str, width: int, heads: int, tmp_path: Path) -> None:
    """One head or two of width 64 would fit the first two files, and give other logits."""
    model = bare(tmp_path / "a.pth", dialect, hidden_size=width, num_attention_heads=heads)
    with pytest.raises(ConfigError, match=f"width {width}, 2 layers and an MLP of 64; give num_attention_heads="):
        load(tmp_path / "a.pth")
    found = load(tmp_path / "a.pth", num_attention_heads=heads, layer_norm_eps=1e-12)
    assert torch.equal(found(tiny.pixels(model)), model(tiny.pixels(model)))


def test_a_variant_may_have_other_heads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """ViT-Ti's row also fits a model with six heads, so the count is always stated and can be given."""
    shape = SHAPES["ti"] | {"num_attention_heads": 6, "image_size": 16}
    model = bare(tmp_path / "a.pth", **shape)
    assert load(tmp_path / "a.pth").config.num_attention_heads == 3
    assert "3 are assumed, as in vit-ti" in caplog.text
    caplog.clear()
    found = load(tmp_path / "a.pth", num_attention_heads=6, layer_norm_eps=1e-12)
    assert "heads" not in caplog.text
    assert torch.equal(found(tiny.pixels(model)), model(tiny.pixels(model)))


# Numerics and preprocessing


@pytest.mark.parametrize("dialect", ["timm", "torchvision", "course", "huggingface"])
def test_numerics_of_weights_alone(dialect: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bare(tmp_path / "a.pth", dialect)
    found = load(tmp_path / "a.pth", num_attention_heads=4)
    assert {name: getattr(found.config, name) for name in NUMERICS[dialect]} == NUMERICS[dialect]
    assert f"those of {dialect} are assumed" in caplog.text
    assert found.input_spec.mean == DEFAULTS[dialect]["mean"]
    for name, value in DEFAULTS[dialect].items():
        shown = "/".join(f"{part:g}" for part in value) if isinstance(value, tuple) else value
        assert f"{name} {shown}" in caplog.text
        assert f"--{name}" in caplog.text


def test_given_preprocessing_is_not_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bare(tmp_path / "a.pth")
    statistics = {"mean": 0.4, "std": (0.1, 0.2, 0.3)}
    load(tmp_path / "a.pth", num_attention_heads=4, **statistics)
    assert "usual way is assumed: resize crop, crop 0.9, interpolation bicubic. If it" in caplog.text
    caplog.clear()
    found = load(
        tmp_path / "a.pth", num_attention_heads=4, **statistics, resize="squash", crop=1.0, interpolation="lanczos"
    )
    assert "usual way" not in caplog.text
    assert found.input_spec.interpolation == "lanczos"
    found = load(tmp_path / "a.pth", num_attention_heads=4, **statistics, resize="squash")
    assert (found.input_spec.mean, found.input_spec.std) == ((0.4,) * 3, (0.1, 0.2, 0.3))
    assert (found.input_spec.resize, found.input_spec.crop) == ("squash", 1.0)
    assert "usual way is assumed: interpolation bicubic. If it" in caplog.text


def test_overrides_win(native: Path) -> None:
    spec = InputSpec(size=(32, 32), mean=(0.1,) * 3, std=(0.2,) * 3)
    found = load(native, layer_norm_eps=1e-3, hidden_act="gelu_tanh", hidden_dropout_prob=0.25, input_spec=spec)
    assert (found.config.layer_norm_eps, found.config.hidden_act) == (1e-3, "gelu_tanh")
    assert found.blocks[0].norm1.eps == 1e-3
    assert found.dropout.p == 0.25
    assert found.input_spec == spec


def test_unknown_override(native: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'num_classes'"):
        load(native, num_clases=3)
    with pytest.raises(ConfigError, match="has no argument 'hidden_size'"):
        load(native, hidden_size=64)
    with pytest.raises(UnknownName, match="did you mean 'timm'"):
        load(native, dialect="tim")


IMAGENET_MEAN = (0.485, 0.456, 0.406)


@pytest.mark.parametrize(
    ("name", "mean", "crop", "interpolation"),
    [
        ("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", (0.5,) * 3, 0.9, "bicubic"),
        ("vit_base_patch16_224.orig_in21k.pth", (0.5,) * 3, 0.9, "bicubic"),
        ("vit_base_patch16_384.augreg_in21k_ft_in1k", (0.5,) * 3, 1.0, "bicubic"),
        ("timm/vit_small_patch16_224.dino", IMAGENET_MEAN, 0.9, "bicubic"),
        ("dino_deitsmall16_pretrain.pth", IMAGENET_MEAN, 0.875, "bicubic"),
        ("mae_pretrain_vit_base.pth", IMAGENET_MEAN, 0.875, "bicubic"),
        ("deit_small_patch16_224-cd65a155.pth", IMAGENET_MEAN, 0.875, "bicubic"),
        ("timm/deit_small_patch16_224.fb_in1k", IMAGENET_MEAN, 0.9, "bicubic"),
        ("facebook/dinov2-small", IMAGENET_MEAN, 0.875, "bicubic"),
        ("dinov2_vits14_pretrain.pth", IMAGENET_MEAN, 0.875, "bicubic"),
        ("vit_b_16-c867db91.pth", IMAGENET_MEAN, 0.875, "bilinear"),
        ("vit_b_16_swag-9ac1b537.pth", IMAGENET_MEAN, 1.0, "bicubic"),
        ("google/vit-base-patch16-224", (0.5,) * 3, 1.0, "bilinear"),
        ("B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz", (0.5,) * 3, 1.0, "bilinear"),
    ],
)
def test_known_checkpoints(name: str, mean: tuple[float, ...], crop: float, interpolation: str) -> None:
    row = preprocessing(name)
    assert row is not None
    assert (row.spec["mean"], row.spec["crop"], row.spec["interpolation"]) == (mean, crop, interpolation)


@pytest.mark.parametrize(
    "name",
    [
        "DeiT-S_16_224.pth",
        "my-B_16.npz",
        "S_16_finetuned.pth",
        "runs/deit_3_copy/last.pth",
        "not-google/vit-base-patch16-224",
        "my_vit_base_patch16_224.augreg.pth",
        "google/vit-base-patch16-224/mine.pth",
        "vit_b_16_swag.pth",
    ],
)
def test_presets_do_not_match_inside_a_name(name: str) -> None:
    assert preprocessing(name, Path(name).name) is None or "google/vit-" in name[:11]


def test_known_rows_are_sourced_and_valid() -> None:
    assert all(row.source for row in KNOWN)
    for row in (*(row.spec for row in KNOWN), *DEFAULTS.values()):
        InputSpec(**row)
    assert preprocessing("my_model.pth") is None
    imagenet = DEFAULTS["torchvision"]
    assert (imagenet["mean"], imagenet["std"]) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_known_agrees_with_timm() -> None:
    """timm's own table is the judge for the rows that name it."""
    from tests.peers import peer

    timm, seen = peer("timm"), 0
    for name in timm.list_pretrained("vit_*"):
        row = preprocessing(name)
        if row is None or "timm" not in row.source:
            continue
        cfg = timm.get_pretrained_cfg(name)
        assert (tuple(cfg.mean), tuple(cfg.std), cfg.crop_pct, cfg.interpolation) == (
            row.spec["mean"],
            row.spec["std"],
            row.spec["crop"],
            row.spec["interpolation"],
        ), name
        seen += 1
    assert seen > 20


# JSON beside the weights


def test_timm_names_and_numbers_that_cannot_be_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.model(layer_norm_eps=1e-6)
    save(model, tmp_path / "model.safetensors", "timm")
    (tmp_path / "model.safetensors.vitkit.json").unlink()

    def opened(**values: Any) -> Any:
        cfg = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.95}
        beside = {"architecture": "vit_huge_patch8_32", "global_pool": "token", "pretrained_cfg": cfg, **values}
        (tmp_path / "config.json").write_text(json.dumps(beside), encoding="utf-8")
        return open_checkpoint(tmp_path)

    with pytest.raises(ConfigError, match="does not state its number of heads"):
        opened()
    with pytest.raises(ConfigError, match="does not state its number of heads"):
        opened(architecture="vit_tiny_patch16_224", num_features=32)  # the name is kept, the width is not its own
    found = opened(model_args={"num_heads": 8, "img_size": 32})
    assert found.config.num_attention_heads == 8
    assert any("'vit_huge_patch8_32', which vitkit does not know" in note for note in found.notes)
    assert any("usual way is assumed: interpolation bicubic. If" in note for note in found.notes)
    for values, what in (
        ({"global_pool": "avgmax"}, "global_pool='avgmax'"),
        ({"model_args": {"num_heads": 8, "act_layer": "relu"}}, "model_args act_layer"),
        ({"architecture": "vit_small_patch16_18x2_224"}, "two branches side by side"),
        ({"architecture": "vit_dwee_patch16_reg1_gap_256"}, "differential attention"),
    ):
        with pytest.raises(CannotExpress, match=what):
            opened(**values)
    squash = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.95, "crop_mode": "squash"}
    found = opened(pretrained_cfg=squash, model_args={"num_heads": 4})
    assert any("timm resizes to" in note for note in found.notes)


def test_timm_folder(tmp_path: Path) -> None:
    """As timm's repositories on the hub are."""
    model = tiny.model(hidden_size=192, num_hidden_layers=12, num_attention_heads=3, image_size=32, patch_size=16)
    (tmp_path / "t").mkdir()
    save(model, tmp_path / "t" / "model.safetensors", "timm")
    (tmp_path / "t" / "model.safetensors.vitkit.json").unlink()
    cfg = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 5,
        "num_features": 192,
        "global_pool": "token",
        "pretrained_cfg": {
            "input_size": [3, 32, 32],
            "interpolation": "bilinear",
            "crop_pct": 0.95,
            "mean": [0.1, 0.2, 0.3],
            "std": [0.4, 0.5, 0.6],
            "label_names": ["a", "b", "c", "d", "e"],
        },
    }
    (tmp_path / "t" / "config.json").write_text(json.dumps(cfg), encoding="utf-8")
    found = load(tmp_path / "t")
    assert tiny.same_tensors(found, model)
    assert found.input_spec == InputSpec(
        size=(32, 32),
        resize="crop",
        crop=0.95,
        interpolation="bilinear",
        mean=(0.1, 0.2, 0.3),
        std=(0.4, 0.5, 0.6),
        class_names=("a", "b", "c", "d", "e"),
    )


@pytest.mark.parametrize("edge", [224, 232, 242, 248, 256, 518])
def test_shortest_edge_becomes_a_crop(edge: int) -> None:
    from vitkit.checkpoints.external_configs import read_preprocessor

    spec = read_preprocessor(
        {
            "do_center_crop": True,
            "crop_size": {"height": 224, "width": 224},
            "size": {"shortest_edge": edge},
            "resample": 3,
        }
    )
    assert int(224 / spec["crop"]) == edge
    assert spec["interpolation"] == "bicubic"


def test_edited_json_wins(tmp_path: Path) -> None:
    save(tiny.model(), tmp_path / "hf", "huggingface")
    config = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 0.5}), encoding="utf-8")
    prepared = json.loads((tmp_path / "hf" / "preprocessor_config.json").read_text(encoding="utf-8"))
    (tmp_path / "hf" / "preprocessor_config.json").write_text(
        json.dumps({**prepared, "image_mean": [0, 0, 0]}), encoding="utf-8"
    )
    found = load(tmp_path / "hf")
    assert found.config.layer_norm_eps == 0.5
    assert found.input_spec.mean == (0, 0, 0)


@pytest.mark.parametrize(
    ("change", "what"), [({"hidden_act": "gelu_10"}, "gelu_10"), ({"pooler_act": "relu"}, "pooler_act")]
)
def test_json_of_another_architecture(change: dict[str, Any], what: str, tmp_path: Path) -> None:
    save(tiny.model(), tmp_path / "hf", "huggingface")
    config = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, **change}), encoding="utf-8")
    with pytest.raises(CannotExpress, match=what):
        load(tmp_path / "hf")


def test_class_names_keep_their_order(tmp_path: Path) -> None:
    """'0', '1', '10' sorted as text would come out of order."""
    names = tuple(f"class {i}" for i in range(12))
    model = tiny.model(num_classes=12)
    model.input_spec = dataclasses.replace(model.input_spec, class_names=names)
    save(model, tmp_path / "hf", "huggingface")
    assert load(tmp_path / "hf").input_spec.class_names == names


def test_names_that_occur_twice_get_their_number() -> None:
    from vitkit.checkpoints.external_configs import read_json

    _, spec = read_json({"id2label": {"0": "crane", "1": "cat", "2": "crane"}}, None, [])
    assert spec["class_names"] == ("crane (0)", "cat", "crane (2)")


# Sidecars and native metadata


def test_sidecar_holds_what_the_file_cannot(tmp_path: Path) -> None:
    model = tiny.model(layer_norm_eps=1e-3, hidden_act="gelu_tanh", position_resize="dinov2")
    model.input_spec = InputSpec(size=(32, 32), mean=(0.1,) * 3, std=(0.2,) * 3, class_names=("a", "b", "c", "d", "e"))
    save(model, tmp_path / "a.pth", "timm")
    values = json.loads((tmp_path / "a.pth.vitkit.json").read_text(encoding="utf-8"))
    assert len(values["sha256"]) == 64
    found = load(tmp_path / "a.pth")
    assert (found.config, found.input_spec) == (model.config, model.input_spec)


def test_sidecar_of_other_weights_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tiny.model(layer_norm_eps=1e-3), tmp_path / "a.pth", "timm")
    bare(tmp_path / "a.pth", seed=5)
    found = load(tmp_path / "a.pth", num_attention_heads=4)
    assert found.config.layer_norm_eps == 1e-6
    assert "belongs to other weights" in caplog.text
    assert "those of timm are assumed" in caplog.text


def test_damaged_sidecar(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tiny.model(), tmp_path / "a.pth", "timm")
    (tmp_path / "a.pth.vitkit.json").write_text('{"config": 3', encoding="utf-8")
    load(tmp_path / "a.pth", num_attention_heads=4)
    assert "is not a sidecar that this version can read" in caplog.text


def test_native_carries_strings(tmp_path: Path) -> None:
    save(tiny.model(), tmp_path / "a.safetensors", extra={"run": "7", "accuracy": "0.9"})
    assert open_checkpoint(tmp_path / "a.safetensors").extra == {"run": "7", "accuracy": "0.9"}
    with pytest.raises(ConfigError, match="Only native files can hold extra="):
        save(tiny.model(), tmp_path / "a.pth", "timm", extra={"run": "7"})


def test_a_description_from_a_newer_version_is_refused(tmp_path: Path) -> None:
    """To ignore it would be to compute something else."""
    from safetensors.torch import save_file

    model = tiny.model()
    save(model, tmp_path / "a.safetensors")
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        values = json.loads(file.metadata()["vitkit"])
    assert "pool" not in values["config"]  # only what differs from the defaults
    for change, message in (({"format": 2}, "got format 2"), ({"gates": 3}, "no field 'gates'.* newer vitkit")):
        text = json.dumps(values | {"config": values["config"] | change})
        save_file(model.state_dict(), tmp_path / "a.safetensors", {"vitkit": text})
        with pytest.raises(UnreadableFile, match=message):
            load(tmp_path / "a.safetensors")


def test_native_names_without_metadata(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import save_file

    save_file(tiny.model().state_dict(), tmp_path / "a.safetensors")
    assert tiny.same_tensors(load(tmp_path / "a.safetensors", num_attention_heads=4), tiny.model())
    assert "those of native are assumed" in caplog.text
