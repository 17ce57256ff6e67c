"""timm's architecture names, and what they tell that the tensors do not: heads, the form of GELU, the order of norms.

Names are listed without the image size at their end, unless it matters. An unlisted name tells nothing.
"""

from __future__ import annotations

import re
from typing import Any

from vitkit.errors import CannotExpress

# (width, heads) -> architectures. The width guards against a file that keeps the name but changes the model.
HEADS: dict[tuple[int, int], str] = {
    (64, 2): "test_vit test_vit2",
    (192, 3): "deit_tiny_patch16 vit_tiny_patch16",
    (256, 4): "vit_wee_patch16_reg1_gap",
    (320, 5): "vit_little_patch16_reg1_gap vit_little_patch16_reg4_gap",
    (384, 6): (
        "deit3_small_patch16 deit_small_patch16 flexivit_small vit_small_patch14_dinov2 "
        "vit_small_patch14_reg4_dinov2 vit_small_patch16 vit_small_patch16_36x1 vit_small_patch32 "
        "vit_small_patch8"
    ),
    (512, 8): (
        "deit3_medium_patch16 vit_medium_patch16_gap vit_medium_patch16_reg1_gap vit_medium_patch16_reg4_gap "
        "vit_mediumd_patch16_reg4_gap"
    ),
    (640, 10): "vit_betwixt_patch16_gap vit_betwixt_patch16_reg1_gap vit_betwixt_patch16_reg4_gap",
    (768, 12): (
        "deit3_base_patch16 deit_base_patch16 flexivit_base vit_base_patch14_dinov2 "
        "vit_base_patch14_reg1_tipsv2 vit_base_patch14_reg4_dinov2 vit_base_patch16 vit_base_patch16_224_miil "
        "vit_base_patch16_reg4_gap vit_base_patch16_siglip_gap vit_base_patch32 vit_base_patch32_siglip_gap "
        "vit_base_patch8"
    ),
    (768, 16): "vit_base_patch16_gap",
    (832, 13): "vit_so150m2_patch16_reg1_gap",
    (896, 14): "vit_base_patch16_plus vit_base_patch32_plus vit_so150m_patch16_reg4_gap",
    (1024, 16): (
        "deit3_large_patch16 eva_large_patch14 flexivit_large vit_large_patch14 vit_large_patch14_dinov2 "
        "vit_large_patch14_reg1_tipsv2 vit_large_patch14_reg4_dinov2 vit_large_patch16 "
        "vit_large_patch16_siglip_gap vit_large_patch32"
    ),
    (1152, 16): "vit_so400m_patch14_reg1_tipsv2 vit_so400m_patch14_siglip_gap vit_so400m_patch16_siglip_gap",
    (1280, 16): "deit3_huge_patch14 vit_huge_patch14 vit_huge_patch14_gap vit_huge_patch16_gap",
    (1408, 16): "vit_giant_patch14 vit_giant_patch16_gap",
    (1536, 16): "vit_giantopt_patch16_siglip_gap",
    (1664, 16): "vit_gigantic_patch14",
}
TANH = (
    "vit_base_patch32_siglip_gap vit_large_patch16_siglip_gap_512 vit_so400m_patch16_siglip_gap "
    "vit_giantopt_patch16_siglip_gap"
)
# Architectures whose tensors can look like those of the paper: regular expression -> what is different.
OTHERS = {
    r"_rpn_": "LayerNorms at the end of each residual branch (residual post-norm)",
    r"^eva02_enormous": "LayerNorms after each branch (post-norm)",
    r"_rope_|_dinov3|^eva02_|^vit_pe_": "rotary positions",
}


def refuse(name: str) -> None:
    """Raise CannotExpress if an architecture's name says that its tensors do not mean what they seem to."""
    for pattern, what in OTHERS.items():
        if re.search(pattern, name):
            raise CannotExpress(
                f"config.json names the architecture {name!r}, which has {what}; vitkit does not support that."
            )


def facts(name: str, width: Any) -> dict[str, Any]:
    """Return the fields of ViTConfig that an architecture's name tells.

    Args:
        name: timm's name, such as `vit_base_patch16_224`.
        width: the width that config.json states; None if it does not.
    """
    names = {name, re.sub(r"_\d+$", "", name)}
    for (known, heads), architectures in HEADS.items():
        if names & set(architectures.split()) and width in (known, None):
            tanh = names & set(TANH.split())
            return {"num_attention_heads": heads, "hidden_act": "gelu_tanh" if tanh else "gelu"}
    return {}
