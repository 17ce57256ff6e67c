"""Muon (Jordan et al., 2024): the momentum of a matrix, made orthogonal, is its update.

torch.optim.Muon does the same one matrix after another, which took half of a training step of a small ViT on a GPU.
Here matrices of one shape, or of its transpose, are made orthogonal together, and on CUDA an update can be one CUDA
graph. q, k and v, which lie in one weight, are three matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitkit.cuda_capture import capture

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
    and weight decay.

    On CUDA, an update whose gradients lie where they lay in the last one becomes a CUDA graph: such are the gradients
    of a training step that is a graph itself. As with torch's fused optimizers, an attribute `found_inf` that is not 0
    leaves the weights as they are.

    Args:
        groups: parameter groups; `pieces` is the number of matrices in each of its weights, 0 for AdamW.
        momentum: of the matrices; Nesterov's.
        how: AdamW's arguments.
    """

    def __init__(self, groups: list[dict[str, Any]], momentum: float, **how: Any) -> None:
        super().__init__(groups, {**how, "momentum": momentum})
        others = [group for group in self.param_groups if not group["pieces"]]
        device = self.param_groups[0]["params"][0].device
        self.adamw = torch.optim.AdamW(others, **how, capturable=device.type == "cuda") if others else None
        if self.adamw is not None:  # the same groups and the same state: one optimizer to everyone else
            self.param_groups = [group for group in self.param_groups if group["pieces"]] + self.adamw.param_groups
            self.adamw.state = self.state
        self.rates = torch.zeros(len(self.param_groups), device=device)  # learning rate of each group
        self.broken = torch.zeros((), device=device)  # 1 if the update must change nothing
        self.places: tuple[int, ...] = ()  # of the gradients, in the last update
        self.graph: torch.cuda.CUDAGraph | None = None  # an update with gradients at these places

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do one update."""
        assert closure is None
        rates = torch.tensor([group["lr"] for group in self.param_groups])
        if (found := getattr(self, "found_inf", None)) is not None:
            self.broken.copy_(found)
        if not self.rates.is_cuda:
            self.rates.copy_(rates)
            self._update()
            return
        self.rates.copy_(rates.pin_memory(), non_blocking=True)
        every = (p for group in self.param_groups for p in group["params"])
        places = tuple(0 if p.grad is None else p.grad.data_ptr() for p in every)
        if places != self.places:
            self.places, self.graph = places, None
            self._update()
            return
        if self.graph is None:
            self.graph, _ = capture(self._update)
        self.graph.replay()

    def _update(self) -> None:
        """Do one update at the learning rates `rates` unless it is `broken`, without waiting for the device."""
        alike: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = {}  # shape -> group, weight and gradient
        rates, whole = self.rates.unbind(), 1 - self.broken
        for number, group in enumerate(self.param_groups):
            weights = [p for p in group["params"] if group["pieces"] and p.grad is not None]
            if not weights:
                continue
            for p in weights:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            grads, kept = [p.grad for p in weights], [self.state[p]["momentum"] for p in weights]
            torch._foreach_lerp_(kept, grads, 1 - group["momentum"])
            for p, found in zip(weights, torch._foreach_lerp(grads, kept, group["momentum"]), strict=True):
                for w, g in zip(p.chunk(group["pieces"]), found.chunk(group["pieces"]), strict=True):
                    shape = (min(w.shape), max(w.shape))
                    alike.setdefault(shape, []).append((number, *((w.mT, g.mT) if w.shape != shape else (w, g))))
            torch._foreach_mul_(weights, 1 - whole * rates[number] * group["weight_decay"])
        for shape, those in alike.items():
            updates = orthogonal(torch.stack([g for _, _, g in those])).to(those[0][1].dtype)
            steps = torch.stack([rates[number] for number, _, _ in those])
            updates = torch.where(whole > 0, updates * (-0.2 * max(shape) ** 0.5 * steps)[:, None, None], 0)
            torch._foreach_add_([w for _, w, _ in those], list(updates.unbind()))
        if self.adamw is not None:
            given = [group["lr"] for group in self.adamw.param_groups]
            try:
                for group, rate in zip(self.adamw.param_groups, rates[-len(given) :], strict=True):
                    group["lr"] = rate if rate.is_cuda else group["lr"]  # a graph reads it anew
                if self.adamw.defaults["fused"]:
                    self.adamw.found_inf = self.broken  # type: ignore[attr-defined]
                self.adamw.step()
            finally:
                for group, lr in zip(self.adamw.param_groups, given, strict=True):
                    group["lr"] = lr
