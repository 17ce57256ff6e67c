"""Hybrids (section 3.1), a ResNet before E: counts, names, the libraries' logits, files, attention on its grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vitkit
from tests.model.test_resnet import difference, filled, pixels
from tests.peers import peer
from vitkit import ViT, ViTConfig
from vitkit.checkpoints import load, open_checkpoint, save
from vitkit.checkpoints.verify import compare
from vitkit.errors import CannotExpress, ConfigError
from vitkit.model.config import HYBRIDS, variant, variant_of
from vitkit.model.count import flops, parameters
from vitkit.model.parts.stems import STEMS
from vitkit.model.resnet_config import STEM_DEPTHS

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 64,
    "patch_size": 32,
    "num_classes": 5,
    "layer_norm_eps": 1e-6,
}
TIMM = {
    "vit_tiny_r_s16_p8_224": "r+vit-ti/16",
    "vit_small_r26_s32_224": "r26+vit-s/32",
    "vit_base_r26_s32_224": "r26+vit-b/32",
    "vit_base_r50_s16_224": "r50+vit-b/16",
    "vit_large_r50_s32_224": "r50+vit-l/32",
}


def small(stem: str, **fields: Any) -> ViT:
    model = filled(ViT(ViTConfig(stem=stem, **{**SMALL, **fields})))
    with torch.no_grad():
        model.patch_embedding.projection.weight.mul_(0.05)  # it sums thousands of numbers: tokens of a usual size
    return model


@pytest.mark.parametrize("stem", [name for name in STEMS if name != "none"])
def test_counts_and_the_grid(stem: str) -> None:
    """Every stem, at its own patches: parameters, operations, and one token per output."""
    model = small(stem, patch_size=16 if stem == "r50/16" else 32, image_size=(64, 96))
    c = model.config
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with FlopCounterMode(display=False) as counted, torch.no_grad(), math:
        z = model.encode(pixels(1, 3, 64, 96))
        model.classify(model.read(z))
    assert parameters(c) == sum(p.numel() for p in model.parameters())
    assert flops(c) == counted.get_total_flops()
    assert z.shape[1] == 1 + c.num_patches
    A = model.attention(pixels(1, 3, 64, 96))[0]
    assert A.shape == (1, 4, 1 + c.num_patches, 1 + c.num_patches)
    torch.testing.assert_close(A.sum(-1), torch.ones_like(A[..., 0]))


@pytest.mark.parametrize("name", TIMM)
def test_timm_names(name: str) -> None:
    assert variant_of(variant(name)) == TIMM[name]
    assert variant(f"{name[:-3]}384").image_size == 384
    assert variant(name, numerics="timm").standardisation == "timm"
    assert variant(name).standardisation == "google"


@pytest.mark.parametrize("spelling", ["R50+ViT-B/16", "r50+vit-b/16", "R50+B/16", "R50+ViT-B_16", "r50+vit-base/16"])
def test_spellings(spelling: str) -> None:
    assert variant_of(variant(spelling)) == "r50+vit-b/16"


def test_rows_of_the_paper() -> None:
    """Section 4.1: R50/16 has the units of stage 4 in stage 3, and the same number of layers."""
    assert sum(STEM_DEPTHS["r50/16"]) == sum(STEM_DEPTHS["r50/32"])
    assert {name: variant(name).grid for name in HYBRIDS if name.startswith("r50")} == {
        "r50+vit-b/16": (14, 14),
        "r50+vit-b/32": (7, 7),
        "r50+vit-l/16": (14, 14),
        "r50+vit-l/32": (7, 7),
    }
    assert variant("r+vit-ti/16").grid == (7, 7)


def test_patches_that_a_stem_cannot_make_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"patch_size must be a multiple of 32 with stem='r14/32'.*got 16"):
        ViTConfig(stem="r14/32", patch_size=16)
    with pytest.raises(ConfigError, match="stem must be one of none, r/4"):
        ViTConfig(stem="r51/32")


@pytest.mark.parametrize("stem", ["r/4", "r14/32"])
@pytest.mark.parametrize("dialect", ["timm", "google"])
@torch.no_grad()
def test_timm_reads_our_files(stem: str, dialect: str, tmp_path: Path) -> None:
    """timm's own reader of .npz, and its state dict, give our logits with its epsilon."""
    model = small(stem, hidden_act="gelu_tanh" if dialect == "google" else "gelu")
    path = tmp_path / ("model.npz" if dialect == "google" else "model.pth")
    save(model, path, dialect)
    assert load(path).config == model.config
    (tmp_path / f"{path.name}.vitkit.json").unlink()
    found = open_checkpoint(path, num_attention_heads=4).config
    assert (found.stem, found.patch_size, found.image_size) == (stem, 32, 64)
    assert found.standardisation == dialect
    rows = compare(path, photos=pixels(2, 3, 64, 64), num_attention_heads=4, standardisation="timm")
    assert len(rows) == 2
    assert all(row.equal for row in rows), rows


@torch.no_grad()
def test_another_epsilon_is_found(tmp_path: Path) -> None:
    """The authors' numerics differ from timm's, and the comparison says so."""
    model = small("r14/32", hidden_act="gelu_tanh")
    for name, parameter in model.named_parameters():
        if "conv" in name:
            parameter.mul_(0.01)  # small kernels, so that the epsilon shows
    save(model, tmp_path / "model.npz", "google")
    (row,) = compare(tmp_path / "model.npz")
    assert not row.equal
    assert row.explanation == "explained by standardisation: the library uses timm, vitkit google"


@torch.no_grad()
def test_logits_of_a_published_size() -> None:
    timm = peer("timm")
    torch.manual_seed(0)
    theirs = timm.create_model("vit_tiny_r_s16_p8_224", num_classes=10).eval()
    ours = vitkit.create("vit_tiny_r_s16_p8_224", num_classes=10, numerics="timm").eval()
    ours.load_state_dict(vitkit.checkpoints.from_dialect(theirs.state_dict(), "timm", ours.config))
    x = pixels(1, 3, 224, 224)
    assert difference(ours(x), theirs(x)) < 5e-6


def test_names_in_googles_files() -> None:
    names = set(vitkit.checkpoints.to_dialect(small("r14/32"), "google"))
    assert {"conv_root/kernel", "gn_root/scale", "gn_root/bias", "embedding/kernel"} <= names
    unit = {f"block4/unit1/{part}" for part in ("conv1/kernel", "gn3/bias", "conv_proj/kernel", "gn_proj/scale")}
    assert unit <= names
    assert not any("block5" in name or "unit0" in name for name in names)


def test_dialects_without_a_place_refuse() -> None:
    with pytest.raises(CannotExpress, match=r"stem=r14/32.*Dialects that can: native, timm, google"):
        vitkit.checkpoints.to_dialect(small("r14/32"), "huggingface")


def test_a_stem_of_other_depths_is_refused(tmp_path: Path) -> None:
    state = vitkit.checkpoints.to_dialect(small("r14/32"), "timm")
    torch.save({name: t for name, t in state.items() if "stages.3" not in name}, tmp_path / "model.pth")
    with pytest.raises(CannotExpress, match=r"this checkpoint has \(1, 1, 1\) and 64"):
        load(tmp_path / "model.pth", num_attention_heads=4)


def test_gray_images(tmp_path: Path) -> None:
    model = small("r/4")
    save(model, tmp_path / "model.safetensors")
    gray = load(tmp_path / "model.safetensors", num_channels=1)
    assert gray.patch_embedding.stem.root.conv.weight.shape[1] == 1
    assert gray(pixels(1, 1, 64, 64)).shape == (1, 5)
