"""The norm, ACTIVATIONS, the patch projection, what later work does to a residual branch, and POOLS."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.model.config import ViTConfig


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x), the activation of OpenAI's CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply it element by element."""
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "silu": nn.SiLU,
}


def norm(c: ViTConfig) -> nn.LayerNorm:
    """Return a new LN of the model's width and epsilon."""
    return nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)


class PatchProjection(nn.Conv2d):
    """E of Eq. 1, stored as the kernel of a convolution with stride P, as all public checkpoints store it.

    Such a convolution is one matrix product over flattened patches, and it is computed as one: libraries' convolutions
    are slower in the backward pass, and some runtimes' are inaccurate in 8 bits.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, D, H/P, W/P], H and W being multiples of P."""
        (B, C, H, W), P = x.shape, self.kernel_size[0]
        x = x.reshape(B, C, H // P, P, W // P, P).permute(0, 2, 4, 1, 3, 5)  # [B, H/P, W/P, C, P, P]
        return F.linear(x.flatten(3), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class Residual(nn.Module):
    """Layer scale and stochastic depth, applied to a branch before it is added back. The paper has neither."""

    def __init__(self, c: ViTConfig, layer: int) -> None:
        super().__init__()
        self.rate = c.drop_path_rate * layer / max(c.num_hidden_layers - 1, 1)
        self.gamma = None if c.layer_scale is None else nn.Parameter(torch.full((c.hidden_size,), c.layer_scale))

    def forward(self, branch: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        if self.gamma is not None:
            branch = branch * self.gamma
        if self.training and self.rate > 0:
            branch = branch * drop_path(len(branch), self.rate, branch.device)[:, None, None].to(branch.dtype)
        return branch


def drop_path(images: int, rate: float, device: torch.device) -> Tensor:
    """Draw what stochastic depth multiplies each image's branch by: 0, or 1 / (1 - rate). [B]"""
    keep = 1 - rate
    return (torch.rand(images, device=device) < keep) / max(keep, 1e-6)


class ClassToken(nn.Module):
    """The class token: the paper's choice."""

    rows: slice | None = slice(0, 1)

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.prefix = c.num_prefix_tokens

    def forward(self, z: Tensor, weight: Tensor | None = None) -> Tensor:
        """[B, rows, D] -> [B, D]."""
        return z[:, 0]


class Mean(ClassToken):
    """The mean of the patches."""

    rows = None

    def forward(self, z: Tensor, weight: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, D].

        Args:
            z: all tokens.
            weight: [B, T, 1], how much each token counts (default: all patches count the same).
        """
        z = z[:, self.prefix :]
        if weight is None:
            return z.mean(1)
        weight = weight[:, self.prefix :]
        return (z * weight).sum(1) / weight.sum(1)


# What y of Eq. 4 is made of. `rows` are the tokens that a pool reads; the last block computes no others.
POOLS: dict[str, type[ClassToken]] = {"cls": ClassToken, "mean": Mean}
