"""Class weights: in the loss, an image counts as often as its class needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vitkit.data.batch import Batch


def balanced(counts: Sequence[int]) -> Tensor:
    """Return n / (K n_k) for each class, [K]: every class weighs the same, and the mean over all images is 1.

    Args:
        counts: n_k, the number of images in each class. A class without images counts neither in n nor in K.
    """
    n = torch.tensor(counts, dtype=torch.float64)
    return torch.where(n > 0, n.sum() / ((n > 0).sum() * n.clamp(min=1)), 0.0).float()


def weigh(batch: Batch, weights: Tensor) -> tuple[Batch, Tensor]:
    """Weigh the images of a batch: return the batch to compute the losses of, and the factor of each loss, [B].

    The weighted loss of a mixed image is s w_a L(a) + (1 - s) w_b L(b), where s is its share, w are the weights of the
    two classes and L(a) is the loss, with label smoothing, against class a. All our losses are affine in the target, so
    this is W L(s' a + (1 - s') b) with W = s w_a + (1 - s) w_b and s' = s w_a / W.

    Args:
        batch: the images.
        weights: [K], the weight of each class.
    """
    weights = weights.to(batch.labels.device)
    own, other = batch.weight * weights[batch.labels], (1 - batch.weight) * weights[batch.others]
    return replace(batch, weight=own / (own + other)), own + other
