"""A whole training step as one CUDA graph: loss, gradients, clipping, update and running average (`WholeStep`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vitkit.data.batch import Batch
from vitkit.runtime import Runtime
from vitkit.training.objectives import Objective
from vitkit.training.optim import Update

Capture = Callable[[Callable[[], Any]], tuple[Any, Any]]  # work -> a graph with `replay()`, and the work's result

EAGER = 2  # steps before the capture: they choose and load kernels, and create the optimizer's state


class WholeStep:
    """Does training steps by replaying one that it captured, so that Python launches one thing instead of hundreds.

    Random numbers are drawn as without the graph, from the generator's present seed.

    Args:
        model: the module to train; its method `capturable` tells of pixels whether their forward pass can be captured,
            and its attribute `graph` whether it captures its own passes.
        objective: what is learnt; it must be `capturable` too.
        update: how gradients become weights.
        images: what the sum of losses is divided by.
        runtime: sets the precision.
        capture: captures work on the device.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, update: Update, images: float, runtime: Runtime, capture: Capture
    ) -> None:
        self.model, self.objective, self.update = model, objective, update
        self.images, self.runtime, self.capture = images, runtime, capture
        model.graph = False  # type: ignore[assignment]  # its two passes become part of this graph
        self.eager = EAGER
        self.batch: Batch | None = None  # what the graph reads
        self.graph: Any = None
        self.total = torch.empty(0)

    @staticmethod
    def possible(model: nn.Module, objective: Objective, update: Update) -> bool:
        """Return whether steps of this kind can be captured at all."""
        return update.capturable and objective.capturable and hasattr(model, "capturable")

    def takes(self, batch: Batch) -> bool:
        """Return whether this step can be done here: not the first ones, nor what cannot be captured."""
        if self.eager:
            self.eager -= 1
            return False
        if self.batch is not None:
            return self.batch.pixels.shape == batch.pixels.shape
        with self.runtime.autocast():
            return bool(self.model.capturable(batch.pixels))  # type: ignore[operator]

    def __call__(self, batch: Batch) -> Tensor:
        """Do one step; return the sums of losses and of correct answers, 0, and the gradient's norm before clipping.

        The next step overwrites them.
        """
        names = [field.name for field in fields(batch) if isinstance(getattr(batch, field.name), Tensor)]
        if self.batch is None:
            still = Batch(**{name: getattr(batch, name).clone() for name in names})
            self.graph, self.total = self.capture(lambda: self.work(still))
            self.batch = still
        for name in names:
            getattr(self.batch, name).copy_(getattr(batch, name))
        self.graph.replay()
        return self.total

    def work(self, batch: Batch) -> Tensor:
        """Do one step kernel by kernel; return what a call returns."""
        # Stand-ins share the parameters' memory. The parameters' own gradient accumulators may belong to another
        # stream, if a loss that was computed from them is still alive.
        stands = {name: p.detach().requires_grad_(p.requires_grad) for name, p in self.model.named_parameters()}
        forward = _Forward(self.model, stands)
        loss, correct = self.objective.loss(forward, batch, 0, self.runtime)
        trained = {name: stand for name, stand in stands.items() if stand.requires_grad}
        found = torch.autograd.grad(loss / self.images, list(trained.values()), allow_unused=True)
        parameters = dict(self.model.named_parameters())
        for name, gradient in zip(trained, found, strict=True):
            parameters[name].grad = gradient
        total = self.update.measure(torch.stack([loss.detach(), correct, torch.zeros_like(correct)]))
        self.update.apply()
        return total


class _Forward(nn.Module):
    """A module's forward pass with other parameters.

    Args:
        model: the module.
        parameters: by name.
    """

    def __init__(self, model: nn.Module, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.others = model, parameters

    def forward(self, x: Tensor) -> Any:
        """What the model computes of x."""
        return functional_call(self.model, self.others, (x,))
