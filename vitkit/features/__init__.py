"""Frozen features: choosing a vector, caching it on disk, and fitting linear, ridge and k-NN classifiers to it.

What does not belong here: training the backbone (training), measuring (evaluation), weight files (checkpoints).
scikit-learn is imported only where something is fitted, so that embedding runs without it.
"""

from __future__ import annotations

from vitkit.features.cache import FeatureCache
from vitkit.features.choice import CHOICES, Choice, choose
from vitkit.features.embed import embed, fill
from vitkit.features.filled import Embedded, Filled
from vitkit.features.head import Head, attach
from vitkit.features.probe import METHODS, Fitted, Options, fit

__all__ = [
    "CHOICES",
    "METHODS",
    "Choice",
    "Embedded",
    "FeatureCache",
    "Filled",
    "Fitted",
    "Head",
    "Options",
    "attach",
    "choose",
    "embed",
    "fill",
    "fit",
]
