"""POOLS: what y of Eq. 4 is made of. `rows` are the tokens that a pool reads; the last block computes no others."""

from __future__ import annotations

from torch import Tensor, nn

from vitkit.model.config import ViTConfig


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


POOLS: dict[str, type[ClassToken]] = {"cls": ClassToken, "mean": Mean}
