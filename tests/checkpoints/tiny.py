"""Small models with every weight random, so that a tensor in the wrong place shows."""

from __future__ import annotations

from typing import Any

import torch

from vitkit import ViT, ViTConfig
from vitkit.checkpoints import DIALECTS
from vitkit.checkpoints.capabilities import cannot

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 5,
}


def config(**fields: Any) -> ViTConfig:
    return ViTConfig(**{**SHAPE, **fields})


def model(seed: int = 0, **fields: Any) -> ViT:
    generator = torch.Generator().manual_seed(seed)
    result = ViT(config(**fields)).eval()
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            parameter.normal_(std=0.3, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return result


def pixels(m: ViT, seed: int = 1) -> torch.Tensor:
    return torch.randn(2, m.config.num_channels, *m.config.image_hw, generator=torch.Generator().manual_seed(seed))


def same_tensors(a: ViT, b: ViT) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return set(mine) == set(other) and all(torch.equal(mine[name], other[name]) for name in mine)


def through(m: ViT, *dialects: str) -> ViT:
    """The model that arrives through files of these dialects. Its outputs are the same; where a dialect has no position
    for the class token, the token holds it, and where a dialect must have one, it is zero."""
    config, state = m.config, dict(m.state_dict())
    for dialect in dialects if config.class_token else ():
        had, config = config.prefix_positions, DIALECTS[dialect].written(config)
        if had and not config.prefix_positions:
            table = state["positions.table"]
            state |= {"class_token": state["class_token"] + table[:, :1], "positions.table": table[:, 1:]}
        elif config.prefix_positions and not had:
            state["positions.table"] = torch.nn.functional.pad(state["positions.table"], (0, 0, 1, 0))
    result = ViT(config).eval()
    result.load_state_dict(state)
    return result


def destination(dialect: str, stem: str = "model") -> str:
    return stem + DIALECTS[dialect].suffixes[0]


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return float(((ours - theirs).abs().max() / ours.abs().max()).detach())


CLIP: dict[str, Any] = {
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "norms": ("final", "first"),
    "without_bias": ("patches", "head"),
    "position_resize": "huggingface",
}
SIGLIP: dict[str, Any] = {
    "hidden_act": "gelu_tanh",
    "layer_norm_eps": 1e-6,
    "class_token": False,
    "position_resize": "huggingface",
}
DINOV3: dict[str, Any] = {
    "layer_norm_eps": 1e-5,
    "layer_scale": 0.5,
    "num_register_tokens": 3,
    "without_bias": ("keys",),
    "positions": "none",
    "relative": "dinov3",
    "num_classes": 0,
    "position_resize": "huggingface",
}
BEIT: dict[str, Any] = {
    "pool": "mean",
    "norm_after_pool": True,
    "layer_scale": 0.5,
    "without_bias": ("keys",),
    "positions": "none",
    "relative": "bias",
    "position_resize": "huggingface",
}
AIMV2: dict[str, Any] = {
    "hidden_act": "swiglu",
    "layer_norm_eps": 1e-5,
    "norm": "rms",
    "norms": ("final", "patches"),
    "without_bias": ("out", "mlp"),
    "qkv_bias": False,
    "class_token": False,
    "pool": "aimv2",
    "num_classes": 0,
    "position_resize": "huggingface",
}
# One model for each dialect that it can express, and rows that use what only some dialects have.
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "backbone": {"num_classes": 0},
    "pre-logits": {"pre_logits": True},
    "pooler": {"pre_logits": True, "num_classes": 0},
    "dinov2": {"num_classes": 0, "layer_scale": 0.5},
    "registers": {"num_classes": 0, "layer_scale": 0.5, "num_register_tokens": 3},
    "patches alone have positions": {"prefix_positions": False},
    "mean": {"pool": "mean", "norm_after_pool": True},
    "mean, norm first": {"pool": "mean"},
    "no class token": {"class_token": False, "pool": "mean"},
    "no qkv bias": {"qkv_bias": False},
    "gray": {"num_channels": 1},
    "wide image": {"image_size": (16, 32)},
    "tanh": {"hidden_act": "gelu_tanh", "layer_norm_eps": 1e-5},
    "deit": {"num_register_tokens": 1},
    "deit with teacher": {"num_register_tokens": 1, "pool": "distilled"},
    "dinov2 classifier": {"layer_scale": 0.5, "pool": "cls+mean"},
    "dinov2 giant": {"num_classes": 0, "layer_scale": 0.5, "hidden_act": "swiglu", "intermediate_size": 48},
    "clip": {**CLIP, "num_classes": 0, "without_bias": ("patches",)},
    "clip projected": CLIP,
    "siglip": {**SIGLIP, "pool": "map", "num_classes": 0},
    "siglip 2": {**SIGLIP, "pool": "map", "num_classes": 0, "position_resize": "siglip2"},
    "siglip classifier": {**SIGLIP, "pool": "mean"},
    "dinov3": DINOV3,
    "dinov3 gated": {**DINOV3, "hidden_act": "swiglu"},
    "aimv2": AIMV2,
    "aimv2 without a head": {**AIMV2, "pool": "mean"},
    "beit": {**BEIT, "num_classes": 0},
    "beit classifier": BEIT,
    "beit, class token": {**BEIT, "pool": "cls", "norm_after_pool": False, "positions": "1d", "relative": "none"},
    "data2vec": {**BEIT, "num_classes": 0, "norms": (), "norm_after_pool": False},
}


def expressible(config: ViTConfig) -> list[str]:
    return [name for name in DIALECTS if not cannot(config, name)]
