"""Exercises on Eq. 1: from an image to z_0.

Legend: B images, C channels, H x W pixels, P patch side, N = HW / P^2 patches, D width. Sizes differ from each other in
every input, so that a swapped axis cannot go unnoticed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def random(seed: int, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return tensors of these shapes that depend only on the seed."""
    rng = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=rng) for shape in shapes)


def cut(x: Tensor, P: int, order: str = "hwpqc") -> Tensor:
    """Cut [B, C, H, W] into flattened patches; `order` names rows h, columns w and the axes p, q, c inside a patch."""
    B, C, H, W = x.shape
    x = x.reshape(B, C, H // P, P, W // P, P)
    axes = {"c": 1, "h": 2, "p": 3, "w": 4, "q": 5}
    return x.permute(0, *(axes[letter] for letter in order)).reshape(B, (H // P) * (W // P), P * P * C)


def _join(z: Tensor, cls: Tensor) -> Tensor:
    return torch.cat([cls.expand(len(z), -1, -1), z], dim=1)


EXERCISES: dict[str, dict[str, Any]] = {
    "patches": {
        "title": "Section 3.1: the image as a sequence of flattened patches x_p",
        "task": "Cut the images x [B, C, H, W] into P x P patches, row by row, and flatten each to P*P*C numbers: "
        "rows of the patch first, then its columns, then the channels.",
        "start": "def patches(x, P): ...",
        "shape": "[B, N, P*P*C]",
        "inputs": lambda seed: (random(seed, (2, 3, 8, 12))[0], 4),
        "answer": cut,
        "mistakes": {
            "The channels come first inside each patch here (C, P, P); the task puts them last (P, P, C). Both are "
            "used: a convolution's weights have them first.": lambda x, P: cut(x, P, "hwcpq"),
            "The patches go column by column; go through the image row by row, as one reads.": lambda x, P: cut(
                x, P, "whpqc"
            ),
            "Inside each patch, columns come before rows: every patch is transposed.": lambda x, P: cut(x, P, "hwqpc"),
            "The axes are [B, P*P*C, N]: tokens belong on axis 1, their numbers on axis 2. Use .transpose(1, 2).": (
                lambda x, P: cut(x, P).mT
            ),
            "Reshaping alone does not cut patches: it takes P*P*C consecutive numbers of a row of pixels. First split "
            "H and W into (H/P, P) and (W/P, P), then permute, then flatten.": lambda x, P: x.reshape(
                len(x), -1, P * P * x.shape[1]
            ),
            "Pixels far apart are grouped together. A patch is a block of neighbouring pixels: split H into (H/P, P), "
            "not into (P, H/P).": lambda x, P: (
                x.reshape(len(x), x.shape[1], P, x.shape[2] // P, P, x.shape[3] // P)
                .permute(0, 3, 5, 2, 4, 1)
                .reshape(len(x), -1, P * P * x.shape[1])
            ),
            "Every patch is reduced to its mean colour; keep all its pixels.": lambda x, P: (
                cut(x, P).unflatten(2, (P * P, -1)).mean(2)
            ),
            "Only the first image of the batch is cut; keep the axis B.": lambda x, P: cut(x[:1], P),
            "The result has no batch axis; keep [B, ...].": lambda x, P: cut(x[:1], P)[0],
            "Only one channel is used; a patch has P*P*C numbers.": lambda x, P: cut(x[:, :1], P),
            "The patches are in reverse order.": lambda x, P: cut(x, P).flip(1),
        },
    },
    "embed": {
        "title": "Eq. 1: the patch embedding x_p E",
        "task": "Project the flattened patches x [B, N, P*P*C] to width D with E [P*P*C, D] and the bias b [D].",
        "start": "def embed(x, E, b): ...",
        "shape": "[B, N, D]",
        "inputs": lambda seed: random(seed, (2, 6, 12), (12, 12), (12,)),
        "answer": lambda x, E, b: x @ E + b,
        "mistakes": {
            "The bias b is missing.": lambda x, E, b: x @ E,
            "E is transposed. nn.Linear stores its weight as [out, in]; E of the paper is [in, out].": (
                lambda x, E, b: x @ E.T + b
            ),
            "E is transposed, and the bias is missing.": lambda x, E, b: x @ E.T,
            "There is an activation (ReLU) after the projection; Eq. 1 has none.": lambda x, E, b: (x @ E + b).relu(),
            "There is an activation (GELU) after the projection; Eq. 1 has none.": lambda x, E, b: (
                torch.nn.functional.gelu(x @ E + b)
            ),
            "The bias is subtracted.": lambda x, E, b: x @ E - b,
            "The bias is added before the projection, so it is projected too.": lambda x, E, b: (x + b) @ E,
            "The result is divided by sqrt(D). That scale belongs to attention (Eq. 6).": lambda x, E, b: (
                (x @ E + b) / 12**0.5
            ),
            "The result is multiplied by sqrt(D), as in the first Transformer; this paper does not.": lambda x, E, b: (
                (x @ E + b) * 12**0.5
            ),
            "The patches are normalised first. Eq. 1 projects raw pixels.": lambda x, E, b: (
                torch.nn.functional.layer_norm(x, x.shape[-1:]) @ E + b
            ),
            "The axes of the result are [B, D, N]; tokens belong on axis 1.": lambda x, E, b: (x @ E + b).mT,
            "The patches are averaged into one vector; keep one per patch.": lambda x, E, b: (x @ E + b).mean(1),
        },
    },
    "class-token": {
        "title": "Eq. 1: the class token x_class",
        "task": "Put the learnable class token cls [1, 1, D] before the patch embeddings z [B, N, D] of every image.",
        "start": "def class_token(z, cls): ...",
        "shape": "[B, 1 + N, D]",
        "inputs": lambda seed: random(seed, (2, 6, 12), (1, 1, 12)),
        "answer": _join,
        "mistakes": {
            "The class token is at the end; it comes first, so that z^0 is its output.": lambda z, cls: torch.cat(
                [z, cls.expand(len(z), -1, -1)], dim=1
            ),
            "The class token is added to every patch; it is a token of its own.": lambda z, cls: z + cls,
            "The class token replaces the first patch; nothing may be lost.": lambda z, cls: _join(z[:, 1:], cls),
            "The class token is joined along the batch (dim=0). Tokens are axis 1.": lambda z, cls: torch.cat(
                [cls.expand(1, z.shape[1], -1), z], dim=0
            ),
            "The class token is joined along the width (dim=2). Tokens are axis 1.": lambda z, cls: torch.cat(
                [cls.expand(len(z), z.shape[1], -1), z], dim=2
            ),
            "Only the first image is kept. Expand cls to the batch: cls.expand(B, -1, -1).": lambda z, cls: torch.cat(
                [cls, z[:1]], dim=1
            ),
            "The class token is joined twice.": lambda z, cls: _join(_join(z, cls), cls),
            "A token of zeros is joined instead of cls, which is learned.": lambda z, cls: _join(
                z, torch.zeros_like(cls)
            ),
            "The mean of the patches is joined instead of cls.": lambda z, cls: torch.cat(
                [z.mean(1, keepdim=True), z], dim=1
            ),
            "The class token is added to the first patch instead of being put before it.": lambda z, cls: torch.cat(
                [z[:, :1] + cls, z[:, 1:]], dim=1
            ),
            "There is one class token per patch; one per image is enough.": lambda z, cls: torch.cat(
                [cls.expand(len(z), z.shape[1], -1), z], dim=1
            ),
        },
    },
    "eq1": {
        "title": "Eq. 1, whole: z_0 = [x_class; x_p E] + E_pos",
        "task": "From embedded patches z [B, N, D], the class token cls [1, 1, D] and the positions E_pos "
        "[1, 1 + N, D], make z_0.",
        "start": "def eq1(z, cls, E_pos): ...",
        "shape": "[B, 1 + N, D]",
        "inputs": lambda seed: random(seed, (2, 6, 12), (1, 1, 12), (1, 7, 12)),
        "answer": lambda z, cls, E: _join(z, cls) + E,
        "mistakes": {
            "The positions are missing: add E_pos.": lambda z, cls, E: _join(z, cls),
            "The class token is at the end; it comes first.": lambda z, cls, E: (
                torch.cat([z, cls.expand(len(z), -1, -1)], dim=1) + E
            ),
            "The class token is at the end, and so is its position; both come first.": lambda z, cls, E: torch.cat(
                [z + E[:, 1:], (cls + E[:, :1]).expand(len(z), -1, -1)], dim=1
            ),
            "The class token has no position. E_pos has 1 + N rows, and its first is the class token's.": (
                lambda z, cls, E: _join(z + E[:, 1:], cls)
            ),
            "The patches have the wrong rows of E_pos: its first row is the class token's.": lambda z, cls, E: _join(
                z + E[:, :-1], cls
            ),
            "Every token gets the same position: E_pos is broadcast from its first row.": lambda z, cls, E: (
                _join(z, cls) + E[:, :1]
            ),
            "Positions are multiplied, not added.": lambda z, cls, E: _join(z, cls) * E,
            "The positions are added twice.": lambda z, cls, E: _join(z, cls) + 2 * E,
            "The positions are joined to the width; Eq. 1 adds them.": lambda z, cls, E: torch.cat(
                [_join(z, cls), E.expand(len(z), -1, -1)], dim=2
            ),
            "The positions are averaged over the width: each token has a vector of its own.": lambda z, cls, E: (
                _join(z, cls) + E.mean(2, keepdim=True)
            ),
            "The positions are in reverse order.": lambda z, cls, E: _join(z, cls) + E.flip(1),
            "The class token is missing.": lambda z, cls, E: z + E[:, 1:],
            "Only the first image is kept; expand cls to the batch.": lambda z, cls, E: torch.cat([cls, z[:1]], 1) + E,
        },
    },
}
