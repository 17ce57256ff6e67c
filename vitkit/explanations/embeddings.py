"""What the weights of Eq. 1 have learned: the filters of E and the positions E_pos (Figures 7 and 10); and how similar
the patches of an image are to each other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.explanations.common import Grid, eval_mode, grid_of, patch_at, to_array, unwrap
from vitkit.model.parts.blocks import Placed
from vitkit.model.parts.fit import EVERY_PART, Takes, unfit
from vitkit.model.resnet import HybridStem
from vitkit.types import Array

WITH_POSITIONS: Takes = {**EVERY_PART, "positions": ("2d", "sincos")}


@torch.no_grad()
def filters(model: nn.Module, count: int = 28) -> tuple[Array, Array]:
    """Compute the principal components of the patch embedding filters (Figure 7, left).

    Args:
        model: a ViT, compiled or plain; of a hybrid, the filters of the stem's first convolution.
        count: maximum number of components (default: 28).

    Returns:
        Components [count, P, P, C] of unit length, the most important first, and their shares of the variance [count].
    """
    first = unwrap(model).patch_embedding
    # A hybrid's E does not see pixels; the first kernel of its stem does.
    seeing = first.stem.root.conv if isinstance(first.stem, HybridStem) else first.projection
    E = seeing.weight.float()  # [D, C, P, P]
    C, P = E.shape[1:3]
    flat = E.flatten(1) - E.flatten(1).mean(0)
    _, s, v = torch.linalg.svd(flat, full_matrices=False)  # v: [n, C P P]
    n = min(count, len(v))
    share = s**2 / (s**2).sum().clamp(min=1e-12)
    parts = v[:n].view(n, C, P, P).permute(0, 2, 3, 1)
    # The sign of a component is arbitrary. Make its largest entry positive, so that the same weights look the same.
    largest = parts.flatten(1).gather(1, parts.flatten(1).abs().argmax(1, keepdim=True)).sign()
    return to_array(parts * largest[:, :, None, None]), to_array(share[:n])


@torch.no_grad()
def position_similarity(model: nn.Module) -> Array:
    """Compute the cosine similarity between the position embeddings of all pairs of patches (Figure 7, centre).

    Args:
        model: a ViT, compiled or plain.

    Returns:
        [rows, columns, rows, columns]: entry [r, c] is the map for the patch in row r, column c.
    """
    vit = unwrap(model)
    if odd := unfit(vit.config, WITH_POSITIONS):
        raise InputError(f"This model has no table of positions that could be compared: it has {', '.join(odd)}.")
    first = vit.blocks[0]
    positions = first.positions if isinstance(first, Placed) and first.positions is not None else vit.positions
    rows, columns = grid = vit.config.grid
    table = positions(grid)[0, -rows * columns :].double()  # without the class token
    unit = F.normalize(table, dim=-1)
    return to_array((unit @ unit.T).float().clamp(-1, 1)).reshape(*grid, *grid)


@torch.no_grad()
def patch_similarity(model: nn.Module, pixels: Tensor, patch: Grid | None = None, layer: int | None = None) -> Array:
    """Compute the cosine similarity of every patch's token to that of one patch.

    Args:
        model: a ViT, compiled or plain.
        pixels: [B, C, H, W].
        patch: (row, column), counted from 0 (default: the middle patch).
        layer: l of z_l, from 0 (the output of Eq. 1) to L; negative numbers count from the end (default: the output
            of the final LayerNorm).

    Returns:
        [B, rows, columns], from -1 to 1.
    """
    with eval_mode(model, pixels) as (vit, x):
        L, grid = vit.config.num_hidden_layers, grid_of(vit, x)
        row, column = patch_at(patch, grid)
        if layer is None:
            z = vit.tokens(x)
        elif -L - 1 <= layer <= L:
            z = vit.hidden_states(x)[layer]
        else:
            raise InputError(f"Expected a layer from 0 (the output of the embedding) to {L}; got {layer}.")
        unit = F.normalize(z[:, vit.config.num_prefix_tokens :].float(), dim=-1)  # [B, N, D]
        one = unit[:, row * grid[1] + column]  # [B, D]
        return to_array((unit @ one[:, :, None])[..., 0].clamp(-1, 1)).reshape(len(x), *grid)
