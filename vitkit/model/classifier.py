"""The interface of everything that classifies: a ViT has it as it is, and so does an exported model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.model.config import InputSpec


@runtime_checkable
class Classifier(Protocol):
    """Maps pixels [B, C, H, W], preprocessed as `input_spec` says, to logits [B, K]; `input_spec` names the classes."""

    input_spec: InputSpec

    def __call__(self, x: Tensor, /) -> Tensor:
        """Return the logits of a batch."""
        ...


def probabilities(logits: Tensor, spec: InputSpec) -> Tensor:
    """Return the probabilities [..., K] float64 of logits: of the classes, or of each label for itself.

    Args:
        logits: [..., K].
        spec: the model's; says which of the two its outputs are.
    """
    return logits.double().sigmoid() if spec.several else logits.double().softmax(-1)


def log_probabilities(logits: Tensor, spec: InputSpec) -> Tensor:
    """Return the logarithm of the same probabilities, in the type of the logits."""
    return F.logsigmoid(logits) if spec.several else logits.log_softmax(-1)


def device_of(model: Classifier) -> torch.device:
    """Return the device of the model's weights; the CPU if it has no torch weights."""
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return first.device if first is not None else torch.device("cpu")


@contextmanager
def evaluating(model: Classifier | nn.Module) -> Iterator[None]:
    """Switch to eval mode without gradients; on exit the model is back in the mode it had before."""
    training = isinstance(model, nn.Module) and model.training
    if isinstance(model, nn.Module) and training:
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if isinstance(model, nn.Module) and training:
            model.train()


class Running:
    """A model as one of the ways to run it.

    Args:
        build: returns the function from pixels to logits; called for the first batch, while the next are decoded.
        input_spec: the model's.
    """

    def __init__(self, build: Callable[[], Callable[[Tensor], Tensor]], input_spec: InputSpec) -> None:
        self.build, self.input_spec = functools.cache(build), input_spec

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits [B, K]."""
        return self.build()(x)
