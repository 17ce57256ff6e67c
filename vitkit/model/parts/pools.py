"""POOLS: what y of Eq. 4 is made of.

`rows` are the tokens that a pool reads; the last block computes no others. `tokens` is how many of them y holds side by
side: the head is that much wider.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.model.config import ViTConfig
from vitkit.model.parts.layers import norm


class ClassToken(nn.Module):
    """The class token: the paper's choice."""

    rows: slice | None = slice(0, 1)
    tokens = 1

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.prefix = c.num_prefix_tokens

    def head(self, c: ViTConfig) -> nn.Module:
        """Return a new head: y -> logits."""
        return nn.Linear(self.tokens * c.hidden_size, c.num_classes, bias="head" not in c.without_bias)

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


class ClassAndMean(Mean):
    """The class token and the mean of the patches, side by side (DINOv2's linear classifiers)."""

    tokens = 2

    def forward(self, z: Tensor, weight: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, 2 D]."""
        return torch.cat([z[:, 0], super().forward(z, weight)], dim=1)


class Map(ClassToken):
    """Attention pooling: a learned query looks at the tokens; then an MLP with its residual (SigLIP)."""

    rows = None

    def __init__(self, c: ViTConfig) -> None:
        from vitkit.model.vit import MLP  # the same two dense layers

        super().__init__(c)
        D = c.hidden_size
        self.first, self.heads = 0 if c.pool_prefix else self.prefix, c.pool_heads or c.num_attention_heads
        self.query = nn.Parameter(torch.zeros(1, 1, D))
        self.q, self.kv, self.out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.norm, self.mlp = norm(c), MLP(c, c.pool_intermediate_size)

    def forward(self, z: Tensor, weight: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, D]."""
        q, kv = self.q(self.query.expand(z.shape[0], -1, -1)), self.kv(z[:, self.first :])
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (q, *kv.chunk(2, dim=-1)))
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return (self.mlp(self.norm(y)) + y)[:, 0]


class LearnedQuery(ClassToken):
    """Attention pooling by a learned query that is not projected, without an MLP after it (AIMv2 in transformers)."""

    rows = None

    def __init__(self, c: ViTConfig) -> None:
        super().__init__(c)
        self.heads, D = c.num_attention_heads, c.hidden_size
        self.query = nn.Parameter(torch.zeros(1, 1, D))
        self.kv, self.out = nn.Linear(D, 2 * D, bias=c.qkv_bias), nn.Linear(D, D)

    def forward(self, z: Tensor, weight: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, D]."""
        q, kv = self.query.expand(z.shape[0], -1, -1), self.kv(z[:, self.prefix :])
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (q, *kv.chunk(2, dim=-1)))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))[:, 0]


class Distilled(ClassToken):
    """The class token and the distillation token (the first register), each with its own head (DeiT)."""

    rows = slice(0, 2)
    tokens = 2

    def head(self, c: ViTConfig) -> nn.Module:
        """Return two new heads."""
        return TwoHeads(c)

    def forward(self, z: Tensor, weight: Tensor | None = None) -> Tensor:
        """[B, 2 or more, D] -> [B, 2 D]."""
        return z[:, :2].flatten(1)


class TwoHeads(nn.Module):
    """The mean of what two heads say, each about its own token."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        bias = "head" not in c.without_bias
        self.cls, self.distilled = (nn.Linear(c.hidden_size, c.num_classes, bias=bias) for _ in range(2))

    def forward(self, y: Tensor) -> Tensor:
        """[B, 2 D] -> [B, K]."""
        first, second = y.chunk(2, dim=-1)
        return (self.cls(first) + self.distilled(second)) / 2


POOLS: dict[str, type[ClassToken]] = {
    "cls": ClassToken,
    "mean": Mean,
    "cls+mean": ClassAndMean,
    "map": Map,
    "distilled": Distilled,
    "aimv2": LearnedQuery,
}
