"""Tiny models of every kind that explanations must work on."""

from __future__ import annotations

import torch

from vitkit import ViT, ViTConfig

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 5,
    "layer_norm_eps": 1e-6,
}

KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "mean pool": {"pool": "mean", "class_token": False},
    "mean pool, norm after, class token": {"pool": "mean", "norm_after_pool": True},
    "registers": {"num_register_tokens": 3},
    "layer scale, pre-logits": {"layer_scale": 0.3, "pre_logits": True},
    "pruned": {"pruned_heads": {0: [1], 2: [0, 3]}},
    "one channel, not square, padded": {"num_channels": 1, "image_size": (44, 30), "pad_input": True},
    "not square": {"image_size": (24, 48)},
}


def tiny(kind: str = "plain", **more: object) -> tuple[ViT, torch.Tensor]:
    """A model with weights that do something, and two images."""
    config = ViTConfig(**{**TINY, **KINDS[kind], **more})  # type: ignore[arg-type]
    torch.manual_seed(1)
    model = ViT(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.3)
    return model, torch.randn(2, config.num_channels, *config.image_hw)
