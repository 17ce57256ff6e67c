"""A linear head over frozen features, and how it becomes part of a model.

Legend: F values per feature, K classes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from vitkit.errors import ConfigError
from vitkit.features.choice import Choice
from vitkit.model.parts.layers import POOLS
from vitkit.model.vit import ViT
from vitkit.types import Array

TINY = 1e-5  # added to standard deviations, as the authors' few-shot evaluation does


@dataclass(frozen=True)
class Head:
    """A linear classifier: logits = X W' + b.

    Args:
        W: [K, F] float64.
        b: [K] float64.
    """

    W: Array
    b: Array

    def logits(self, X: Array) -> Array:
        """Return the logits [n, K] of features [n, F]."""
        return X @ self.W.T + self.b

    def over(self, scale: Standard) -> Head:
        """Return the head over raw features that equals this one over standardised features.

        W ((x - m) / s) + b  =  (W / s) x + (b - (W / s) m)
        """
        W = self.W / scale.s
        return Head(W, self.b - W @ scale.m)

    def times(self, factor: float) -> Head:
        """Multiply the logits by a positive number: the same answers with more or less confidence."""
        return Head(self.W * factor, self.b * factor)


@dataclass(frozen=True)
class Standard:
    """Mean and standard deviation of features, [F] float64 each."""

    m: Array
    s: Array

    @classmethod
    def of(cls, X: Array) -> Standard:
        """Compute both from features [n, F]."""
        return cls(X.mean(0, dtype=np.float64), X.std(0, dtype=np.float64) + TINY)

    def __call__(self, X: Array) -> Array:
        """Return standardised features, float64."""
        return (X - self.m) / self.s


def attach(model: ViT, head: Head, class_names: Sequence[str], choice: Choice) -> ViT:
    """Return an ordinary model with the backbone of `model` and this head.

    Args:
        model: the backbone; its tensors are shared, not copied.
        head: a head over raw features (see `Head.over`).
        class_names: names of the head's outputs.
        choice: the feature that the head was fitted to.

    Raises:
        ConfigError: a Vision Transformer cannot feed this feature to its head.
    """
    check_attachable(choice)
    c = model.config
    config = dataclasses.replace(
        c,
        num_classes=len(class_names),
        pool="mean" if choice.name == "mean" else c.pool if choice.name == "pre-logits" else "cls",
        pre_logits=choice.name == "pre-logits",
        norm_after_pool=c.norm_after_pool and choice.name != "cls",
    )
    new = copy.copy(model)
    new._modules = dict(model._modules)  # a table of its own, so that replacing the head leaves `model` as it is
    new.config, new.input_spec = config, dataclasses.replace(model.input_spec, class_names=tuple(class_names))
    new.pool, new.pre_logits = POOLS[config.pool](config), model.pre_logits if config.pre_logits else None
    linear = nn.Linear(*reversed(head.W.shape))
    for name, value in (("weight", head.W), ("bias", head.b)):
        setattr(linear, name, nn.Parameter(torch.from_numpy(value).to(model.norm.weight)))
    new.head = linear
    return new.eval()


def check_attachable(choice: Choice) -> None:
    """Raise ConfigError if a Vision Transformer cannot feed this feature to its head."""
    if choice.layers:
        raise ConfigError(
            f"Expected a feature that a Vision Transformer can feed to its head: cls, mean or pre-logits; got "
            f"{choice.name}. Use one of those, or export the layers with vitkit embed."
        )
