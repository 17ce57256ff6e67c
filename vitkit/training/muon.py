"""Muon (Jordan et al., 2024): the momentum of a matrix, made orthogonal, is its update.

torch.optim.Muon does the same one matrix after another, which took half of a training step of a small ViT on a GPU.
Here matrices of one shape, or of its transpose, are made orthogonal together. q, k and v, which lie in one weight, are
three matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

STEPS = 5
A, B, C = 3.4445, -4.7750, 2.0315  # of the quintic: singular values near 0 grow fast, and all end between 0.7 and 1.2
TINY = 1e-7  # the least norm to divide by


def orthogonal(G: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrix of each matrix, roughly, by Newton and Schulz's iteration.

    Args:
        G: [n, rows, columns]; on CUDA the products are computed in bf16.
    """
    X = G.bfloat16() if G.is_cuda else G
    X = X.mT if (tall := X.shape[1] > X.shape[2]) else X
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=TINY)  # so that no singular value is above 1
    for _ in range(STEPS):
        S = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(S, S, S, beta=B, alpha=C), X, beta=A)  # A X + (B S + C S^2) X
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    """Muon for the matrices, and AdamW for everything else.

    An update is scaled to the size of AdamW's, 0.2 per weight (arXiv 2502.16982), so both take the same learning rate
    and weight decay. As with torch's fused optimizers, an attribute `found_inf` that is not 0 leaves the weights as
    they are; and with `capturable` and learning rates on the device, an update can be captured as a CUDA graph.

    Args:
        groups: parameter groups; `pieces` is the number of matrices in each of its weights, 0 for AdamW.
        momentum: of the matrices; Nesterov's.
        how: AdamW's arguments.
    """

    def __init__(self, groups: list[dict[str, Any]], momentum: float, **how: Any) -> None:
        super().__init__(groups, {**how, "momentum": momentum})
        others = [group for group in self.param_groups if not group["pieces"]]
        self.adamw = torch.optim.AdamW(others, **how) if others else None
        if self.adamw is not None:  # the same groups and the same state: one optimizer to everyone else
            self.param_groups = [group for group in self.param_groups if group["pieces"]] + self.adamw.param_groups
            self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do one update, without waiting for the device."""
        assert closure is None
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        alike: dict[tuple[int, int], list[tuple[Any, Tensor, Tensor]]] = {}  # shape -> rate, weight and gradient
        for group in self.param_groups:
            weights = [p for p in group["params"] if group["pieces"] and p.grad is not None]
            if not weights:
                continue
            for p in weights:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            grads, kept = [p.grad for p in weights], [self.state[p]["momentum"] for p in weights]
            rate = group["lr"] if found_inf is None else group["lr"] * (1 - found_inf)
            torch._foreach_lerp_(kept, grads, 1 - group["momentum"])
            for p, found in zip(weights, torch._foreach_lerp(grads, kept, group["momentum"]), strict=True):
                for w, g in zip(p.chunk(group["pieces"]), found.chunk(group["pieces"]), strict=True):
                    shape = (min(w.shape), max(w.shape))
                    alike.setdefault(shape, []).append((rate, *((w.mT, g.mT) if w.shape != shape else (w, g))))
            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        for shape, those in alike.items():
            updates = orthogonal(torch.stack([g for _, _, g in those])).to(those[0][1].dtype)
            rates = [rate for rate, _, _ in those]
            several = torch.stack(rates) if isinstance(rates[0], Tensor) else updates.new_tensor(rates)
            updates = updates * (-0.2 * max(shape) ** 0.5 * several)[:, None, None]
            if found_inf is not None:
                updates = torch.where(found_inf == 0, updates, 0)  # not NaN times 0
            torch._foreach_add_([w for _, w, _ in those], list(updates.unbind()))
        if self.adamw is not None:
            if found_inf is not None and self.adamw.defaults["fused"]:
                self.adamw.found_inf = found_inf  # type: ignore[attr-defined]
            self.adamw.step()
