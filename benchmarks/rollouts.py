"""Why rollout loses to random on some photos: its choices, one by one, scored by deletion and insertion.

python -m benchmarks.rollouts WEIGHTS --images FOLDER [--count N] [--half even|odd] [--device cpu]

Register neurons are found on images with even numbers. Choose a row on the even half, then report it on the odd one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor

import vitkit
from benchmarks.explain import table
from vitkit import ViT
from vitkit.data import preprocess
from vitkit.data.base import Subset
from vitkit.explanations.attention import attentions
from vitkit.explanations.common import eval_mode, grid_of, patch_map, to_array
from vitkit.explanations.occlusion import Faithfulness, faithfulness
from vitkit.explanations.registers import STANDS_OUT, find, patch_norms, with_registers
from vitkit.jobs.explain import FOUND_ON
from vitkit.jobs.figures import pixels, some_images
from vitkit.types import Array

Choose = Callable[[Tensor], Tensor]


def mean(A: Tensor) -> Tensor:
    return A.mean(1)


def most(A: Tensor) -> Tensor:
    return A.amax(1)


def rolled(
    layers: list[Tensor],
    hidden: list[Tensor] | None = None,
    *,
    heads: Choose = mean,
    residual: float = 1.0,
    first: int = 0,
) -> Tensor:
    """Roll out attention to the class token, [T].

    Args:
        layers: A of each layer, [1, h, T, T].
        hidden: of each layer, the tokens [T] that count as not looked at (default: none).
        heads: how heads become one.
        residual: weight of the identity next to that of attention.
        first: layers before this one are left out.
    """
    R: Tensor | None = None
    for i, A in enumerate(layers[first:], first):
        mixed = heads(A)[0].clone()
        if hidden is not None:
            mixed[:, hidden[i]] = 0
        mixed = mixed / mixed.sum(-1, keepdim=True).clamp(min=1e-12) + residual * torch.eye(len(mixed)).to(mixed)
        mixed = mixed / mixed.sum(-1, keepdim=True)
        R = mixed if R is None else mixed @ R
    assert R is not None
    return R[0]


@torch.no_grad()
def maps(model: ViT, moved: ViT, x: Tensor) -> dict[str, Array]:
    """Return every choice's map of one image, [rows, columns]."""
    c, grid = model.config, grid_of(model, x)
    found: dict[str, Array] = {}
    outliers = patch_norms(model, x)[0, :-1] > STANDS_OUT  # [L, rows, columns], of the input of each layer
    for name, one in (("plain", model), ("registers", moved)):
        prefix, extra = one.config.num_prefix_tokens, one.config.num_prefix_tokens - c.num_prefix_tokens
        with eval_mode(one, x) as (vit, fitted):
            layers = [A.float() for A in attentions(vit, fitted)]
        T, L = layers[0].shape[-1], len(layers)
        odd = torch.zeros(L, T, dtype=torch.bool)
        odd[:, c.num_prefix_tokens : c.num_prefix_tokens + extra] = True  # the registers
        if not extra:
            odd[:, prefix:] = torch.from_numpy(outliers.reshape(L, -1))  # the patches that stand out
        rows = list(odd.to(x.device))
        tokens = [row.index_fill(0, torch.zeros(1, dtype=torch.long, device=x.device), True) for row in rows]
        chosen = {
            "": rolled(layers),
            ", these not looked at": rolled(layers, rows),
            ", nor the class token": rolled(layers, tokens),
            ", these not looked at, residual 1/4": rolled(layers, rows, residual=0.25),
            ", these not looked at, residual 4": rolled(layers, rows, residual=4.0),
            ", these not looked at, the strongest head": rolled(layers, rows, heads=most),
            ", these not looked at, last half of the layers": rolled(layers, rows, first=L // 2),
            ", these not looked at, last quarter of the layers": rolled(layers, rows, first=L - L // 4),
        }
        found |= {f"{name}{words}": patch_map(to_array(row), one, grid) for words, row in chosen.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("--images", required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--half", choices=("even", "odd"), default="even")
    parser.add_argument("--only", action="append", help="rows to score (default: all)")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model = cast(ViT, vitkit.load(args.weights)).to(args.device)
    source = some_images(args.images, 10**9)
    even, odd = (Subset(source, np.arange(first, len(source), 2)) for first in (0, 1))
    few = Subset(even, np.linspace(0, len(even) - 1, min(FOUND_ON, len(even))).round().astype(int))
    neurons = find(model, pixels(few, model.input_spec))
    print(neurons, flush=True)
    moved = with_registers(model, neurons.neurons, neurons.count)
    half = even if args.half == "even" else odd
    scores: dict[str, list[Faithfulness]] = {}
    chosen = np.linspace(0, len(half) - 1, min(args.count, len(half))).round().astype(int)
    for done, i in enumerate(chosen.tolist(), 1):
        x = preprocess(half.read(i)[0], model.input_spec)[None].to(args.device)
        found = {name: one for name, one in maps(model, moved, x).items() if not args.only or name in args.only}
        result = faithfulness(model, x, found)
        for name, score in result.items():
            scores.setdefault(name, []).append(score)
            scores.setdefault(f"random for {name}", []).append(result["random"])
        if done % 10 == 0 or done == len(chosen):
            table(scores)


if __name__ == "__main__":
    main()
