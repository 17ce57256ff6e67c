"""All architectures of timm's `vision_transformer` and `deit` modules: equal, or refused in a sentence that is true.

Models are cut to one block and a few patches; widths, heads, activations and norms are timm's own.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import tiny
from tests.peers import peer
from vitkit.checkpoints import load
from vitkit.errors import VitkitError

BAR = 1e-5
# What a refusal says -> how to see in timm's model that it is true.
REASONS: dict[str, Any] = {
    r"has a SwiGLU MLP|\(SwiGLU\)": lambda m: has(m, "SiLU"),
    r"extra LayerNorms inside a block": lambda m: not isinstance(m.blocks[0].attn.norm, torch.nn.Identity),
    r"a MAP head": lambda m: m.attn_pool is not None,
    r"\(RMSNorm\)": lambda m: has(m, "RmsNorm"),
    r"parallel branches": lambda m: "Parallel" in type(m.blocks[0]).__name__,
    r"a LayerNorm before the first block": lambda m: not isinstance(m.norm_pre, torch.nn.Identity),
    r"residual post-norm": lambda m: type(m.blocks[0]).__name__ == "ResPostBlock",
    r"differential attention": lambda m: any("lambda_q1" in name for name, _ in m.named_parameters()),
    r"no LayerNorm after the last block": lambda m: (
        isinstance(m.norm, torch.nn.Identity) and not has_weights(m.fc_norm)
    ),
    r"a distillation token": lambda m: hasattr(m, "dist_token"),
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


def has(model: torch.nn.Module, kind: str) -> bool:
    return any(type(module).__name__ == kind for module in model.modules())


def has_weights(module: torch.nn.Module) -> bool:
    return any(True for _ in module.parameters())


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
        assert found == ("residual post-norm" if "rpn" in name else "equal")


@pytest.mark.slow
def test_all_names(tmp_path: Path) -> None:
    timm = peer("timm")
    names = [*timm.list_models(module="vision_transformer"), *timm.list_models(module="deit")]
    assert len(names) >= 173
    found = Counter()
    for name in names:
        found[verdict(name, tmp_path)] += 1
        (tmp_path / name / "model.safetensors").unlink()
    assert found["equal"] >= 93, found
    assert set(found) == {"equal", *REASONS}, found


def test_the_size_that_an_error_suggests_works(tmp_path: Path) -> None:
    """timm ignores the pixels that do not fill a patch; at the size of whole patches both are equal."""
    theirs = small("vit_so400m_patch14_siglip_gap_384")
    peer("timm").models.save_for_hf(theirs, tmp_path)
    ours, x = load(tmp_path, image_size=(42, 42)), torch.randn(2, 3, 48, 48)
    with torch.inference_mode():
        assert tiny.difference(ours(x[:, :, :42, :42]), theirs(x)) <= BAR
    assert ours.input_spec.size == (42, 42)
