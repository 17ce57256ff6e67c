"""The authors' initialisation, from their published code (the paper only says that new heads are zero)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitkit.model.parts.positions import PositionEmbedding


def lecun_normal_(weight: Tensor) -> None:
    """Fill with a normal of variance 1 / fan_in, truncated at two standard deviations, rescaled to that variance."""
    std = math.sqrt(1 / weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Initialise in place: patch kernel LeCun normal, kernels Xavier uniform, MLP biases normal 1e-6, positions normal
    0.02, class token and head zero.

    Args:
        model: a ViT.
    """
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if isinstance(module, nn.Conv2d):
            lecun_normal_(module.weight)
        elif isinstance(module, PositionEmbedding):
            nn.init.normal_(module.table, std=0.02)
        elif isinstance(module, nn.Linear):
            if kind == "qkv":  # three kernels in one tensor: each has its own fan
                for kernel in module.weight.chunk(3):
                    nn.init.xavier_uniform_(kernel)
            elif kind == "head":
                nn.init.zeros_(module.weight)
            elif kind == "pre_logits":
                lecun_normal_(module.weight)
            else:
                nn.init.xavier_uniform_(module.weight)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            if kind in ("fc1", "fc2"):
                nn.init.normal_(module.bias, std=1e-6)
            else:
                nn.init.zeros_(module.bias)
    for name, parameter in model.named_parameters(recurse=False):
        if name == "class_token":
            nn.init.zeros_(parameter)
        else:  # register tokens
            nn.init.normal_(parameter, std=0.02)
