"""A training step as CUDA graphs, which save the time between kernels (`GraphedStep`)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from vitkit.cuda_capture import capture, warm_up
from vitkit.speed.differentiable.products import Context


class GraphedStep:
    """Forward and backward passes for pixels of one shape, as CUDA graphs. Random numbers continue as without graphs.

    torch's own `make_graphed_callables` captures the parameters themselves, and fails if a loss computed from them is
    still alive: their gradient accumulators then belong to another stream. This class captures private stand-ins that
    share the parameters' memory.

    Args:
        module: maps pixels to logits; runs under autocast to bf16.
        x: example pixels; only their shape matters.
    """

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        stands = {name: p.detach().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
        wanted = [p for p in stands.values() if p.requires_grad]
        self.x, random = torch.zeros_like(x), torch.cuda.get_rng_state(x.device)

        def forward() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                return cast(Tensor, functional_call(module, stands, (self.x,)))

        def backward(logits: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(logits, wanted, gradient, allow_unused=True)

        def both() -> None:
            logits = forward()
            backward(logits, torch.zeros_like(logits))

        torch.ones(1, device=x.device, requires_grad=True).mul(2).backward()  # else cuBLAS warns in autograd's thread
        warm_up(both)
        self.ahead, logits = capture(forward)
        self.gradient = torch.zeros_like(logits)
        self.back, self.gradients = capture(lambda: backward(logits, self.gradient), self.ahead.pool())
        self.logits = logits.detach()
        torch.cuda.set_rng_state(random, x.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [B, K] of pixels of this shape."""
        return cast(Tensor, Replay.apply(self, x, *self.parameters))  # type: ignore[no-untyped-call]


class Replay(torch.autograd.Function):
    """The logits of a GraphedStep, and its gradients for the parameters."""

    @staticmethod
    def forward(ctx: Context, graphed: GraphedStep, x: Tensor, *_: Tensor) -> Tensor:
        """Logits [B, K]."""
        ctx.graphed = graphed
        graphed.x.copy_(x)
        graphed.ahead.replay()
        return graphed.logits.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the parameters; pixels get none."""
        ctx.graphed.gradient.copy_(gradient)
        ctx.graphed.back.replay()
        return None, None, *(None if g is None else g.detach() for g in ctx.graphed.gradients)
