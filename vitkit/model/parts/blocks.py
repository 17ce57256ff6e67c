"""BLOCKS: the order of norm, branch and sum. Eqs. 2 and 3 are the paper's; the others are made of the same modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CannotExpress
from vitkit.model.config import ViTConfig
from vitkit.model.parts.positions import POSITIONS, Grid, OnGrid
from vitkit.model.parts.relative import Rows
from vitkit.model.vit import Block, take


class PostNorm(Block):
    """Residual post-norm: z + LN(MSA(z)). (The post-norm of 2017 is another: LN(z + MSA(z)).)"""

    def attend(self, z: Tensor, grid: Grid, rows: Rows = None, **options: Any) -> Tensor:
        """Eq. 2 in this order."""
        return self.residual1(self.norm1(self.msa(z, grid, rows, **options))) + take(z, rows)

    def feed_forward(self, z: Tensor) -> Tensor:
        """Eq. 3 in this order."""
        return self.residual2(self.norm2(self.mlp(z))) + z

    def attention(self, z: Tensor, grid: Grid, heads: Sequence[int] | None = None, rows: Rows = None) -> Tensor:
        """A of Eq. 6 of what attention reads here, z itself: [B, heads, rows, T]."""
        return self.msa.attention(z, grid, heads, rows)


class Parallel(Block):
    """Both branches read the same LN(z) and are added at once (ViT-22B, arXiv 2302.05442)."""

    def __init__(self, c: ViTConfig, layer: int) -> None:
        super().__init__(c, layer)
        del self.norm2, self.residual2

    def forward(self, z: Tensor, grid: Grid, rows: Rows = None, **options: Any) -> Tensor:
        """z + MSA(LN(z)) + MLP(LN(z))."""
        u = self.norm1(z)
        return self.residual1(self.msa(u, grid, rows, **options) + self.mlp(take(u, rows))) + take(z, rows)

    def attend(self, z: Tensor, grid: Grid, rows: Rows = None, **options: Any) -> Tensor:
        """Raise: a parallel block has no z' between its branches."""
        raise CannotExpress("A parallel block computes attention and MLP at once, so it has no z' between them.")

    def feed_forward(self, z: Tensor) -> Tensor:
        """Raise, as `attend` does."""
        return self.attend(z, (0, 0))


class Placed(Block):
    """A block that adds positions to what it reads (appendix D.4).

    Args:
        c: the architecture.
        layer: number of the block.
        shared: positions that belong to the model; None for the block's own.
    """

    def __init__(self, c: ViTConfig, layer: int, shared: OnGrid | None = None) -> None:
        super().__init__(c, layer)
        self.first, self.registers = int(c.class_token), c.num_register_tokens
        self.positions = POSITIONS[c.positions](c) if shared is None else None
        self.shared = (shared,)  # in a tuple, so that it is not a submodule: the model saves it once

    def place(self, z: Tensor, grid: Grid) -> Tensor:
        """z + E_pos; registers have no positions."""
        positions = self.positions if self.positions is not None else self.shared[0]
        assert positions is not None
        table, n = positions(grid), self.first
        if self.registers:
            none = table.new_zeros(1, self.registers, table.shape[2])
            table = torch.cat([table[:, :n], none, table[:, n:]], dim=1)
        return z + table

    def attend(self, z: Tensor, grid: Grid, rows: Rows = None, **options: Any) -> Tensor:
        """Eq. 2 of z + E_pos."""
        return super().attend(self.place(z, grid), grid, rows, **options)

    def attention(self, z: Tensor, grid: Grid, heads: Sequence[int] | None = None, rows: Rows = None) -> Tensor:
        """A of Eq. 6 of z + E_pos: [B, heads, rows, T]."""
        return super().attention(self.place(z, grid), grid, heads, rows)


BLOCKS: dict[str, type[Block]] = {"pre-norm": Block, "res-post-norm": PostNorm, "parallel": Parallel}


def blocks(c: ViTConfig, positions: OnGrid) -> list[Block]:
    """Return the blocks of a model.

    Args:
        c: the architecture.
        positions: the model's own, which its blocks share if `positions_in` says so.
    """
    layers = range(c.num_hidden_layers)
    if c.positions_in == "first":
        return [BLOCKS[c.block](c, layer) for layer in layers]
    return [Placed(c, layer, positions if c.positions_in == "shared" else None) for layer in layers]
