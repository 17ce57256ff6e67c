"""What the fused kernels drop in a training step, dropout and stochastic depth: the arguments that the kernels take,
and the same in plain torch.

Legend: B images, C of them computed, T tokens, M = B T rows, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vitkit.model.parts.layers import chance_of_another, surely_dropped


class Dropout(NamedTuple):
    """Dropout at one place of a model, in one forward pass.

    Args:
        key: [2], random 32-bit integers.
        rate: share of the elements that become 0.
    """

    key: Tensor
    rate: float

    @property
    def scale(self) -> float:
        """What an element that is kept is multiplied by."""
        return 1 / (1 - self.rate) if self.rate < 1 else 0.0

    def launch(self) -> tuple[Tensor, int, float]:
        """Return the arguments of the kernels: key, limit, scale. A signed hash below the limit is dropped."""
        return self.key, min(round(self.rate * 2**32) - 2**31, 2**31 - 1), self.scale

    def __call__(self, x: Tensor) -> Tensor:
        """Return x, [M, N], after dropout, in plain torch."""
        return x * kept(self.key, len(x), x.shape[1], self.rate) * self.scale


def kept(key: Tensor, M: int, N: int, rate: float) -> Tensor:
    """Return which elements of a matrix dropout keeps, [M, N]: those whose hash is large enough.

    The numbers of the elements, far apart by a multiplication, pass the two rounds of Wellons' lowbias32, each with a
    part of the key.

    Args:
        key: [2], random 32-bit integers.
        M: rows.
        N: columns.
        rate: share of the elements that is dropped.
    """
    low = 2**32 - 1
    first, second = (word & low for word in key.long().unbind())
    x = torch.arange(M * N, device=key.device) * 0x9E3779B9 + first & low
    x = ((x ^ (x >> 16)) * 0x7FEB352D & low) ^ second
    x = (x ^ (x >> 15)) * 0x846CA68B & low
    return ((x ^ 2**31) >= min(round(rate * 2**32), low)).view(M, N)  # the order of signed numbers


class Depth(NamedTuple):
    """Stochastic depth of one branch, in one forward pass: the branch is computed for the other images only.

    Args:
        order: [B], images by rising random number; the first ones are left out.
        rank: [B], int32, the place of each image in that order.
        coin: [], a random number that says whether one more image counts as left out, though it is computed.
        rate: the probability with which an image is dropped.
    """

    order: Tensor
    rank: Tensor
    coin: Tensor
    rate: float

    @property
    def out(self) -> int:
        """How many images are left out."""
        return surely_dropped(len(self.order), self.rate)

    @property
    def scale(self) -> float:
        """What a branch that is added is multiplied by."""
        return 1 / max(1 - self.rate, 1e-6)

    @property
    def images(self) -> Tensor:
        """The images that are computed, in the order of the branch's rows."""
        return self.order[self.out :]

    def launch(self) -> tuple[Tensor, int, Tensor, float, float]:
        """Return the arguments of the kernels: rank, out, coin, the chance that it means one more, scale."""
        return self.rank, self.out, self.coin, chance_of_another(len(self.order), self.rate), self.scale

    def taken(self, x: Tensor) -> Tensor:
        """Return the rows of the images that are computed: [B T, D] -> [C T, D]."""
        return x.view(len(self.order), -1, x.shape[1])[self.images].view(-1, x.shape[1])

    def spread(self, x: Tensor) -> Tensor:
        """Return these rows at their images' places, and zeros elsewhere: [C T, D] -> [B T, D]."""
        place = self.rank.long() - self.out
        whole = x.view(len(self.images), -1, x.shape[1])[place.clamp(min=0)] * (place >= 0)[:, None, None]
        return whole.view(-1, x.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        """Return what is added of a branch, [C T, D], in plain torch."""
        factor = x.new_full((len(self.images),), self.scale)
        factor[0] *= self.coin >= chance_of_another(len(self.order), self.rate)
        return (x.view(len(factor), -1) * factor[:, None]).view(x.shape)


def depth_arguments(depth: Depth | None, x: Tensor) -> tuple[Tensor, int, Tensor, float, float]:
    """Return the kernels' arguments for stochastic depth, or such as a kernel without it ignores."""
    return (x, 0, x, 0.0, 1.0) if depth is None else depth.launch()


def dropout_arguments(drop: Dropout | None, x: Tensor) -> tuple[Tensor, int, float]:
    """Return the kernels' arguments for a dropout, or such as a kernel without one ignores."""
    return (x, 0, 1.0) if drop is None else drop.launch()


def rows_of(M: int, depth: Depth | None) -> int:
    """Return how many of M rows belong to images that a branch computes."""
    return M if depth is None else M // len(depth.order) * len(depth.images)


def tokens_of(M: int, *depths: Depth | None) -> int:
    """Return the rows per image if stochastic depth needs them, else 1."""
    return next((M // len(depth.order) for depth in depths if depth is not None), 1)
