"""Logits and targets -> one loss per image."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from vitkit.data.batch import Batch


def softmax(logits: Tensor, batch: Batch, smoothing: float, mixed: bool) -> Tensor:
    """Softmax cross-entropy, [B], with one class per image or a mixture of two.

    Args:
        logits: [B, K].
        batch: the labels; for mixed images, also the labels and the shares of their partners.
        smoothing: share of each target that is spread over all classes.
        mixed: whether images were mixed.
    """
    target = batch.targets(logits.shape[1]) if mixed else batch.labels
    return F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="none")


def sigmoid(logits: Tensor, batch: Batch, smoothing: float, mixed: bool) -> Tensor:
    """Binary cross-entropy of each class, summed over the classes, [B]. The authors' loss on ImageNet-21k.

    Args: as for `softmax`.
    """
    target = batch.targets(logits.shape[1], smoothing)
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(1)


LOSSES: dict[str, Callable[[Tensor, Batch, float, bool], Tensor]] = {"softmax": softmax, "sigmoid": sigmoid}
