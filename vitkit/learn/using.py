"""Exercises on using a model: its tokens, its heads, its features, its attention, and the pixels that it expects.

Legend: B images, C channels, H x W pixels, P patch side, T tokens, h heads, d width of a head, L layers, F features,
K classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitkit.learn.attention import scores
from vitkit.learn.embedding import random


def _head_inputs(seed: int) -> tuple[Tensor, ...]:
    """As many tokens as heads, so that a mask along the wrong axis runs and can be named."""
    q, k, v = random(seed, (2, 4, 4, 6), (2, 4, 4, 6), (2, 4, 4, 6))
    return scores(q, k), v, torch.tensor([1.0, 0.0, 1.0, 0.5]).roll(seed)


def _masked(A: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (A * mask[:, None, None]) @ v


def _ridge_inputs(seed: int) -> tuple[Any, ...]:
    X, Y = random(seed, (9, 5), (9, 3))
    return X, torch.where(Y > 0, 1.0, -1.0), 2.0


def _ridge(X: Tensor, Y: Tensor, l2: float) -> Tensor:
    return torch.linalg.solve(X.T @ X + l2 * torch.eye(X.shape[1]), X.T @ Y)


def _product(layers: Tensor, own: float = 0.5, first_last: bool = True) -> Tensor:
    """Multiply [L, T, T], each mixed with the identity."""
    eye = R = torch.eye(layers.shape[-1])
    for A in layers:
        mixed = (1 - own) * A + own * eye
        R = mixed @ R if first_last else R @ mixed
    return R


def _summed(A: Tensor) -> Tensor:
    eye = R = torch.eye(A.shape[-1])
    for layer in A.mean(1):
        R = (layer + eye) @ R
    return R


def _photo_inputs(seed: int) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    photos = torch.randint(0, 256, (2, 4, 6, 3), generator=rng, dtype=torch.uint8)
    return photos, torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def _ready(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return ((x / 255 - mean) / std).permute(0, 3, 1, 2)


def _own_statistics(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    own = x / 255
    return ((own - own.mean((0, 1, 2))) / own.std((0, 1, 2), unbiased=False)).permute(0, 3, 1, 2)


EXERCISES: dict[str, dict[str, Any]] = {
    "tokens": {
        "title": "Section 3.1: the length of the sequence",
        "task": "How many tokens does a ViT with patches of P x P pixels see in an image of H x W pixels? H and W are "
        "multiples of P.",
        "start": "def tokens(H, W, P): ...",
        "shape": "a number",
        "inputs": lambda seed: ((224, 320, 16), (384, 512, 32), (518, 224, 14))[seed],
        "answer": lambda H, W, P: (H // P) * (W // P) + 1,
        "mistakes": {
            "The class token is missing: it is one more than the patches.": lambda H, W, P: (H // P) * (W // P),
            "The height is used for both sides; images need not be square.": lambda H, W, P: (H // P) ** 2 + 1,
            "The width is used for both sides; images need not be square.": lambda H, W, P: (W // P) ** 2 + 1,
            "Rows and columns are added; multiply them.": lambda H, W, P: H // P + W // P + 1,
            "Every pixel is a token here; a token is a patch of P x P pixels.": lambda H, W, P: H * W + 1,
            "The number of pixels is divided by P; a patch has P * P of them.": lambda H, W, P: H * W // P + 1,
            "There are two extra tokens here, as in DeiT; this paper has the class token alone.": lambda H, W, P: (
                (H // P) * (W // P) + 2
            ),
            "The channels are counted as tokens of their own; a patch holds all channels.": lambda H, W, P: (
                3 * (H // P) * (W // P) + 1
            ),
            "This is how many numbers one patch has, P * P * 3; count the patches.": lambda H, W, P: P * P * 3,
            "The patches overlap here, one at every pixel; they lie side by side.": lambda H, W, P: (
                (H - P + 1) * (W - P + 1) + 1
            ),
            "The class token is subtracted; add it.": lambda H, W, P: (H // P) * (W // P) - 1,
            "These are the patches of one column; multiply by those of one row.": lambda H, W, P: H // P + 1,
        },
    },
    "head-mask": {
        "title": "Switching heads off: Eq. 7 with a head mask",
        "task": "From A [B, h, T, T], v [B, h, T, d] and one number per head, mask [h], compute Eq. 7 with the "
        "attention of each head multiplied by its number: 1 keeps a head, 0 silences it.",
        "start": "def head_mask(A, v, mask): ...",
        "shape": "[B, h, T, d]",
        "inputs": _head_inputs,
        "answer": _masked,
        "mistakes": {
            "The mask runs along the tokens that are looked at (the last axis). It has one number per head: use "
            "mask[:, None, None].": lambda A, v, mask: (A * mask) @ v,
            "The mask runs along the tokens that look (axis 2). It has one number per head: use mask[:, None, None].": (
                lambda A, v, mask: (A * mask[:, None]) @ v
            ),
            "The mask is not applied.": lambda A, v, mask: A @ v,
            "The mask is inverted: 1 keeps a head, 0 silences it.": lambda A, v, mask: _masked(A, v, 1 - mask),
            "The mask acts before the softmax: a score of zero still gets attention. Multiply A itself.": (
                lambda A, v, mask: (A.log() * mask[:, None, None]).softmax(-1) @ v
            ),
            "The rows are made to sum to one again, which undoes the mask.": lambda A, v, mask: (
                _masked(A, v, mask) / (A * mask[:, None, None]).sum(-1, keepdim=True).clamp(min=1e-9)
            ),
            "The mask is rounded to 0 or 1; numbers between them weaken a head.": lambda A, v, mask: _masked(
                A, v, mask.round()
            ),
            "The mask is applied twice, to A and to v.": lambda A, v, mask: _masked(A, v, mask) * mask[:, None, None],
            "Silenced heads are removed; their output must stay, as zeros. Removing them is called pruning.": (
                lambda A, v, mask: (A @ v)[:, mask > 0]
            ),
            "The mask is read backwards: its first number belongs to the first head.": lambda A, v, mask: _masked(
                A, v, mask.flip(0)
            ),
            "The mask is added to A; multiply.": lambda A, v, mask: (A + mask[:, None, None]) @ v,
            "The heads are averaged; Eq. 8 joins them later.": lambda A, v, mask: _masked(A, v, mask).mean(1),
        },
    },
    "ridge": {
        "title": "Section 4.1, few-shot: least squares on frozen features",
        "task": "From features X [n, F], targets Y [n, K] of -1 and +1 and the number l2, compute the weights W [F, K] "
        "that make the squared error of X W plus l2 times the sum of W^2 smallest: (X^T X + l2 I)^-1 X^T Y.",
        "start": "def ridge(X, Y, l2): ...",
        "shape": "[F, K]",
        "inputs": _ridge_inputs,
        "answer": _ridge,
        "mistakes": {
            "The term l2 I is missing.": lambda X, Y, l2: _ridge(X, Y, 0.0),
            "l2 is added to every entry of X^T X; add it to the diagonal, l2 * torch.eye(F).": lambda X, Y, l2: (
                torch.linalg.solve(X.T @ X + l2, X.T @ Y)
            ),
            "l2 is multiplied by the number of images.": lambda X, Y, l2: _ridge(X, Y, l2 * len(X)),
            "l2 is divided by the number of images.": lambda X, Y, l2: _ridge(X, Y, l2 / len(X)),
            "l2 is subtracted; add it.": lambda X, Y, l2: _ridge(X, Y, -l2),
            "l2 is squared; it multiplies the identity as it is.": lambda X, Y, l2: _ridge(X, Y, l2**2),
            "X X^T is used instead of X^T X, and X^T is missing: this has one row per image, W one per feature.": (
                lambda X, Y, l2: torch.linalg.solve(X @ X.T + l2 * torch.eye(len(X)), Y)
            ),
            "The inverse is missing: this is X^T Y alone.": lambda X, Y, l2: X.T @ Y,
            "X^T Y is multiplied by X^T X + l2 I; it has to be multiplied by the inverse (torch.linalg.solve).": (
                lambda X, Y, l2: (X.T @ X + l2 * torch.eye(X.shape[1])) @ X.T @ Y
            ),
            "The inverse is taken of each number (1 / ...); it is the inverse of a matrix.": lambda X, Y, l2: (
                (1 / (X.T @ X + l2 * torch.eye(X.shape[1]))) @ X.T @ Y
            ),
            "W is transposed: it is [F, K].": lambda X, Y, l2: _ridge(X, Y, l2).T,
            "These are the predictions X W; return W.": lambda X, Y, l2: X @ _ridge(X, Y, l2),
            "The targets are changed to 0 and 1; keep -1 and +1.": lambda X, Y, l2: _ridge(X, (Y + 1) / 2, l2),
        },
    },
    "rollout": {
        "title": "Appendix D.8, Figure 6: attention rollout",
        "task": "From the attention of all layers, A [L, h, T, T], the first layer first: average the heads, mix each "
        "layer with the residual as 0.5 A + 0.5 I, and multiply the layers, so that entry [i, j] says how much of "
        "input token j reaches output token i.",
        "start": "def rollout(A): ...",
        "shape": "[T, T]",
        "inputs": lambda seed: (random(seed, (4, 3, 5, 5))[0].softmax(-1),),
        "answer": lambda A: _product(A.mean(1)),
        "mistakes": {
            "The residual is missing: mix each layer with the identity, 0.5 A + 0.5 I.": lambda A: _product(
                A.mean(1), own=0.0
            ),
            "The layers are in the wrong order: the last layer stands at the left, A_L ... A_2 A_1.": lambda A: (
                _product(A.mean(1), first_last=False)
            ),
            "A + I is not halved, so rows no longer sum to one.": _summed,
            "The heads are summed; average them.": lambda A: _product(A.sum(1)),
            "The largest head is taken (amax); average them.": lambda A: _product(A.amax(1)),
            "The smallest head is taken (amin); average them.": lambda A: _product(A.amin(1)),
            "Only the first head is used; average all of them.": lambda A: _product(A[:, 0]),
            "Only the last layer is used; multiply all of them.": lambda A: _product(A.mean(1)[-1:]),
            "Only the first layer is used; multiply all of them.": lambda A: _product(A.mean(1)[:1]),
            "The last layer is left out.": lambda A: _product(A.mean(1)[:-1]),
            "The first layer is left out.": lambda A: _product(A.mean(1)[1:]),
            "The layers are averaged; multiply them as matrices.": lambda A: _product(A.mean((0, 1))[None]),
            "The layers are multiplied entry by entry (*); use a matrix product (@).": lambda A: (
                0.5 * A.mean(1) + 0.5 * torch.eye(A.shape[-1])
            ).prod(0),
            "The result is transposed: rows are the output tokens.": lambda A: _product(A.mean(1)).T,
            "Only the row of the class token is returned; return all rows.": lambda A: _product(A.mean(1))[0],
        },
    },
    "pixels": {
        "title": "From a photo to the model's input",
        "task": "Turn photos [B, H, W, C] of whole numbers from 0 to 255 into the input of a model: from 0 to 1, "
        "minus mean [C], divided by std [C], with the channels first.",
        "start": "def pixels(x, mean, std): ...",
        "shape": "[B, C, H, W]",
        "inputs": _photo_inputs,
        "answer": _ready,
        "mistakes": {
            "The numbers are not divided by 255: mean and std are for 0 to 1.": lambda x, mean, std: (
                (x - mean) / std
            ).permute(0, 3, 1, 2),
            "The numbers are divided by 256; white is 255.": lambda x, mean, std: ((x / 256 - mean) / std).permute(
                0, 3, 1, 2
            ),
            "mean and std are missing.": lambda x, mean, std: (x / 255).permute(0, 3, 1, 2),
            "std is missing.": lambda x, mean, std: (x / 255 - mean).permute(0, 3, 1, 2),
            "mean is missing.": lambda x, mean, std: (x / 255 / std).permute(0, 3, 1, 2),
            "The channels are still last. Use .permute(0, 3, 1, 2).": lambda x, mean, std: (x / 255 - mean) / std,
            "Height and width are swapped: the photos lie on their side.": lambda x, mean, std: _ready(x, mean, std).mT,
            "A reshape does not move axes: it cuts the numbers in another way. Use .permute(0, 3, 1, 2).": (
                lambda x, mean, std: ((x / 255 - mean) / std).reshape(len(x), x.shape[3], x.shape[1], x.shape[2])
            ),
            "The colours are blue, green, red here, as OpenCV reads them; the model expects red, green, blue.": (
                lambda x, mean, std: _ready(x.flip(3), mean, std)
            ),
            "std is multiplied; divide by it.": lambda x, mean, std: ((x / 255 - mean) * std).permute(0, 3, 1, 2),
            "std divides before mean is subtracted: first subtract, then divide.": lambda x, mean, std: (
                x / 255 / std - mean
            ).permute(0, 3, 1, 2),
            "mean and std are swapped.": lambda x, mean, std: _ready(x, std, mean),
            "mean and std are those of these photos; a model expects those of its training.": _own_statistics,
        },
    },
}
