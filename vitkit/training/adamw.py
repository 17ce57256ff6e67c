"""AdamW whose update also clips (`OnePassAdamW`), for CUDA.

torch clips in a pass of its own, which reads and writes all gradients before AdamW reads them again. Here `measure`
finds their norm, and the update scales what it reads. The kernel is in triton_adamw.py; the same in plain torch, which
runs on other devices and which tests compare the kernel with, scales the gradients first.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vitkit.data.resize import by_triton

COUNT = 24  # weights of equal size that one launch updates: their addresses are arguments of the kernel
BLOCK, TURNS, WARPS = 1024, 4, 4  # elements that a program loads at once, how often, and by how many warps
SMALL = 1e-6  # is added to the norm, as in torch
ALIGNED = 16  # bytes, of which the kernel expects addresses to be multiples


class OnePassAdamW(torch.optim.AdamW):
    """torch's AdamW for weights in fp32, with clipping as a part of `step`.

    Its state is that of torch's. As with torch's fused one, an attribute `found_inf` that is not 0 leaves the weights
    as they are, and an update can be captured as a CUDA graph.

    Args:
        params: parameters, or groups of them; learning rates are tensors on the device.
        how: the arguments of torch.optim.AdamW.
    """

    scale: Tensor | None = None  # what the next step multiplies gradients by

    def measure(self, limit: float | None) -> Tensor:
        """Return the norm of all gradients; if it is larger than `limit`, the next step scales them down to that.

        Args:
            limit: the largest norm allowed; None for any.
        """
        found = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(found)
        self.scale = None if limit is None else (limit / (norm + SMALL)).clamp(max=1.0)
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights, without waiting for the device."""
        assert closure is None
        scale, self.scale = self.scale, None
        if by_triton(self.param_groups[0]["params"][0]):
            for group in self.param_groups:
                self._update(group, scale)
            return
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad = aligned(p.grad) * (1.0 if scale is None else scale)  # torch reads them in the order of memory
        inspect.unwrap(torch.optim.AdamW.step)(self)

    def _update(self, group: dict[str, Any], scale: Tensor | None) -> None:
        from vitkit.training import triton_adamw

        weights: list[Tensor] = []
        gradients: list[Tensor] = []
        first: list[Tensor] = []
        second: list[Tensor] = []
        steps: list[Tensor] = []
        self._init_group(group, weights, gradients, first, second, [], steps)  # type: ignore[no-untyped-call]
        if not weights:
            return
        torch._foreach_add_(steps, 1)
        broken = getattr(self, "found_inf", None)
        broken = steps[0].new_zeros(()) if broken is None else broken
        scale = steps[0].new_ones(()) if scale is None else scale
        beta1, beta2 = group["betas"]
        alike: dict[int, list[tuple[Tensor, ...]]] = {}  # size -> weights with their gradients and moments
        for four in zip(weights, map(aligned, gradients), first, second, strict=True):
            alike.setdefault(four[0].numel(), []).append(four)
        for size, those in alike.items():
            for some in (those[i : i + COUNT] for i in range(0, len(those), COUNT)):
                filled = some + some[:1] * (COUNT - len(some))  # one kernel serves any number of weights
                triton_adamw.adamw[(-(-size // (BLOCK * TURNS)), len(some))](
                    *zip(*filled, strict=True),
                    steps[0],
                    group["lr"],
                    scale,
                    broken,
                    size,
                    group["weight_decay"],
                    1 - beta1,
                    1 - beta2,
                    group["eps"],
                    LOG1=math.log2(beta1),
                    LOG2=math.log2(beta2),
                    COUNT=COUNT,
                    BLOCK=BLOCK,
                    TURNS=TURNS,
                    num_warps=WARPS,
                )
        torch._foreach_sub_(steps, [broken.view(())] * len(steps))


def takes(parameters: Iterable[Tensor]) -> bool:
    """Return whether the kernel updates these: parameters in fp32 that lie in memory as it expects."""
    return all(p.dtype == torch.float32 and aligned(p) is p for p in parameters)


def aligned(x: Tensor) -> Tensor:
    """Return a tensor whose elements lie side by side, from an address on that the kernel takes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNED else x
