"""FROZEN BACKBONE -> NUMBERS ONCE: which vector, the cache on disk, and what is fitted to it: linear, ridge, k-NN.

What does not belong here: training the backbone (training), measuring (evaluation), files of weights (checkpoints).
scikit-learn is imported where something is fitted with it, so that embedding runs without it.
"""

from __future__ import annotations

from vitkit.features.cache import FeatureCache
from vitkit.features.choice import CHOICES, Choice, choose
from vitkit.features.embed import Embedded, Filled, embed, fill
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
