"""A linear head over frozen features, and the model it makes.

Legend: F numbers of a feature, K classes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from vitkit.errors import ConfigError
from vitkit.features.choice import Choice
from vitkit.model.vit import ViT
from vitkit.types import Array

TINY = 1e-5  # added to standard deviations, as the authors' few-shot evaluation does


@dataclass(frozen=True)
class Head:
    """Logits = X W' + b.

    Args:
        W: [K, F] float64.
        b: [K] float64.
    """

    W: Array
    b: Array

    def logits(self, X: Array) -> Array:
        """Logits [n, K] of features [n, F]."""
        return X @ self.W.T + self.b

    def over(self, scale: Standard) -> Head:
        """The same function of features as they come, where this one takes standardised ones.

        W ((x - m) / s) + b  =  (W / s) x + (b - (W / s) m)
        """
        W = self.W / scale.s
        return Head(W, self.b - W @ scale.m)

    def times(self, factor: float) -> Head:
        """Logits multiplied by a positive number: the same answers, more or less sure."""
        return Head(self.W * factor, self.b * factor)


@dataclass(frozen=True)
class Standard:
    """Mean and standard deviation of features, [F] float64 each."""

    m: Array
    s: Array

    @classmethod
    def of(cls, X: Array) -> Standard:
        """That of features [n, F]."""
        return cls(X.mean(0, dtype=np.float64), X.std(0, dtype=np.float64) + TINY)

    def __call__(self, X: Array) -> Array:
        """Standardised features, float64."""
        return (X - self.m) / self.s


def attach(model: ViT, head: Head, class_names: Sequence[str], choice: Choice) -> ViT:
    """An ordinary model: the backbone of `model`, and the head over the feature it was fitted to.

    Args:
        model: the backbone; its tensors are shared, not copied.
        head: fitted to features as they come (see `Head.over`).
        class_names: of the head's outputs.
        choice: the feature.

    Raises:
        ConfigError: a feature that no Vision Transformer feeds to its head.
    """
    c = checked(choice, model)
    config = dataclasses.replace(
        c,
        num_classes=len(class_names),
        pool="mean" if choice.name == "mean" else c.pool if choice.name == "pre-logits" else "cls",
        pre_logits=choice.name == "pre-logits",
        norm_after_pool=c.norm_after_pool and choice.name != "cls",
    )
    new = copy.copy(model)
    new._modules = dict(model._modules)  # the copy's own table of modules; the modules are the same ones
    new.config, new.input_spec = config, dataclasses.replace(model.input_spec, class_names=tuple(class_names))
    new.pre_logits = model.pre_logits if config.pre_logits else None
    linear = nn.Linear(*reversed(head.W.shape))
    for name, value in (("weight", head.W), ("bias", head.b)):
        setattr(linear, name, nn.Parameter(torch.from_numpy(value).to(model.norm.weight)))
    new.head = linear
    return new.eval()


def checked(choice: Choice, model: ViT) -> Any:
    """The model's configuration, if a head over this feature can be part of such a model; else a ConfigError."""
    if choice.layers:
        raise ConfigError(
            f"A head over {choice.name} has no place in a Vision Transformer, whose head sees one "
            f"token; use --features cls, mean or pre-logits (vitkit embed takes layers)."
        )
    return model.config
