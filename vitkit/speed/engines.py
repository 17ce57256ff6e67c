"""The ways to run a finished model: ENGINES. Each takes a ViT and gives a function from pixels to logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitkit.model.vit import ViT

Forward = Callable[[Tensor], Tensor]        # pixels [B, C, H, W], on the model's device -> logits [B, K]


@dataclass(frozen=True)
class Engine:
    """One way to run a model.

    Args:
        build: makes the function that runs it; any batch size, the model's own image size.
        tolerance: largest difference of a logit from the plain model's, relative to the largest logit.
        words: what it is, for lists and help.
    """

    build: Callable[[ViT], Forward]
    tolerance: float
    words: str


def plain(model: ViT) -> Forward:
    """The model as it is."""
    return model


def compiled(model: ViT) -> Forward:
    """torch.compile, with a batch size that may vary: compiled once for one image and once for several."""
    forward = torch.compile(model)

    def run(x: Tensor) -> Tensor:
        if len(x) > 1:
            torch._dynamo.mark_dynamic(x, 0)
        return forward(x)

    return run


ENGINES: dict[str, Engine] = {
    "torch": Engine(plain, 0.0, "plain PyTorch: starts at once"),
    "compile": Engine(compiled, 5e-6, "torch.compile: compiles for a minute when it starts, then runs faster"),
}
