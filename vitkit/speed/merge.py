"""Token merging: each block merges the r patch tokens that are most similar to another one (arXiv 2210.09461).

This trades accuracy for speed and needs no training. Tokens are assigned alternately to two sets; each token of the
first finds the token of the second with the most similar key, and the r most similar pairs are replaced by their mean,
weighted by the number of patches that each already represents. Attention counts a token once per patch it represents.

Legend: B images, T tokens (n prefix tokens, then N patches), D width, h heads, d = D / h.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.model.config import ViTConfig
from vitkit.model.parts.fit import EVERY_PART, Takes, unfit

TAKES: Takes = {  # what positions do inside attention needs the patches where they were
    **EVERY_PART,
    "block": ("res-post-norm",),
    "positions_in": (),
    "relative": (),
    "pool": ("mean", "cls+mean"),
}


def plan(c: ViTConfig, r: int) -> list[int]:
    """Return how many tokens each block merges: r, but at most half of the remaining patches.

    Args:
        c: the model's configuration, whose image size gives the number of patches.
        r: tokens to merge per block.

    Raises:
        ConfigError: r is negative or over half of the patches, or a part of the model needs every patch in its place.
    """
    if r and (odd := unfit(c, TAKES)):
        raise ConfigError(f"Tokens cannot be merged in a model with {', '.join(odd)}. Leave out --merge.")
    if r < 0:
        raise ConfigError(f"merge must be 0 (no merging) or more; got {r}.")
    if r > c.num_patches // 2:
        raise ConfigError(f"merge must be at most {c.num_patches // 2}, half of the {c.num_patches} patches; got {r}.")
    N, counts = c.num_patches, []
    for _ in range(c.num_hidden_layers):
        counts.append(min(r, N // 2))
        N -= counts[-1]
    if c.pool == "cls":
        counts[-1] = 0  # the head reads none of the last block's patches
    return counts


def merge(z: Tensor, size: Tensor | None, k: Tensor, r: int, n: int) -> tuple[Tensor, Tensor]:
    """Merge r tokens per image.

    Args:
        z: [B, T, D].
        size: [B, T, 1] number of patches that each token represents; None for one each.
        k: [B, h, T, d] keys of the block's attention.
        r: tokens to merge; at most half of the patches.
        n: number of prefix tokens, which are never merged.

    Returns:
        Tokens [B, T - r, D], with the patches in another order, and their sizes [B, T - r, 1].
    """
    size = torch.ones_like(z[..., :1]) if size is None else size
    x = torch.cat([z * size, size], dim=-1)  # [B, T, D + 1]
    similarity = F.normalize(k[:, :, n:].mean(1), dim=-1)  # [B, N, d]
    best, partner = (similarity[:, ::2] @ similarity[:, 1::2].mT).max(-1)  # 2 x [B, N/2]
    order = best.topk(best.shape[1]).indices  # most similar pairs first
    first, second = x[:, n::2], x[:, n + 1 :: 2]
    going = first.gather(1, wide(order[:, :r], x))  # [B, r, D + 1]
    staying = first.gather(1, wide(order[:, r:], x))
    second = second.scatter_add(1, wide(partner.gather(1, order[:, :r]), x), going)
    x = torch.cat([x[:, :n], staying, second], dim=1)  # [B, T - r, D + 1]
    return x[..., :-1] / x[..., -1:], x[..., -1:]


def wide(index: Tensor, x: Tensor) -> Tensor:
    """Expand indices [B, r] to [B, r, width of x] for gather and scatter."""
    return index[..., None].expand(-1, -1, x.shape[-1])
