"""The running average of the weights (Polyak): after each step, average = decay x average + (1 - decay) x weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """A second set of weights that follows the first.

    Args:
        model: whose weights are followed; the average starts as a copy of them.
        decay: near 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Follow the model's weights by one step."""
        torch._foreach_lerp_(list(self.weights.values()), list(self.model.parameters()), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[nn.Module]:
        """The model has the average's weights inside, and its own again afterwards."""
        self._swap()
        try:
            yield self.model
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.model.named_parameters():
            own = parameter.detach().clone()
            parameter.copy_(self.weights[name])
            self.weights[name].copy_(own)
