"""How a model that is not being trained runs in a precision: fused on CUDA in bf16, and as it is otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitkit.model.parts.fit import unfit
from vitkit.model.vit import ViT
from vitkit.speed.kernels import run_on

FUSED = "bf16, fused"
FEW = 2000  # images up to which starting the fused engine takes longer than it saves


@dataclass(frozen=True)
class Way:
    """One way to run a model.

    Args:
        name: the precision, and the engine if it is not the plain model; stands in results and in the cache's key.
        build: returns the function from pixels on the model's device to logits or features; None for the plain model
            under the caller's autocast.
    """

    name: str
    build: Callable[[], Callable[[Tensor], Tensor]] | None = None


def way(model: object, precision: str, images: int, features: str | None = None, batch_size: int = 0) -> Way:
    """Return how a model runs: by the fused engine if it is a ViT on CUDA in bf16 that the engine computes.

    Args:
        model: a model in eval mode, on its device.
        precision: fp32, bf16 or fp16.
        images: how many there are; for a few, the engine is not worth its start.
        features: the feature that is wanted, as `vitkit.features.choose` names it (default: logits).
        batch_size: images per batch. The engine chooses its kernels by the size of a batch, so a smaller last one is
            filled up rather than chosen for (default: never).
    """
    if (
        images <= FEW
        or precision != "bf16"
        or not isinstance(model, ViT)
        or not (weight := model.patch_embedding.projection.weight).is_cuda
        or not run_on(weight.device)
    ):
        return Way(precision)
    from vitkit.speed.fused import TAKES, Fused

    if unfit(model.config, TAKES) or features not in (None, model.config.pool):
        return Way(precision)

    @functools.cache  # several data sets share one engine
    def build() -> Callable[[Tensor], Tensor]:
        return filled_up(Fused(model, share=True, head=features is None), batch_size)

    return Way(FUSED, build)


def filled_up(run: Callable[[Tensor], Tensor], size: int) -> Callable[[Tensor], Tensor]:
    """Return a function that gives smaller batches this size and leaves the answers for what it added out."""

    def call(x: Tensor) -> Tensor:
        more = x.new_zeros((max(0, size - len(x)), *x.shape[1:]))
        return run(torch.cat([x, more]) if len(more) else x)[: len(x)]

    return call
