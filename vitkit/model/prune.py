"""Removing attention heads for good: smaller matrices instead of masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vitkit.model.vit import MSA, ViT


def _cut(linear: nn.Linear, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
    """Keep only these rows (outputs) or columns (inputs) of a linear layer."""
    weight, bias = linear.weight, linear.bias
    if rows is not None:
        weight = weight[rows]
        if bias is not None:
            linear.bias = nn.Parameter(bias[rows].clone(), requires_grad=bias.requires_grad)
    if columns is not None:
        weight = weight[:, columns]
    linear.weight = nn.Parameter(weight.clone(), requires_grad=linear.weight.requires_grad)
    linear.out_features, linear.in_features = weight.shape


@torch.no_grad()
def _keep(msa: MSA, heads: tuple[int, ...]) -> None:
    """Leave only `heads` (original numbers) in one attention."""
    d, device = msa.head_size, msa.qkv.weight.device
    kept = torch.tensor([msa.heads.index(head) for head in heads], device=device)
    lanes = (kept[:, None] * d + torch.arange(d, device=device)).flatten()  # [heads * d]
    width = len(msa.heads) * d
    _cut(msa.qkv, rows=torch.cat([part * width + lanes for part in range(3)]))  # q, k and v of each head
    _cut(msa.out, columns=lanes)
    msa.heads = heads


def prune_heads(model: ViT, heads: Mapping[int, Iterable[int]]) -> None:
    """Remove heads from a model, in place. Its config and its checkpoints record which.

    Args:
        model: a ViT.
        heads: {layer: heads}, by original numbers; naming heads that are already gone is allowed.

    Raises:
        ConfigError: no such layer or head, or no head would be left. The model is then unchanged.
    """
    merged = {layer: set(gone) for layer, gone in model.config.pruned_heads}
    for layer, gone in heads.items():
        merged.setdefault(layer, set()).update(gone)
    config = dataclasses.replace(model.config, pruned_heads=tuple(merged.items()))  # type: ignore[arg-type]
    for layer, _ in config.pruned_heads:
        _keep(model.blocks[layer].msa, config.heads_of(layer))
    model.config = config
