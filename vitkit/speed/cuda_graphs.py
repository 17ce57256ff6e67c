"""Work as CUDA graphs, which saves the time between kernels: anything (`capture`), or a training step (GraphedStep)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from vitkit.speed.differentiable import Context

Result = TypeVar("Result")


def warm_up(work: Callable[[], object]) -> None:
    """Run work on a stream of its own: kernels are chosen and loaded before they are captured.

    Args:
        work: CUDA work.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)


def capture(work: Callable[[], Result], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of some work, and the result that every replay writes anew.

    Args:
        work: CUDA work that has run before.
        pool: another graph's, whose memory this work reads.
    """
    graph = torch.cuda.CUDAGraph()
    # cuBLAS keeps its working memory for the next who asks. Captured, that memory must be this graph's alone: another
    # graph's ends with it, and torch.compile's CUDA graphs give it away.
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.graph(graph, pool=pool):
        result = work()
    torch._C._cuda_clearCublasWorkspaces()
    return graph, result


class GraphedStep:
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

        def both() -> None:
            logits = forward()
            backward(logits, torch.zeros_like(logits))

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
    """A graphed's logits, and its gradients to the parameters that it was made of."""

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
