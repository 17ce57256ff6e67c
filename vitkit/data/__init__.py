"""Images -> batches: sources, decoding, preprocessing, augmentation, data order, the loader, its cache and the doctor.

What does not belong here: anything that knows more about a model than its InputSpec, losses, metrics, precision.
"""

from __future__ import annotations

from vitkit.data.augment import Augment, augment
from vitkit.data.base import Source, stratified
from vitkit.data.batch import Batch
from vitkit.data.cache import CachedSource, cached
from vitkit.data.clean import clean
from vitkit.data.decode import decode
from vitkit.data.doctor import Report, examine
from vitkit.data.eval_loader import EvalLoader
from vitkit.data.mix import Mix
from vitkit.data.order import BalancedOrder, Batches, Order, rng, sample_rngs, share
from vitkit.data.preprocess import normalize, pixels, preprocess
from vitkit.data.sources import SOURCES, open_source, open_splits
from vitkit.data.train_loader import TrainLoader

__all__ = [
    "SOURCES",
    "Augment",
    "BalancedOrder",
    "Batch",
    "Batches",
    "CachedSource",
    "EvalLoader",
    "Mix",
    "Order",
    "Report",
    "Source",
    "TrainLoader",
    "augment",
    "cached",
    "clean",
    "decode",
    "examine",
    "normalize",
    "open_source",
    "open_splits",
    "pixels",
    "preprocess",
    "rng",
    "sample_rngs",
    "share",
    "stratified",
]
