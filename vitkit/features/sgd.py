"""A linear head trained by stochastic gradient descent, for more images or classes than a solver can handle.

Heads for several learning rates are trained at once on the same batches and compared on a held-out tenth. The best rate
is then used to train on all images.

Legend: n images, F values per feature, K classes, G learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from vitkit.data.base import stratified
from vitkit.data.order import Order
from vitkit.features.head import Head, Standard
from vitkit.types import Array

RATES = (0.1, 0.3, 1.0, 3.0, 10.0)
BATCH = 1024
STEPS = 500  # at least this many steps,
EPOCHS = 10  # and at least this many epochs
MOMENTUM = 0.9
DECAY = 1e-4


def descend(X: Array, y: Array, K: int, rates: Sequence[float], seed: int) -> list[Head]:
    """Train one head over raw features for each learning rate.

    Args:
        X: [n, F] features.
        y: [n] classes.
        K: number of classes.
        rates: G learning rates; features are scaled so that a good rate does not depend on F.
        seed: seed of the order of images.
    """
    scale, width = Standard.of(X), X.shape[1]
    m, s = (torch.from_numpy(v).float() for v in (scale.m, scale.s * math.sqrt(width)))
    W = torch.zeros(len(rates), width, K, requires_grad=True)
    b = torch.zeros(len(rates), 1, K, requires_grad=True)
    rate = torch.tensor(rates)[:, None, None]
    order = Order(len(X), min(BATCH, len(X)), seed=seed)
    steps = max(STEPS, order.steps(EPOCHS))
    speed = [torch.zeros_like(W), torch.zeros_like(b)]
    for step in range(steps):
        rows = np.array([index for _, index in order.rows(step)])
        x = ((torch.from_numpy(X[rows]) - m) / s).expand(len(rates), -1, -1)  # [G, B, F]
        logits = torch.baddbmm(b, x, W)  # [G, B, K]
        target = torch.from_numpy(y[rows]).repeat(len(rates))
        loss = F.cross_entropy(logits.flatten(0, 1), target, reduction="sum") / len(rows) + DECAY / 2 * (W * W).sum()
        now = rate * (1 + math.cos(math.pi * step / steps)) / 2
        with torch.no_grad():
            for value, gradient, velocity in zip((W, b), torch.autograd.grad(loss, (W, b)), speed):
                velocity.mul_(MOMENTUM).add_(gradient)
                value.sub_(now * velocity)
    scaled = Standard(scale.m, scale.s * math.sqrt(width))
    return [Head(w.T.double().numpy(), c[0].double().numpy()).over(scaled) for w, c in zip(W.detach(), b.detach())]


def sgd(X: Array, y: Array, K: int, seed: int, rates: Sequence[float] = RATES) -> tuple[Head, dict[float, float]]:
    """Return the head trained with the best learning rate, and the held-out loss of each rate.

    Args:
        X: [n, F] features.
        y: [n] classes, each with at least two images.
        K: number of classes.
        seed: seed of the order of images and of the held-out images.
        rates: learning rates to choose from.
    """
    from vitkit.features.logistic import nll

    kept, out = stratified(y, 0.1, seed)
    losses = {
        rate: nll(head.logits(X[out]), y[out]) for rate, head in zip(rates, descend(X[kept], y[kept], K, rates, seed))
    }
    best = min(losses, key=lambda rate: losses[rate])
    return descend(X, y, K, [best], seed)[0], losses
