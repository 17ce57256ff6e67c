"""Whole training batches from small images on a device: augmented, normalised and mixed there.

On CUDA the work is one CUDA graph, launched once per batch. Its hundreds of small kernels, launched one by one, would
keep Python busy for as long as the model's own step does, and the GPU waiting.

Legend: B images, n >= B rows to read (partners from other processes included), C channels, H x W pixels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitkit.cuda_capture import capture
from vitkit.data import mix as mixing
from vitkit.data.mix import Plan
from vitkit.data.on_device import OnDevice
from vitkit.data.preprocess import normalize
from vitkit.types import Array

Made = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # pixels, labels, index, others and weight, as in Batch


class DeviceBatches:
    """Makes the batches of one process.

    Args:
        augment: the images on their device, and how to augment them.
        labels: the label of each image, or its labels.
        count: B, images in a batch of this process.
    """

    def __init__(self, augment: OnDevice, labels: Array, count: int) -> None:
        self.augment, self.count, self.device = augment, count, augment.device
        self.labels = torch.from_numpy(labels).long().to(self.device)
        self.graphs: dict[int, _Graph] = {}  # n -> graph; several processes read one or two more images in some steps

    def __call__(self, rows: Array, partners: Array, plan: Plan) -> Made:
        """Make a batch.

        Args:
            rows: [n, 2] int64, (epoch, index) of this process's images, then of partners from other processes.
            partners: [B] int64, the position in `rows` of what each image is mixed with.
            plan: how the step is mixed.
        """
        shares, weight = mixing.shares(plan, *self.augment.spec.size)
        places = torch.from_numpy(np.concatenate([rows.ravel(), partners]))
        amounts = torch.from_numpy(np.append(shares, np.float32(weight)))
        if self.device.type != "cuda":
            return self._make(places, amounts)
        if len(rows) not in self.graphs:
            self.graphs[len(rows)] = _Graph(self, places.to(self.device), amounts.to(self.device))
        return self.graphs[len(rows)](places.pin_memory(), amounts.pin_memory())

    def _make(self, places: Tensor, amounts: Tensor) -> Made:
        """Make a batch; nothing here waits for the device, or depends on a value.

        Args:
            places: [2 n + B] int64, the rows and the partners.
            amounts: [2 H W + 1] float32, the shares of every pixel and of the image.
        """
        B = self.count
        rows, partners = places[:-B].view(-1, 2), places[-B:]
        shares = amounts[:-1].view(2, *self.augment.spec.size)
        z = normalize(self.augment(rows), self.augment.spec)
        pixels = (z[:B] * shares[0]).add_(z.index_select(0, partners).mul_(shares[1]))
        index = rows[:, 1].contiguous()
        labels = self.labels[index]
        return pixels, labels[:B], index[:B], labels[partners], amounts[-1:].expand(B).contiguous()


class _Graph:
    """`DeviceBatches._make` as a CUDA graph, captured on the current stream.

    Args:
        batches: whose work it is.
        places: an example on the device.
        amounts: an example on the device.
    """

    def __init__(self, batches: DeviceBatches, places: Tensor, amounts: Tensor) -> None:
        self.places, self.amounts = places, amounts
        batches._make(places, amounts)  # loads the kernels
        stream = torch.cuda.current_stream(places.device)
        self.graph, self.made = capture(lambda: batches._make(places, amounts), stream=stream)

    def __call__(self, places: Tensor, amounts: Tensor) -> Made:
        """Make a batch from tensors in pinned memory."""
        self.places.copy_(places, non_blocking=True)
        self.amounts.copy_(amounts, non_blocking=True)
        self.graph.replay()
        pixels, labels, index, others, weight = (part.clone() for part in self.made)
        return pixels, labels, index, others, weight
