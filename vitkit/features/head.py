"""A linear head over frozen features, and how it becomes part of a model.

Legend: F values per feature, K classes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from vitkit.errors import ConfigError
from vitkit.features.choice import Choice
from vitkit.model.backbone import Backbone
from vitkit.model.parts.pools import POOLS
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


def attach(
    model: Backbone, head: Head, class_names: Sequence[str], choice: Choice, thresholds: Sequence[float] = ()
) -> Backbone:
    """Return an ordinary model with the backbone of `model` and this head.

    Args:
        model: the backbone; its tensors are shared, not copied.
        head: a head over raw features (see `Head.over`).
        class_names: names of the head's outputs.
        choice: the feature that the head was fitted to.
        thresholds: those of several labels per image, see InputSpec (default: none, one class per image).

    Raises:
        ConfigError: a Vision Transformer cannot feed this feature to its head.
    """
    check_attachable(choice)
    new = copy.copy(model)
    new._modules = dict(model._modules)  # a table of its own, so that replacing the head leaves `model` as it is
    new.input_spec = dataclasses.replace(model.input_spec, class_names=tuple(class_names), thresholds=tuple(thresholds))
    pool, weight = "mean", next(model.parameters())
    if isinstance(new, ViT):
        c, pool = new.config, choice.name if choice.name in POOLS else new.config.pool
        fields: dict[str, Any] = {"pool_prefix": False, "pool_heads": None, "pool_intermediate_size": None}  # of `map`
        new.config = dataclasses.replace(
            c,
            num_classes=len(class_names),
            pre_logits=choice.name == "pre-logits",
            norm_after_pool=c.norm_after_pool and choice.name != "cls",
            without_bias=tuple(name for name in c.without_bias if name != "head"),
            **{"pool": pool, **(fields if pool != "map" else {})},
        )
        new.pool = new.pool if pool == c.pool else POOLS[pool](new.config)
        new.pre_logits = new.pre_logits if new.config.pre_logits else None
        new.head = new.pool.head(new.config).to(weight)
    else:
        new.config = dataclasses.replace(new.config, num_classes=len(class_names))
        new.head = nn.Linear(new.config.width, len(class_names)).to(weight)
    if choice.name == "projected":  # two linear layers, one after the other, are one
        projection = model.head.weight.detach().double().cpu().numpy()  # type: ignore[operator]
        head = Head(head.W @ projection, head.b)
    new.head.load_state_dict({name: torch.from_numpy(value) for name, value in _tensors(head, pool)})
    new.known = None
    return new.eval()


def _tensors(head: Head, pool: str) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of a model's head. Two heads say their mean, so each gets twice its part."""
    if pool != "distilled":
        yield from (("weight", head.W), ("bias", head.b))
        return
    for name, W in zip(("cls", "distilled"), np.split(head.W, 2, axis=1), strict=True):
        yield from ((f"{name}.weight", 2 * W), (f"{name}.bias", head.b))


def check_attachable(choice: Choice) -> None:
    """Raise ConfigError if a Vision Transformer cannot feed this feature to its head."""
    if choice.layers or choice.name == "patches":
        raise ConfigError(
            f"Expected a feature that a Vision Transformer can feed to its head: cls, mean or pre-logits; got "
            f"{choice.name}. Use one of those, or export the {choice.name.partition(':')[0]} with vitkit embed."
        )
