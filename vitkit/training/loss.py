"""logits and targets -> one loss an image."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from vitkit.data.loader import Batch


def softmax(logits: Tensor, batch: Batch, smoothing: float, mixed: bool) -> Tensor:
    """Cross-entropy, [B]: one class an image, or a mixture of two.

    Args:
        logits: [B, K].
        batch: labels, or partners and shares.
        smoothing: share of each target that is spread over all classes.
        mixed: whether pictures were mixed.
    """
    target = batch.targets(logits.shape[1]) if mixed else batch.labels
    return F.cross_entropy(logits, target, label_smoothing=smoothing, reduction="none")


def sigmoid(logits: Tensor, batch: Batch, smoothing: float, mixed: bool) -> Tensor:
    """Each class by itself, yes or no, summed over the classes: [B]. The authors' loss on ImageNet-21k.

    Args:
        logits: [B, K].
        batch: labels, or partners and shares.
        smoothing: share of each target that is spread over all classes.
        mixed: whether pictures were mixed.
    """
    target = batch.targets(logits.shape[1], smoothing)
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(1)


LOSSES: dict[str, Callable[[Tensor, Batch, float, bool], Tensor]] = {"softmax": softmax, "sigmoid": sigmoid}
