"""A batch, and what the loaders of training and evaluation share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from vitkit.data import mix as mixing
from vitkit.data.base import Source
from vitkit.data.order import share, within
from vitkit.data.workers import default_workers
from vitkit.errors import BadImage, ConfigError, DataError
from vitkit.model.config import InputSpec
from vitkit.types import Array

LARGE_BATCH, SMALL_BATCH = 256, 64  # images per batch where nothing is trained: see `images_per_batch`
LARGE_BATCH_PIXELS = 256  # larger images would need more memory than some GPUs have

BadImages = Literal["fail", "skip"]
Device = torch.device | str | None


@dataclass(frozen=True)
class Batch:
    """One batch.

    Args:
        pixels: [B, C, H, W] float32, normalised and, for training, mixed.
        labels: [B] int64, the class of each image; [B, K] zeros and ones if an image can have several labels.
        index: [B] int64, the position of each image in the source.
        others: like `labels`, of the image that each one is mixed with; `labels` if nothing is mixed.
        weight: [B] float32, the share of its own pixels in each image; 1 if nothing is mixed.
        digests: [B, 32] uint8, the SHA-256 of the bytes that each image was decoded from, if they were asked for.
    """

    pixels: Tensor
    labels: Tensor
    index: Tensor
    others: Tensor
    weight: Tensor
    digests: Array | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def targets(self, classes: int, smoothing: float = 0.0) -> Tensor:
        """Return soft targets, [B, classes]; see `mix.soft_targets`."""
        return mixing.soft_targets(self.labels, self.others, self.weight, classes, smoothing)


def images_per_batch(batch_size: int | None, spec: InputSpec, device: torch.device) -> int:
    """Return how many images a model that is not trained gets at once, if the caller does not care.

    Args:
        batch_size: what the caller asked for; None for LARGE_BATCH on CUDA if images have at most LARGE_BATCH_PIXELS
            pixels a side, and SMALL_BATCH otherwise.
        spec: the input that the model expects.
        device: where the model is.
    """
    large = device.type == "cuda" and max(spec.size) <= LARGE_BATCH_PIXELS
    return batch_size or (LARGE_BATCH if large else SMALL_BATCH)


class Loader:
    """What both loaders have: a source, a share of its images, and a list of what could not be read.

    Args:
        source: where the images come from.
        spec: the input that the model expects.
        batch_size: images in a batch.
        rank: this process, counted from 0.
        ranks: number of processes.
        workers: worker processes for decoding; None for as many as are useful.
        device: where batches are placed; None for the CPU.
        bad_images: `fail` or `skip`.
        on_bad: called with (name, error message) once for each skipped image.
        augmenting: whether images are augmented, which takes longer.
    """

    def __init__(
        self,
        source: Source,
        spec: InputSpec,
        batch_size: int,
        rank: int,
        ranks: int,
        workers: int | None,
        device: Device,
        bad_images: BadImages,
        on_bad: Callable[[str, str], None] | None,
        augmenting: bool,
    ) -> None:
        within("batch_size", batch_size, 1)
        within("workers", workers or 0, 0)
        if bad_images not in get_args(BadImages):
            raise ConfigError(f"bad_images must be one of {', '.join(get_args(BadImages))}; got {bad_images!r}.")
        share(1, rank, ranks)  # refuses a rank that is out of range
        if not len(source):
            raise DataError("Expected at least one image; the data set is empty.")
        self.source, self.spec, self.batch_size = source, spec, batch_size
        self.rank, self.ranks = rank, ranks
        self.device = torch.device(device) if device is not None else torch.device("cpu")
        spare = augmenting and self.device.type != "cpu"  # the cores are free: the model trains elsewhere
        self.workers = default_workers(source, ranks, spare) if workers is None else workers
        self.bad_images, self.on_bad = bad_images, on_bad
        self.skipped: dict[str, str] = {}  # name -> reason, for every image skipped so far

    def skip(self, index: int, why: str) -> None:
        """Record an unreadable image, or raise if `bad_images` is `fail`."""
        if self.bad_images == "fail":
            raise BadImage(why)
        name = self.source.names[index]
        if name not in self.skipped:
            self.skipped[name] = why
            if self.on_bad is not None:
                self.on_bad(name, why)

    def targets(self, index: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return the labels and the index of some images, on the CPU."""
        found = torch.tensor(list(index), dtype=torch.int64)
        return torch.from_numpy(self.source.labels)[found].long(), found
