"""The authors' initialisation, from their published code (the paper only says that new heads are zero)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitkit.model.parts.layers import KeylessQKV
from vitkit.model.parts.pools import LearnedQuery, Map
from vitkit.model.parts.positions import PositionEmbedding, TwoD
from vitkit.model.parts.relative import Mixed, Offsets


def lecun_normal_(weight: Tensor) -> None:
    """Fill with a normal of variance 1 / fan_in, truncated at two standard deviations, rescaled to that variance."""
    std = math.sqrt(1 / weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def mixed_frequencies(heads: int, pairs: int) -> Tensor:
    """Draw the frequencies of one layer of RoPE-ViT mixed: two axes at right angles, turned at random in every head.

    Returns:
        [2, heads, pairs]: by column and by row.
    """
    size = 10.0 ** -(torch.arange(pairs // 2) / (pairs // 2))  # [pairs / 2]
    angle = 2 * math.pi * torch.rand(heads, 1)
    both = [torch.cat([size * wave(angle), size * wave(angle + math.pi / 2)], dim=1) for wave in (torch.cos, torch.sin)]
    return torch.stack(both)


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Initialise in place: patch kernel LeCun normal, kernels Xavier uniform, MLP biases normal 1e-6, positions normal
    0.02, class token and head zero. Parts of other papers are initialised as their authors do.

    Args:
        model: a ViT.
    """
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if isinstance(module, nn.Conv2d):
            lecun_normal_(module.weight)
        elif isinstance(module, PositionEmbedding | Offsets):
            nn.init.normal_(module.table, std=0.02)
        elif isinstance(module, TwoD):
            for table in module.parameters():
                nn.init.normal_(table, std=0.02)
        elif isinstance(module, Mixed):
            module.frequencies.copy_(mixed_frequencies(*module.frequencies.shape[1:]))
        elif isinstance(module, Map):
            std = module.query.shape[2] ** -0.5
            nn.init.trunc_normal_(module.query, std=std, a=-2 * std, b=2 * std)
        elif isinstance(module, LearnedQuery):
            nn.init.normal_(module.query, std=0.02)
        elif isinstance(module, nn.Linear):
            if kind in ("qkv", "kv"):  # several kernels in one tensor: each has its own fan
                for kernel in module.weight.chunk(len(kind)):
                    nn.init.xavier_uniform_(kernel)
            elif name.startswith("head"):
                nn.init.zeros_(module.weight)
            elif kind == "pre_logits":
                lecun_normal_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight)
        if isinstance(module, KeylessQKV):
            nn.init.zeros_(module.bias_q)
            nn.init.zeros_(module.bias_v)
        elif isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            if kind in ("fc1", "fc2"):
                nn.init.normal_(module.bias, std=1e-6)
            else:
                nn.init.zeros_(module.bias)
    for name, parameter in model.named_parameters(recurse=False):
        if name == "class_token":
            nn.init.zeros_(parameter)
        else:  # register tokens
            nn.init.normal_(parameter, std=0.02)
