"""Exercises on Eqs. 5-8: attention.

Legend: B images, N tokens, D width, h heads, d = D / h.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitkit.learn.embedding import random


def heads(z: Tensor, h: int) -> Tensor:
    """[B, N, D] -> [B, h, N, d]."""
    return z.unflatten(2, (h, -1)).transpose(1, 2)


def split(z: Tensor, U: Tensor, b: Tensor, h: int) -> tuple[Tensor, ...]:
    """Eq. 5: q, k, v, each [B, h, N, d]."""
    return tuple(heads(part, h) for part in (z @ U + b).chunk(3, dim=-1))


def _mixed(z: Tensor, U: Tensor, b: Tensor, h: int) -> tuple[Tensor, ...]:
    parts = (z @ U + b).chunk(3, dim=-1)
    return tuple(part.reshape(len(z), h, z.shape[1], -1) for part in parts)


def _by_head(z: Tensor, U: Tensor, b: Tensor, h: int) -> tuple[Tensor, ...]:
    return tuple((z @ U + b).unflatten(2, (h, 3, -1)).permute(3, 0, 2, 1, 4))


def _interleaved(z: Tensor, U: Tensor, b: Tensor, h: int) -> tuple[Tensor, ...]:
    return tuple(heads(part, h) for part in (z @ U + b).unflatten(2, (-1, 3)).unbind(-1))


def _lanes_first(z: Tensor, U: Tensor, b: Tensor, h: int) -> tuple[Tensor, ...]:
    parts = (z @ U + b).chunk(3, dim=-1)
    return tuple(part.unflatten(2, (-1, h)).permute(0, 3, 1, 2) for part in parts)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Eq. 6."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


def join(sa: Tensor) -> Tensor:
    """[B, h, N, d] -> [B, N, h d]."""
    return sa.transpose(1, 2).flatten(2)


def _causal(q: Tensor, k: Tensor) -> Tensor:
    N = q.shape[-2]
    later = torch.ones(N, N).triu(1).bool()
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, float("-inf")).softmax(-1)


def _inputs_qk(seed: int) -> tuple[Tensor, ...]:
    return random(seed, (2, 3, 6, 4), (2, 3, 6, 4))


def _inputs_av(seed: int) -> tuple[Tensor, ...]:
    q, k, v = random(seed, (2, 3, 6, 6), (2, 3, 6, 6), (2, 3, 6, 6))
    return scores(q, k), v


EXERCISES: dict[str, dict[str, Any]] = {
    "qkv": {
        "title": "Eq. 5: [q, k, v] = z U_qkv",
        "task": "Project z [B, N, D] with U [D, 3D] and b [3D], and split the result into q, k and v for h heads. The "
        "columns of U are q, then k, then v, each with its heads one after another.",
        "start": "def qkv(z, U, b, h): ...    # return q, k, v",
        "shape": "[B, h, N, d]",
        "inputs": lambda seed: (*random(seed, (2, 6, 12), (12, 36), (36,)), 3),
        "answer": split,
        "mistakes": {
            "The heads are mixed up: .view(B, h, N, d) cuts the tokens apart. Use .view(B, N, h, d), then transpose.": (
                _mixed
            ),
            "q, k and v are taken head by head, as if U's columns were (h, 3, d); they are (3, h, d).": _by_head,
            "q, k and v are taken in turns, as if U's columns were (h, d, 3); they are (3, h, d).": _interleaved,
            "The width is split as (d, h) instead of (h, d): every head gets lanes of all heads.": _lanes_first,
            "The heads stay on axis 2, [B, N, h, d]. Bring them before the tokens with .transpose(1, 2).": (
                lambda z, U, b, h: tuple(part.transpose(1, 2) for part in split(z, U, b, h))
            ),
            "The heads are not split; q, k and v are still [B, N, D].": lambda z, U, b, h: (z @ U + b).chunk(3, dim=-1),
            "The bias is missing.": lambda z, U, b, h: split(z, U, torch.zeros_like(b), h),
            "k and v are swapped: the order is q, k, v.": lambda z, U, b, h: tuple(
                split(z, U, b, h)[i] for i in (0, 2, 1)
            ),
            "q and k are swapped: the order is q, k, v.": lambda z, U, b, h: tuple(
                split(z, U, b, h)[i] for i in (1, 0, 2)
            ),
            "The order is v, k, q; it should be q, k, v.": lambda z, U, b, h: split(z, U, b, h)[::-1],
            "k is already transposed, [B, h, d, N]; Eq. 6 does that.": lambda z, U, b, h: tuple(
                part.mT if i == 1 else part for i, part in enumerate(split(z, U, b, h))
            ),
            "q is already divided by sqrt(d); that is part of Eq. 6.": lambda z, U, b, h: tuple(
                part / part.shape[-1] ** 0.5 if i == 0 else part for i, part in enumerate(split(z, U, b, h))
            ),
        },
    },
    "scores": {
        "title": "Eq. 6: A = softmax(q k^T / sqrt(d))",
        "task": "From q and k [B, h, N, d], compute how much each token looks at each other.",
        "start": "def scores(q, k): ...",
        "shape": "[B, h, N, N]",
        "inputs": _inputs_qk,
        "answer": scores,
        "mistakes": {
            "The scale is missing: divide q k^T by sqrt(d) before the softmax.": lambda q, k: (q @ k.mT).softmax(-1),
            "The scale is 1 / d; it is 1 / sqrt(d).": lambda q, k: (q @ k.mT / q.shape[-1]).softmax(-1),
            "The scale uses the whole width D = h d; it is that of one head, sqrt(d).": lambda q, k: (
                q @ k.mT / (q.shape[1] * q.shape[-1]) ** 0.5
            ).softmax(-1),
            "The scale uses the number of tokens; it is sqrt(d).": lambda q, k: (q @ k.mT / q.shape[-2] ** 0.5).softmax(
                -1
            ),
            "q k^T is multiplied by sqrt(d) instead of divided.": lambda q, k: (q @ k.mT * q.shape[-1] ** 0.5).softmax(
                -1
            ),
            "The softmax runs over the wrong axis: each row must sum to one (dim=-1), not each column.": lambda q, k: (
                q @ k.mT / q.shape[-1] ** 0.5
            ).softmax(-2),
            "The softmax runs over the heads (dim=1); it runs over the tokens looked at (dim=-1).": lambda q, k: (
                q @ k.mT / q.shape[-1] ** 0.5
            ).softmax(1),
            "The softmax runs over the batch (dim=0); it runs over the tokens looked at (dim=-1).": lambda q, k: (
                q @ k.mT / q.shape[-1] ** 0.5
            ).softmax(0),
            "The softmax is missing.": lambda q, k: q @ k.mT / q.shape[-1] ** 0.5,
            "q and k are swapped: rows must be the tokens that look, q k^T.": lambda q, k: scores(k, q),
            "q is multiplied with itself; the second factor is k.": lambda q, k: scores(q, q),
            "The division by sqrt(d) comes after the softmax, so rows no longer sum to one.": lambda q, k: (
                (q @ k.mT).softmax(-1) / q.shape[-1] ** 0.5
            ),
            "Later tokens are masked, as in a language model. Patches see each other in both directions.": _causal,
            "A sigmoid is used; Eq. 6 has a softmax.": lambda q, k: (q @ k.mT / q.shape[-1] ** 0.5).sigmoid(),
        },
    },
    "attend": {
        "title": "Eq. 7: SA(z) = A v",
        "task": "From A [B, h, N, N] and v [B, h, N, d], compute what each token collects from the others.",
        "start": "def attend(A, v): ...",
        "shape": "[B, h, N, d]",
        "inputs": _inputs_av,
        "answer": lambda A, v: A @ v,
        "mistakes": {
            "A is transposed: rows of A are the tokens that look, and each collects A v.": lambda A, v: A.mT @ v,
            "The factors are swapped: it is A v, not v A.": lambda A, v: v @ A,
            "A and v are multiplied element by element (*); use a matrix product (@).": lambda A, v: A * v,
            "v is transposed.": lambda A, v: A @ v.mT,
            "A is applied twice.": lambda A, v: A @ A @ v,
            "v is added to the result. The residual comes later, in Eq. 2.": lambda A, v: A @ v + v,
            "A gets a second softmax; it is one already.": lambda A, v: A.softmax(-1) @ v,
            "The result is divided by sqrt(d); that scale is part of Eq. 6.": lambda A, v: A @ v / v.shape[-1] ** 0.5,
            "The heads are averaged; Eq. 8 joins them later.": lambda A, v: (A @ v).mean(1),
            "The heads are summed; Eq. 8 joins them later.": lambda A, v: (A @ v).sum(1),
            "Each token gets only the value it looks at most (argmax); weight all of them by A.": lambda A, v: (
                torch.nn.functional.one_hot(A.argmax(-1), A.shape[-1]).to(v) @ v
            ),
            "A is left out.": lambda A, v: v,
        },
    },
    "msa": {
        "title": "Eq. 8: MSA(z) = [SA_1; ...; SA_h] U_msa",
        "task": "Join the heads sa [B, h, N, d] along the width, one after another, and project with U [D, D], b [D].",
        "start": "def msa(sa, U, b): ...",
        "shape": "[B, N, D]",
        "inputs": lambda seed: random(seed, (2, 3, 6, 4), (12, 12), (12,)),
        "answer": lambda sa, U, b: join(sa) @ U + b,
        "mistakes": {
            "The heads are mixed up: transpose (1, 2) before flattening, or tokens and heads change places.": (
                lambda sa, U, b: sa.reshape(len(sa), sa.shape[2], -1) @ U + b
            ),
            "The lanes are joined as (d, h) instead of (h, d): head 1 comes whole, then head 2.": lambda sa, U, b: (
                sa.permute(0, 2, 3, 1).flatten(2) @ U + b
            ),
            "The projection U_msa is missing.": lambda sa, U, b: join(sa),
            "The bias is missing.": lambda sa, U, b: join(sa) @ U,
            "U is transposed.": lambda sa, U, b: join(sa) @ U.T + b,
            "The heads are in reverse order.": lambda sa, U, b: join(sa.flip(1)) @ U + b,
            "The heads are averaged and repeated instead of joined.": lambda sa, U, b: (
                join(sa.mean(1, keepdim=True).expand_as(sa)) @ U + b
            ),
            "The heads are summed and repeated instead of joined.": lambda sa, U, b: (
                join(sa.sum(1, keepdim=True).expand_as(sa)) @ U + b
            ),
            "The input is added to the result. The residual belongs to Eq. 2.": lambda sa, U, b: (
                join(sa) @ U + b + join(sa)
            ),
            "Only the first head is used.": lambda sa, U, b: join(sa[:, :1]) @ U[: sa.shape[-1]] + b,
            "There is an activation after the projection; Eq. 8 is linear.": lambda sa, U, b: (join(sa) @ U + b).relu(),
            "The bias is added before the projection.": lambda sa, U, b: (join(sa) + b) @ U,
        },
    },
}
