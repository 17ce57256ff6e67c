"""Token merging: in each block the r patch tokens that are most like another one join it (arXiv 2210.09461).

A trade, not an equality: fewer tokens are faster and say less. It needs no training. Tokens are split into two sets by
turns; each of the first set finds the one in the second whose key is nearest, and the r nearest pairs become their
mean, weighted by how many patches each already stands for. Attention counts such a token as often as it has patches.

Legend: B images, T tokens, N of them patches, n before them, D width, h heads, d = D / h.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.model.config import ViTConfig


def plan(c: ViTConfig, r: int) -> list[int]:
    """How many tokens each block merges: r, but never more than half of the patches that are left.

    Args:
        c: the model's configuration; its image size says how many patches there are.
        r: tokens to merge in each block.

    Raises:
        ConfigError: r is negative, or merges nothing at this size.
    """
    if r < 0:
        raise ConfigError(f"merge must be 0 (nothing is merged) or more; got {r}.")
    N, counts = c.num_patches, []
    for _ in range(c.num_hidden_layers):
        counts.append(min(r, N // 2))
        N -= counts[-1]
    if c.pool == "cls":
        counts[-1] = 0  # the last block's patches are not read by the head
    return counts


def merge(z: Tensor, size: Tensor | None, k: Tensor, r: int, n: int) -> tuple[Tensor, Tensor]:
    """Merge r tokens of each image.

    Args:
        z: [B, T, D].
        size: [B, T, 1] patches that each token stands for; None where each stands for itself.
        k: [B, h, T, d] keys of the block's attention.
        r: how many; at most half of the patches.
        n: tokens before the patches; they are left alone.

    Returns:
        [B, T - r, D] and its sizes [B, T - r, 1]; patches are in another order.
    """
    size = torch.ones_like(z[..., :1]) if size is None else size
    x = torch.cat([z * size, size], dim=-1)  # [B, T, D + 1]
    likeness = F.normalize(k[:, :, n:].mean(1), dim=-1)  # [B, N, d]
    best, partner = (likeness[:, ::2] @ likeness[:, 1::2].mT).max(-1)  # 2 x [B, N/2]
    order = best.topk(best.shape[1]).indices  # nearest pairs first
    first, second = x[:, n::2], x[:, n + 1 :: 2]
    going = first.gather(1, wide(order[:, :r], x))  # [B, r, D + 1]
    staying = first.gather(1, wide(order[:, r:], x))
    second = second.scatter_add(1, wide(partner.gather(1, order[:, :r]), x), going)
    x = torch.cat([x[:, :n], staying, second], dim=1)  # [B, T - r, D + 1]
    return x[..., :-1] / x[..., -1:], x[..., -1:]


def wide(index: Tensor, x: Tensor) -> Tensor:
    """[B, r] -> [B, r, width of x], as gather and scatter want it."""
    return index[..., None].expand(-1, -1, x.shape[-1])
