"""Removing attention heads for good: smaller matrices instead of masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.model.parts.fit import EVERY_PART, Takes, unfit
from vitkit.model.parts.layers import KeylessQKV
from vitkit.model.parts.relative import Bias, Mixed

if TYPE_CHECKING:
    from vitkit.model.vit import MSA, ViT

TAKES: Takes = {**EVERY_PART, "norms": tuple(place for place in EVERY_PART["norms"] if place != "heads")}


def _cut(linear: nn.Linear, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
    """Keep only these rows (outputs) or columns (inputs) of a linear layer."""
    weight, bias = linear.weight, linear.bias
    if rows is not None:
        weight = weight[rows]
        if isinstance(linear, KeylessQKV):
            for own, part in zip(
                ("bias_q", "bias_v"), (rows[: len(rows) // 3], rows[2 * len(rows) // 3 :]), strict=True
            ):
                kept = nn.Parameter(bias[part].clone(), requires_grad=getattr(linear, own).requires_grad)
                setattr(linear, own, kept)
        elif bias is not None:
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
    if isinstance(msa.relative, Bias):
        table = msa.relative.table
        msa.relative.table = nn.Parameter(table[:, kept].clone(), requires_grad=table.requires_grad)
    elif isinstance(msa.relative, Mixed):
        turns = msa.relative.frequencies
        msa.relative.frequencies = nn.Parameter(turns[:, kept].clone(), requires_grad=turns.requires_grad)
    msa.heads = heads


def prune_heads(model: ViT, heads: Mapping[int, Iterable[int]]) -> None:
    """Remove heads from a model, in place. Its config and its checkpoints record which.

    Args:
        model: a ViT.
        heads: {layer: heads}, by original numbers; naming heads that are already gone is allowed.

    Raises:
        ConfigError: no such layer or head, no head would be left, or a norm reads all heads together. The model is then
            unchanged.
    """
    if odd := unfit(model.config, TAKES):
        raise ConfigError(
            f"Heads cannot be removed from this model: it has {', '.join(odd)}, a norm over all heads together, so "
            f"what one head says depends on the others. Use a head mask."
        )
    merged = {layer: set(gone) for layer, gone in model.config.pruned_heads}
    for layer, gone in heads.items():
        merged.setdefault(layer, set()).update(gone)
    config = dataclasses.replace(model.config, pruned_heads=tuple(merged.items()))  # type: ignore[arg-type]
    for layer, _ in config.pruned_heads:
        _keep(model.blocks[layer].msa, config.heads_of(layer))
    model.config = config
