"""timm's architecture names, and what they tell that the tensors do not: heads, activation, epsilon, the order of
norms, the kind of rotation and its grid, pooling.

Names are listed without the image size at their end. An unlisted name tells nothing.
"""

from __future__ import annotations

import re
from typing import Any

from vitkit.errors import CannotExpress

# (width, heads) -> architectures. The width guards against a file that keeps the name but changes the model.
HEADS: dict[tuple[int, int], str] = {
    (64, 2): "test_vit test_vit2",
    (96, 3): "test_vit3 test_vit4",
    (192, 3): (
        "deit_tiny_distilled_patch16 deit_tiny_patch16 eva02_tiny_patch14 vit_pe_core_tiny_patch16 "
        "vit_pe_spatial_tiny_patch16 vit_tiny_patch16 vit_tiny_patch16_dinov3_qkvb vit_tiny_r_s16_p8"
    ),
    (256, 4): "vit_pwee_patch16_reg1_gap vit_wee_patch16_reg1_gap vit_xsmall_patch16_clip",
    (320, 5): "vit_little_patch16_reg1_gap vit_little_patch16_reg4_gap",
    (384, 6): (
        "deit3_small_patch16 deit_small_distilled_patch16 deit_small_patch16 eva02_small_patch14 flexivit_small "
        "vit_pe_core_small_patch16 vit_pe_spatial_small_patch16 vit_small_patch14_dinov2 "
        "vit_small_patch14_reg4_dinov2 vit_small_patch16 vit_small_patch16_36x1 vit_small_patch16_dinov3 "
        "vit_small_patch16_dinov3_qkvb vit_small_patch16_lingbot vit_small_patch16_rope "
        "vit_small_patch16_rope_ape vit_small_patch16_rope_mixed vit_small_patch16_rope_mixed_ape "
        "vit_small_patch32 vit_small_patch8 vit_small_plus_patch16_dinov3 vit_small_plus_patch16_dinov3_qkvb "
        "vit_small_r26_s32"
    ),
    (512, 8): (
        "deit3_medium_patch16 vit_medium_patch16_clip vit_medium_patch16_gap vit_medium_patch16_reg1_gap "
        "vit_medium_patch16_reg4_gap vit_medium_patch16_rope_reg1_gap vit_medium_patch32_clip "
        "vit_mediumd_patch16_reg4_gap vit_mediumd_patch16_rope_reg1_gap"
    ),
    (640, 10): (
        "vit_betwixt_patch16_gap vit_betwixt_patch16_reg1_gap vit_betwixt_patch16_reg4_gap "
        "vit_betwixt_patch16_rope_reg4_gap vit_betwixt_patch32_clip"
    ),
    (768, 12): (
        "beit3_base_patch16 beit_base_patch16 beitv2_base_patch16 deit3_base_patch16 deit_base_distilled_patch16 "
        "deit_base_patch16 eva02_base_patch14 eva02_base_patch16_clip flexivit_base vit_base_patch14_dinov2 "
        "vit_base_patch14_reg1_tipsv2 vit_base_patch14_reg4_dinov2 vit_base_patch16 vit_base_patch16_224_miil "
        "vit_base_patch16_clip vit_base_patch16_clip_quickgelu vit_base_patch16_dinov3 "
        "vit_base_patch16_dinov3_qkvb vit_base_patch16_lingbot vit_base_patch16_reg4_gap vit_base_patch16_rope "
        "vit_base_patch16_rope_ape vit_base_patch16_rope_mixed vit_base_patch16_rope_mixed_ape "
        "vit_base_patch16_rope_reg1_gap vit_base_patch16_rpn vit_base_patch16_siglip vit_base_patch16_siglip_gap "
        "vit_base_patch16_xp vit_base_patch32 vit_base_patch32_clip vit_base_patch32_clip_quickgelu "
        "vit_base_patch32_siglip vit_base_patch32_siglip_gap vit_base_patch8 vit_pe_core_base_patch16 "
        "vit_pe_spatial_base_patch16 vit_base_r26_s32 vit_base_r50_s16"
    ),
    (768, 16): "vit_base_patch16_gap",
    (832, 13): "vit_so150m2_patch16_reg1_gap",
    (896, 14): (
        "vit_base_patch16_plus vit_base_patch16_plus_clip vit_base_patch32_plus vit_so150m_patch16_reg4_gap "
        "vit_so150m_patch16_reg4_map"
    ),
    (1024, 8): "aimv2_large_patch14",
    (1024, 16): (
        "beit3_large_patch16 beit_large_patch16 beitv2_large_patch16 deit3_large_patch16 eva02_large_patch14 "
        "eva02_large_patch14_clip eva_large_patch14 flexivit_large vit_intern300m_patch14 vit_large_patch14 "
        "vit_large_patch14_clip vit_large_patch14_clip_quickgelu vit_large_patch14_dinov2 "
        "vit_large_patch14_reg1_tipsv2 vit_large_patch14_reg4_dinov2 vit_large_patch14_xp vit_large_patch16 "
        "vit_large_patch16_dinov3 vit_large_patch16_dinov3_qkvb vit_large_patch16_lingbot vit_large_patch16_rope "
        "vit_large_patch16_rope_ape vit_large_patch16_rope_mixed vit_large_patch16_rope_mixed_ape "
        "vit_large_patch16_siglip vit_large_patch16_siglip_gap vit_large_patch32 vit_pe_core_large_patch14 "
        "vit_large_r50_s32 vit_pe_lang_large_patch14 vit_pe_spatial_large_patch14"
    ),
    (1152, 16): (
        "vit_so400m_patch14_reg1_tipsv2 vit_so400m_patch14_siglip vit_so400m_patch14_siglip_gap "
        "vit_so400m_patch16_siglip vit_so400m_patch16_siglip_gap"
    ),
    (1280, 16): (
        "deit3_huge_patch14 vit_huge_patch14 vit_huge_patch14_clip vit_huge_patch14_clip_quickgelu "
        "vit_huge_patch14_gap vit_huge_patch14_xp vit_huge_patch16_gap"
    ),
    (1280, 20): "vit_huge_plus_patch16_dinov3 vit_huge_plus_patch16_dinov3_qkvb",
    (1408, 16): (
        "beit3_giant_patch14 eva_giant_patch14 eva_giant_patch14_clip vit_giant_patch14 vit_giant_patch14_clip "
        "vit_giant_patch16_gap"
    ),
    (1536, 12): "aimv2_huge_patch14",
    (1536, 16): (
        "vit_giantopt_patch16_siglip vit_giantopt_patch16_siglip_gap vit_pe_core_gigantic_patch14 "
        "vit_pe_lang_gigantic_patch14 vit_pe_spatial_gigantic_patch14"
    ),
    (1536, 24): (
        "vit_giant_patch14_dinov2 vit_giant_patch14_reg1_tipsv2 vit_giant_patch14_reg4_dinov2 vit_giant_patch16_lingbot"
    ),
    (1664, 16): "vit_gigantic_patch14 vit_gigantic_patch14_clip vit_gigantic_patch14_clip_quickgelu",
    (1792, 16): "eva02_enormous_patch14_clip",
    (2048, 16): "aimv2_1b_patch14",
    (3072, 24): "aimv2_3b_patch14",
    (4096, 32): "vit_7b_patch16_dinov3",
}
_EVA02: dict[str, Any] = {
    "hidden_act": "swiglu",
    "without_bias": ("keys",),
    "relative": "eva02",
    "relative_grid": (16, 16),
}
_ROTARY: dict[str, Any] = {"positions": "none", "relative": "eva02", "relative_grid": (16, 16)}
_DINOV3: dict[str, Any] = {"positions": "none", "relative": "dinov3", "layer_norm_eps": 1e-5}
_CLIP: dict[str, Any] = {"norms": ("final", "first"), "without_bias": ("patches",), "layer_norm_eps": 1e-5}
_CORE: dict[str, Any] = {"pool": "map", "pool_heads": 8, "pool_prefix": True}
# Regular expression -> the fields that the names it finds have besides the paper's; later rows add to earlier ones.
FAMILIES: dict[str, dict[str, Any]] = {
    # vision_transformer
    r"^aimv2_": {
        "norm": "rms",
        "norms": ("final", "patches"),
        "without_bias": ("out", "mlp"),
        "hidden_act": "swiglu",
        "layer_norm_eps": 1e-5,
    },
    r"^beit3_": {"norms": ("final", "heads", "hidden"), "layer_norm_eps": 1e-5},
    r"^vit_\w+_clip_(quickgelu_)?\d": _CLIP,
    r"_quickgelu_": {"hidden_act": "quick_gelu"},
    r"_siglip_\d|_reg4_map_|^test_vit3$": {"pool": "map"},
    r"^test_vit3$": {"pool_prefix": True},
    r"^test_vit4$": {"norm": "rms"},
    r"_base_patch32_siglip_|_large_patch16_siglip_(gap_)?512|_so400m_patch16_siglip_|_giantopt_": {
        "hidden_act": "gelu_tanh"
    },
    r"^vit_giant_patch14_(reg\d_)?(dinov2|tipsv2)": {"hidden_act": "swiglu"},
    r"^vit_intern300m_": {"norms": ()},
    r"_rpn_": {"block": "res-post-norm"},
    r"_xp_|^vit_pwee_": {"block": "parallel"},
    r"_xp_": {"norm": "rms", "norms": ("final", "first", "queries"), "without_bias": ("patches",)},
    # deit
    r"_distilled_": {"pool": "distilled"},
    # beit
    r"^beit(v2)?_": {"without_bias": ("keys",), "positions": "none", "relative": "bias"},
    # eva
    r"^eva_giant_": {"without_bias": ("keys",)},
    r"^eva02_enormous_": {"without_bias": ("keys",), "block": "res-post-norm"},
    r"^eva02_(tiny|small|base|large)_": _EVA02,
    r"^eva02_(base|large)_": {"norms": ("final", "hidden")},
    r"^eva02_(base|large)_\w+_clip_": {"norms": ("final", "heads", "hidden")},
    r"_dinov3|_lingbot": _DINOV3,
    r"_dinov3": {"pool": "mean"},
    r"_dinov3_qkvb|_(small|base|large)_patch16_lingbot": {"without_bias": ("keys",)},
    r"_(plus|7b)_patch16_dinov3|_giant_patch16_lingbot": {"hidden_act": "swiglu"},
    r"_rope_(ape_)?224": {"relative": "axial"},
    r"_rope_mixed_": {"relative": "mixed"},
    r"_rope_(mixed_)?224": {"positions": "none"},
    r"_rope_reg\d_gap_": _ROTARY,
    r"_(base|betwixt|medium)_patch16_rope_reg\d_gap_": {"without_bias": ("keys",)},
    r"^vit_pe_": {**_CLIP, "relative": "perception", "relative_grid": (32, 32)},
    r"^vit_pe_\w+_gigantic_": {"relative": "perception-g"},
    r"^vit_pe_(lang|spatial)_": {"norms": ("first",), "pool": "mean"},
    r"^vit_pe_core_": _CORE,
    r"^vit_pe_core_gigantic_": {"pool_intermediate_size": 6144},
    r"^vit_pe_core_\w+_384": {"relative_grid": (24, 24)},
    r"^vit_pe_core_large_": {"relative_grid": (24, 24)},
    r"^vit_pe_core_base_": {"relative_grid": (14, 14)},
}
# Architectures that vitkit does not have, and whose tensors do not always say so.
OTHERS = {
    r"_18x2_": "two branches side by side in each block",
    r"^vit_d(little|pwee|wee)_": "differential attention",
    r"_sapiens2": "grouped keys and values, or layer scale on attention only (Sapiens2)",
}


def refuse(name: str) -> None:
    """Raise CannotExpress if an architecture's name says that vitkit does not have it."""
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
            found: dict[str, Any] = {"num_attention_heads": heads, "hidden_act": "gelu"}
            for pattern, fields in FAMILIES.items():
                if re.search(pattern, name):
                    found |= fields
            return found
    return {}
