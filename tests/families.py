"""Tiny models with the parts of well-known families: what tests of several rooms run on."""

from __future__ import annotations

from typing import Any

FAMILIES: dict[str, dict[str, Any]] = {
    "clip": {"norms": ("final", "first"), "without_bias": ("patches",), "hidden_act": "quick_gelu"},
    "siglip": {"class_token": False, "pool": "map", "hidden_act": "gelu_tanh"},
    "dinov3": {
        "positions": "none",
        "relative": "dinov3",
        "num_register_tokens": 4,
        "layer_scale": 1.0,
        "without_bias": ("keys",),
        "hidden_act": "swiglu",
    },
    "beit": {
        "positions": "none",
        "relative": "bias",
        "without_bias": ("keys",),
        "layer_scale": 0.1,
        "pool": "mean",
        "norm_after_pool": True,
    },
    "eva02": {
        "relative": "eva02",
        "relative_grid": (4, 4),
        "norms": ("final", "heads", "hidden"),
        "without_bias": ("keys",),
        "hidden_act": "swiglu",
    },
    "aimv2": {
        "norm": "rms",
        "norms": ("final", "patches"),
        "without_bias": ("out", "mlp"),
        "qkv_bias": False,
        "hidden_act": "swiglu",
        "class_token": False,
        "pool": "mean",
    },
    "deit": {"num_register_tokens": 1, "pool": "distilled"},
    "parallel": {"block": "parallel", "norms": ("final", "first", "queries"), "norm": "rms"},
    "rope-mixed": {"relative": "mixed", "block": "res-post-norm"},
    "offsets": {"positions": "none", "relative": "offsets", "pool": "mean"},
    "2d-every": {"positions": "2d", "positions_in": "every"},
    "sincos-shared": {"positions": "sincos", "positions_in": "shared", "pool": "cls+mean"},
}
