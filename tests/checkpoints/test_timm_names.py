"""All architectures of timm's `vision_transformer`, `deit`, `eva` and `beit`: equal, or refused by a true sentence.

Models are cut to one block and a few patches; widths, heads, activations and norms are timm's own.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import tiny
from tests.peers import peer
from vitkit.checkpoints import load, save
from vitkit.checkpoints.architectures import FAMILIES as FAMILY_ROWS
from vitkit.checkpoints.architectures import OTHERS, facts
from vitkit.checkpoints.dialects import to_dialect
from vitkit.errors import CheckpointError, VitkitError
from vitkit.model.count import parameters

BAR = 1e-5
# What a refusal says -> how to see in timm's model that it is true.
REASONS: dict[str, Any] = {
    r"two branches side by side": lambda m: "ParallelThings" in type(m.blocks[0]).__name__,
    r"differential attention": lambda m: any("lambda_q1" in name for name, _ in m.named_parameters()),
    r"grouped keys and values": lambda m: any("sapiens" in str(m.pretrained_cfg.get("architecture")) for _ in "1"),
    r"multiple of the patch size 14; this file states 48 x 48": lambda m: m.patch_embed.grid_size == (3, 3),
}
# Those that earlier versions loaded with other outputs, and one of each kind that is refused.
WRONG = (
    *("vit_base_patch16_rpn_224", "vit_base_patch16_gap_224", "test_vit", "test_vit2"),
    *("vit_base_patch32_siglip_gap_256", "vit_large_patch16_siglip_gap_512", "vit_so400m_patch16_siglip_gap_256"),
    *("vit_so400m_patch16_siglip_gap_384", "vit_so400m_patch16_siglip_gap_512"),
    *("vit_giantopt_patch16_siglip_gap_256", "vit_giantopt_patch16_siglip_gap_384"),
)
SOME = (
    *WRONG,
    *("vit_tiny_patch16_224", "deit3_small_patch16_224", "vit_small_patch14_reg4_dinov2", "flexivit_small"),
    *("vit_wee_patch16_reg1_gap_256", "vit_base_patch16_224_miil", "vit_so400m_patch14_siglip_gap_384", "test_vit3"),
    *("test_vit4", "vit_small_patch16_18x2_224", "vit_pwee_patch16_reg1_gap_256", "vit_dwee_patch16_reg1_gap_256"),
    *("vit_xsmall_patch16_clip_224", "deit_tiny_distilled_patch16_224", "vit_intern300m_patch14_448"),
)
# One of each family, with its structure in timm's files.
FAMILIES = (
    *("vit_base_patch32_clip_quickgelu_224", "vit_base_patch16_siglip_224", "aimv2_large_patch14_224"),
    *("beit_base_patch16_224", "beit3_base_patch16_224", "vit_base_patch16_xp_224", "vit_pwee_patch16_reg1_gap_256"),
    *("eva02_tiny_patch14_224", "eva02_base_patch14_224", "eva02_base_patch16_clip_224"),
    *("vit_tiny_patch16_dinov3_qkvb", "vit_small_plus_patch16_dinov3", "vit_small_patch16_rope_ape_224"),
    *("vit_small_patch16_rope_mixed_224", "vit_medium_patch16_rope_reg1_gap_256", "vit_pe_core_tiny_patch16_384"),
    *("vit_pe_spatial_tiny_patch16_512", "deit_tiny_distilled_patch16_224", "test_vit3"),
)


def small(name: str) -> Any:
    """timm's model with random weights, one block, and images of three patches that leave as many pixels over."""
    patch, size = (int((re.search(p, name) or [0, d])[1]) for p, d in ((r"patch(\d+)", 16), (r"_(\d{3})(?:_|$)", 224)))
    side = 3 * patch + size % patch
    model = peer("timm").create_model(
        name, depth=1, num_classes=5, img_size=side, pretrained_cfg_overlay={"input_size": (3, side, side)}
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(std=0.05, generator=generator))
    return model.eval()


