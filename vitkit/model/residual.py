"""What work after the paper does to a residual branch; in a model of the paper it does nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitkit.model.config import ViTConfig


class Residual(nn.Module):
    """What later work does to a branch before it is added back: layer scale and stochastic depth."""

    def __init__(self, c: ViTConfig, layer: int) -> None:
        super().__init__()
        self.rate = c.drop_path_rate * layer / max(c.num_hidden_layers - 1, 1)
        self.gamma = None if c.layer_scale is None else nn.Parameter(torch.full((c.hidden_size,), c.layer_scale))

    def keep(self, images: int, device: torch.device) -> Tensor | None:
        """[B], what stochastic depth multiplies the branch of each image with; None where it does nothing."""
        if not self.training or self.rate == 0:
            return None
        keep = 1 - self.rate
        return (torch.rand(images, device=device) < keep) / max(keep, 1e-6)

    def forward(self, branch: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        if self.gamma is not None:
            branch = branch * self.gamma
        if self.training and self.rate > 0:
            keep = 1 - self.rate
            branch = branch * (torch.rand(len(branch), 1, 1, device=branch.device) < keep) / max(keep, 1e-6)
        return branch
