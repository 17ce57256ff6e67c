"""Whatever predicts: pixels -> logits, with what it wants to be fed. A ViT is one as it is; so is an exported model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vitkit.model.config import InputSpec


@runtime_checkable
class Classifier(Protocol):
    """Pixels [B, C, H, W], normalised as `input_spec` says, to logits [B, K]; `input_spec` also names the classes."""

    input_spec: InputSpec

    def __call__(self, x: Tensor, /) -> Tensor:
        """Logits of a batch."""
        ...


def device_of(predictor: Classifier) -> torch.device:
    """Where the predictor's weights are; the CPU for one that holds no torch weights."""
    first = next(predictor.parameters(), None) if isinstance(predictor, nn.Module) else None
    return first.device if first is not None else torch.device("cpu")


@contextmanager
def evaluating(predictor: Classifier) -> Iterator[None]:
    """Inside, nothing is random and nothing is kept for gradients; the predictor leaves as it came."""
    was = predictor.training if isinstance(predictor, nn.Module) else False
    if isinstance(predictor, nn.Module) and was:
        predictor.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if isinstance(predictor, nn.Module) and was:
            predictor.train()
