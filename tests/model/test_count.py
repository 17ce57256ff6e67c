"""Counting from the configuration equals counting the model and watching it run."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitkit import ViT, ViTConfig
from vitkit.model.config import VARIANTS
from vitkit.model.count import flops, parameters

ODD = ViTConfig(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=100,
    image_size=(64, 32),
    patch_size=8,
    num_channels=1,
    num_classes=7,
)
CONFIGS = {
    "ti/16": VARIANTS["vit-ti/16"],
    "odd": ODD,
    "no head, no qkv bias": dataclasses.replace(ODD, num_classes=0, qkv_bias=False),
    "registers, layer scale": dataclasses.replace(ODD, num_register_tokens=4, layer_scale=0.1),
    "pre-logits": dataclasses.replace(ODD, pre_logits=True),
    "pruned": dataclasses.replace(ODD, pruned_heads=((0, (1, 2)), (2, (0,)))),
    "no class token": dataclasses.replace(ODD, class_token=False, pool="mean"),
    "patches alone have positions": dataclasses.replace(ODD, prefix_positions=False),
    "padded": dataclasses.replace(ODD, image_size=(60, 30), pad_input=True),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_counts(config: ViTConfig) -> None:
    with torch.device("meta"), torch.no_grad():
        model, x = ViT(config).eval(), torch.empty(1, config.num_channels, *config.image_hw)
        with FlopCounterMode(display=False) as counter:
            model.classify(model.read(model.encode(x)))  # all tokens of all blocks, as the field counts
    assert parameters(config) == sum(p.numel() for p in model.parameters())
    assert flops(config) == counter.get_total_flops()
