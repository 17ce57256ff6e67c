"""A training step's forward and backward as CUDA graphs, which saves the time between their kernels."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

Context = Any       # torch's own type of a Function's context says nothing of what is kept in it


class Recording:
    """Forward and backward for pixels of one shape as CUDA graphs; random numbers go on as if nothing had happened.

    torch's own `make_graphed_callables` records with the parameters themselves, and fails where somebody still holds
    a loss of theirs: what adds up a parameter's gradient then belongs to another stream. Here stand-ins are recorded,
    which share the parameters' memory and which nobody else knows.

    Args:
        module: takes pixels and gives logits; runs under autocast to bf16.
        x: pixels; their values do not matter.
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

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):               # kernels are chosen and loaded before they are recorded
            for _ in range(3):
                logits = forward()
                backward(logits, torch.zeros_like(logits))
                del logits                          # and with it what belongs to this stream
        torch.cuda.current_stream().wait_stream(side)
        self.ahead, self.back = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.ahead):
            logits = forward()
        self.gradient = torch.zeros_like(logits)
        with torch.cuda.graph(self.back, pool=self.ahead.pool()):
            self.gradients = backward(logits, self.gradient)
        self.logits = logits.detach()
        torch.cuda.set_rng_state(random, x.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Logits [B, K] of pixels of this shape."""
        return cast(Tensor, Replay.apply(self, x, *self.parameters))  # type: ignore[no-untyped-call]


class Replay(torch.autograd.Function):
    """A recording's logits, and its gradients to the parameters that it was made of."""

    @staticmethod
    def forward(ctx: Context, recording: Recording, x: Tensor, *_: Tensor) -> Tensor:
        """Logits [B, K]."""
        ctx.recording = recording
        recording.x.copy_(x)
        recording.ahead.replay()
        return recording.logits.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the parameters; pixels get none."""
        ctx.recording.gradient.copy_(gradient)
        ctx.recording.back.replay()
        return None, None, *(None if g is None else g.detach() for g in ctx.recording.gradients)