def verdict(name: str, folder: Path) -> str:
    """`equal`, or the reason for which loading is refused, which is true; anything else fails."""
    theirs = small(name)
    peer("timm").models.save_for_hf(theirs, folder / name, safe_serialization=True)
    try:
        ours, said = load(folder / name), ""
    except VitkitError as error:
        ours, said = None, str(error)
    if ours is None:
        reasons = [reason for reason in REASONS if re.search(reason, said)]
        assert reasons, f"{name}: {said}"
        assert REASONS[reasons[0]](theirs), f"{name}: {said}"
        return reasons[0]
    x = torch.randn(2, 3, *ours.config.image_hw, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        difference = tiny.difference(ours(x), theirs(x))
    assert difference <= BAR, f"{name}: {difference:.1e}"
    return "equal"


@pytest.mark.parametrize("name", SOME)
def test_some_names(name: str, tmp_path: Path) -> None:
    found = verdict(name, tmp_path)
    if name in WRONG:
        assert found == "equal"


@pytest.mark.parametrize("name", FAMILIES)
def test_one_of_each_family(name: str, tmp_path: Path) -> None:
    """Equal by name; attention sums to one; timm reads what we write; without a name the file is refused."""
    assert verdict(name, tmp_path) == "equal"
    ours, theirs = load(tmp_path / name), small(name)
    x = torch.randn(2, 3, *ours.config.image_hw, generator=torch.Generator().manual_seed(1))
    (A,) = ours.attention(x).values()
    torch.testing.assert_close(A.sum(-1), torch.ones_like(A.sum(-1)))
    assert parameters(ours.config) == sum(p.numel() for p in ours.parameters())
    theirs.load_state_dict(to_dialect(ours, "timm"))
    assert tiny.difference(theirs(x), ours(x)) <= BAR
    save(ours, tmp_path / "ours.safetensors", "timm")
    again = load(tmp_path / "ours.safetensors")
    assert again.config == dataclasses.replace(ours.config, initializer_range=again.config.initializer_range)
    assert torch.equal(again(x), ours(x))
    torch.save(theirs.state_dict(), tmp_path / "bare.pth")
    if "distilled" not in name:  # whose tensors tell everything but the heads
        with pytest.raises(CheckpointError, match=r"config\.json next to it|nothing next to it says"):
            load(tmp_path / "bare.pth", num_attention_heads=ours.config.num_attention_heads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "equal"), [(("vision_transformer", "deit"), 168), (("eva",), 60), (("beit",), 7)], ids=str
)
def test_all_names(modules: tuple[str, ...], equal: int, tmp_path: Path) -> None:
    timm, found = peer("timm"), Counter()
    for name in [name for module in modules for name in timm.list_models(module=module)]:
        if re.search("7b|sapiens2|giant|gigantic|enormous|huge|3b|1b", name):
            continue  # `python -m benchmarks.proof` has them
        found[verdict(name, tmp_path)] += 1
        (tmp_path / name / "model.safetensors").unlink()
    large = sum(
        bool(re.search("7b|giant|gigantic|enormous|huge|3b|1b", name)) and "sapiens2" not in name
        for module in modules
        for name in timm.list_models(module=module)
    )
    whole = sum(found[reason] for reason in REASONS if "multiple" in reason)
    assert found["equal"] + whole + large >= equal, found
    assert set(found) <= {"equal", *REASONS}, found


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "eva02_tiny_patch14_224", "vit_tiny_patch16_dinov3_qkvb"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch about timm's way of resizing BEiT's table
def test_other_image_sizes(name: str, tmp_path: Path) -> None:
    """Loaded for another size, a model is what timm makes of the same file at that size."""
    timm = peer("timm")
    trained = small(name)
    timm.models.save_for_hf(trained, tmp_path, safe_serialization=True)
    size = tuple(n * side for n, side in zip((5, 4), trained.patch_embed.patch_size, strict=True))
    theirs = timm.create_model(name, depth=1, num_classes=5, img_size=size)
    module = importlib.import_module(f"timm.models.{'beit' if 'beit' in name else 'eva'}")
    theirs.load_state_dict(module.checkpoint_filter_fn(trained.state_dict(), theirs))
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    expected = theirs.eval()(x)
    assert tiny.difference(load(tmp_path, image_size=size)(x), expected) <= BAR
    ours = load(tmp_path)
    assert tiny.difference(ours(x), expected) <= BAR  # resized on the way
    ours.set_image_size(size)
    assert tiny.difference(ours(x), expected) <= BAR


def test_every_name_of_the_families_is_in_the_table() -> None:
    """timm may add names; then this says which, and their files are refused or noted until someone has looked."""
    names = [
        name
        for module in ("vision_transformer", "deit", "eva", "beit")
        for name in peer("timm").list_models(module=module)
    ]
    unknown = [name for name in names if not facts(name, None) and not any(re.search(p, name) for p in OTHERS)]
    assert not unknown
    for pattern in (*FAMILY_ROWS, *OTHERS):
        assert any(re.search(pattern, name) for name in names), pattern


def test_the_size_that_an_error_suggests_works(tmp_path: Path) -> None:
    """timm ignores the pixels that do not fill a patch; at the size of whole patches both are equal."""
    theirs = small("vit_so400m_patch14_siglip_gap_384")
    peer("timm").models.save_for_hf(theirs, tmp_path)
    ours, x = load(tmp_path, image_size=(42, 42)), torch.randn(2, 3, 48, 48)
    with torch.inference_mode():
        assert tiny.difference(ours(x[:, :, :42, :42]), theirs(x)) <= BAR
    assert ours.input_spec.size == (42, 42)
