"""What the weights of Eq. 1 have learnt: filters of E (Figure 7 left), E_pos (Figures 7 centre and 10), and patches
compared with each other after the last layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.explain.common import Grid, eval_mode, grid_of, patch_at, to_array, unwrap
from vitkit.types import Array


@torch.no_grad()
def filters(model: nn.Module, count: int = 28) -> tuple[Array, Array]:
    """Principal components of the patch embedding's filters (Figure 7 left).

    Args:
        model: a ViT, compiled or plain.
        count: how many; fewer where there are fewer.

    Returns:
        [count, P, P, C] of unit length, most important first, and each one's share of the variance [count].
    """
    E = unwrap(model).patch_embedding.projection.weight.float()  # [D, C, P, P]
    C, P = E.shape[1:3]
    flat = E.flatten(1) - E.flatten(1).mean(0)
    _, s, v = torch.linalg.svd(flat, full_matrices=False)  # v: [n, C P P]
    n = min(count, len(v))
    share = s**2 / (s**2).sum().clamp(min=1e-12)
    parts = v[:n].view(n, C, P, P).permute(0, 2, 3, 1)
    # A component's sign is arbitrary: its largest entry is made positive, so that weights have one picture.
    largest = parts.flatten(1).gather(1, parts.flatten(1).abs().argmax(1, keepdim=True)).sign()
    return to_array(parts * largest[:, :, None, None]), to_array(share[:n])


@torch.no_grad()
def position_similarity(model: nn.Module) -> Array:
    """Cosine similarity between the position embeddings of all patches (Figure 7 centre).

    Args:
        model: a ViT, compiled or plain.

    Returns:
        [rows, columns, rows, columns]: entry [r, c] is the map of the patch in row r, column c.
    """
    vit = unwrap(model)
    rows, columns = grid = vit.positions.grid
    table = vit.positions.table[0, -rows * columns :].double()  # without the class token's
    unit = F.normalize(table, dim=-1)
    return to_array((unit @ unit.T).float().clamp(-1, 1)).reshape(*grid, *grid)


@torch.no_grad()
def patch_similarity(model: nn.Module, pixels: Tensor, patch: Grid | None = None, layer: int | None = None) -> Array:
    """Cosine similarity of every patch's token to one patch's.

    Args:
        model: a ViT, compiled or plain.
        pixels: [B, C, H, W].
        patch: (row, column), counted from 0; the middle one when not given.
        layer: 0 is z_0, L is z_L; counted from the end when negative. The last, after the final LayerNorm, when None.

    Returns:
        [B, rows, columns], between -1 and 1.
    """
    with eval_mode(model, pixels) as (vit, x):
        L, grid = vit.config.num_hidden_layers, grid_of(vit, x)
        row, column = patch_at(patch, grid)
        if layer is None:
            z = vit.tokens(x)
        elif -L - 1 <= layer <= L:
            z = vit.hidden_states(x)[layer]
        else:
            raise InputError(f"Expected a layer between 0 (after the embedding) and {L}; got {layer}.")
        unit = F.normalize(z[:, vit.config.num_prefix_tokens :].float(), dim=-1)  # [B, N, D]
        one = unit[:, row * grid[1] + column]  # [B, D]
        return to_array((unit @ one[:, :, None])[..., 0].clamp(-1, 1)).reshape(len(x), *grid)
