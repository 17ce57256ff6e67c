"""What attends to what, as arrays: Eq. 6 written out layer by layer, and rollout (Figures 6 and 14, appendix D.7).

Nothing is hooked into the model: its states are asked for one after another, so that one layer's A is in memory.
Legend: B images, T tokens, h heads, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.explanations.common import Pixels, batches, eval_mode, grid_of, needs_head, reader, targets_of, to_array
from vitkit.model.vit import ViT
from vitkit.types import Array


def attentions(vit: ViT, x: Tensor, query: Tensor | None = None) -> Iterator[Tensor]:
    """Yield A of Eq. 6 of one layer after another, [B, heads of the layer, T or queries, T]."""
    for block, z in zip(vit.blocks, vit.states(x), strict=False):  # the last state is not needed
        yield block.attention(z, vit.grid_of(x), rows=query)


@torch.no_grad()
def class_attention(model: nn.Module, pixels: Tensor) -> Array:
    """What the class token looks at in every layer and head.

    Without a class token the head reads the mean of the patches, so the mean of their rows is given instead.

    Args:
        model: a ViT, compiled or plain.
        pixels: [B, C, H, W].

    Returns:
        [B, L, h, T]; rows sum to one, and are NaN for pruned heads.
    """
    with eval_mode(model, pixels) as (vit, x):
        rows, _ = reader(vit)
        c = vit.config
        query = torch.arange(c.num_prefix_tokens + math.prod(grid_of(vit, x)), device=x.device)[rows]
        result = None
        for layer, A in enumerate(attentions(vit, x, query)):
            read = to_array(A.mean(2))  # [B, heads, T]
            if result is None:
                result = np.full((len(x), c.num_hidden_layers, c.num_attention_heads, A.shape[-1]), np.nan, np.float32)
            result[:, layer, list(vit.blocks[layer].msa.heads)] = read
    assert result is not None
    return result


@torch.no_grad()
def rollout(model: nn.Module, pixels: Tensor) -> Array:
    """Attention rollout (Figure 6): average the heads, add the residual, normalise the rows, multiply the layers.

    Args:
        model: a ViT, compiled or plain.
        pixels: [B, C, H, W].

    Returns:
        [B, T]: how much of each input token reaches what the head reads; sums to one.
    """
    with eval_mode(model, pixels) as (vit, x):
        rows, _ = reader(vit)
        R: Tensor | None = None
        for A in attentions(vit, x):
            mixed = A.mean(1) + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)  # [B, T, T]
            mixed = mixed / mixed.sum(-1, keepdim=True)
            R = mixed if R is None else mixed @ R
    assert R is not None
    return to_array(R[:, rows].mean(1))


def with_attention(vit: ViT, z: Tensor, grid: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
    """Logits of z_0 [B, T, D] of a grid of patches, and A of every layer, attached to the autograd graph."""
    attentions: list[Tensor] = []
    for block in vit.blocks:
        seen: dict[str, Any] = {"A": None}
        z = block(z, grid, seen=seen)
        attentions.append(seen["A"])
    return vit.classify(vit.read(z)), attentions


def gradient_rollout(model: nn.Module, pixels: Tensor, target: int | None = None) -> Array:
    """Rollout that counts only attention which speaks for a class (Chefer et al., arXiv 2103.15679, section 3).

    Each head's A is weighted by the gradient of the class's logit with respect to it, negative parts are dropped,
    heads are averaged, and R <- R + A' R through the layers.

    Args:
        model: a ViT with a head, compiled or plain.
        pixels: [B, C, H, W].
        target: the class; the most probable one of each image when not given.

    Returns:
        [B, T]: relevance of each input token; not below zero, without unit.
    """
    with torch.inference_mode(False), torch.enable_grad(), eval_mode(model, pixels) as (vit, x):
        needs_head(vit, "Gradient-weighted rollout")
        rows, _ = reader(vit)
        z = vit.embed(x.clone() if x.is_inference() else x).detach().requires_grad_()
        logits, seen = with_attention(vit, z, vit.grid_of(x))
        chosen = logits.gather(1, targets_of(logits, target)[:, None]).sum()
        R: Tensor | None = None
        for A, gradient in zip(seen, torch.autograd.grad(chosen, seen), strict=True):
            weighted = (gradient * A.detach()).clamp(min=0).mean(1).float()  # [B, T, T]
            if R is None:
                R = torch.eye(A.shape[-1], device=A.device).expand(len(x), -1, -1)
            R = R + weighted @ R
        assert R is not None
        itself = torch.eye(R.shape[-1], device=R.device)
        return to_array((R - itself)[:, rows].mean(1))  # the identity is the start, not a finding


def distances(grid: tuple[int, int], patch_size: int) -> Tensor:
    """Pixels between the centres of any two patches, [N, N]."""
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], 1).float() * patch_size  # [N, 2]
    return torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")


@torch.no_grad()
def attention_distance(model: nn.Module, pixels: Pixels) -> Array:
    """Mean attention distance of every head (Figures 7 right and 11).

    For each patch that looks, the distance to the patches it looks at is averaged with its attention as weights; then
    over patches and images. Class token and registers have no place in the image and are left out on both sides.

    Args:
        model: a ViT, compiled or plain.
        pixels: one batch, or batches one after another: memory does not grow with their number.

    Returns:
        [L, h] in pixels; NaN for pruned heads.
    """
    total: Array | None = None
    images = 0
    for part in batches(pixels):
        with eval_mode(model, part) as (vit, x):
            c = vit.config
            if total is None:
                total = np.full((c.num_hidden_layers, c.num_attention_heads), np.nan)
                for layer, block in enumerate(vit.blocks):
                    total[layer, list(block.msa.heads)] = 0.0
            far = distances(grid_of(vit, x), c.patch_size).to(x.device)  # [N, N]
            for layer, A in enumerate(attentions(vit, x)):
                a = A[:, :, c.num_prefix_tokens :, c.num_prefix_tokens :].float()  # [B, h, N, N]
                mean = (a * far).sum(-1) / a.sum(-1).clamp(min=1e-12)  # [B, h, N]
                total[layer, list(vit.blocks[layer].msa.heads)] += to_array(mean.mean(-1).sum(0)).astype(np.float64)
        images += len(part)
    if total is None:
        raise InputError("Expected at least one image to measure attention distance on; got none.")
    return total / images
