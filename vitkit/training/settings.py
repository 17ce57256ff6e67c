"""How a run is carried out: the machine, the seed, logging and saving. Everything else is in the recipe."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from vitkit import runtime
from vitkit.errors import ConfigError, pick
from vitkit.model import checks
from vitkit.runtime import Runtime
from vitkit.training.metrics import NAMES
from vitkit.training.recipe import Recipe

BadImages = Literal["fail", "skip"]
AUTO = "auto"
PRECISIONS = {**{name: name for name in runtime.PRECISIONS}, "fp8": "bf16"}  # -> a precision of the runtime


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is carried out.

    Args:
        seed: random seed of the initial weights, order, augmentation, mixing, dropout and held-out images (default: 0).
        precision: fp32 (default), bf16, fp16, or fp8 (bf16 with some matrix products in 8 bits; CUDA only).
        device: auto (default), cpu, cuda, cuda:1 or mps.
        micro_batch: most images per process and forward pass; gradients are accumulated over the rest of the batch
            (default: the whole batch at once). `auto` takes as many as memory allows: the whole batch, halved whenever
            no memory is left.
        workers: worker processes for decoding (default: one per core).
        bad_images: `fail` (default) on an unreadable image, or `skip` it.
        compile: whether to use torch.compile (default: False).
        deterministic: whether CUDA uses only bit-reproducible kernels, which are slower (default: False).
        checkpointing: whether to recompute activations in the backward pass, to save memory (default: with `shard`).
        shard: whether to divide weights, gradients and moments over the processes (FSDP2), for models that do not fit
            into the memory of one device (default: False).
        log_every: steps between lines of training metrics (default: 10).
        evaluate_every: steps between validations (default: once per epoch, less often in very long runs). The end of a
            run is always validated.
        save_every: steps between saves (default: at every validation). A new best is always saved.
        trackers: keys of metrics.NAMES (default: tensorboard).
    """

    seed: int = 0
    precision: str = "fp32"
    device: str = "auto"
    micro_batch: int | Literal["auto"] | None = None
    workers: int | None = None
    bad_images: BadImages = "fail"
    compile: bool = False
    deterministic: bool = False
    checkpointing: bool | None = None
    shard: bool = False
    log_every: int = 10
    evaluate_every: int | None = None
    save_every: int | None = None
    trackers: tuple[str, ...] = ("tensorboard",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "trackers", tuple(self.trackers))
        if self.checkpointing is None:
            object.__setattr__(self, "checkpointing", self.shard)
        checks.whole("seed", self.seed, 0)
        checks.whole("log_every", self.log_every, 1)
        for name in ("micro_batch", "evaluate_every", "save_every"):
            if getattr(self, name) is not None and (name, getattr(self, name)) != ("micro_batch", AUTO):
                checks.whole(name, getattr(self, name), 1)
        if self.workers is not None:
            checks.whole("workers", self.workers, 0)
        if self.bad_images not in get_args(BadImages):
            checks.one_of("bad_images", self.bad_images, BadImages)
        pick(PRECISIONS, self.precision, "precision")
        for name in self.trackers:
            pick(NAMES, name, "tracker")

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {**asdict(self), "trackers": list(self.trackers)}


@dataclass(frozen=True)
class BatchSplit:
    """How the images of a step are divided between processes and micro-batches, as evenly as possible.

    Args:
        process: images per process; some have one fewer where the batch is not divisible by the processes.
        micro: images in the largest micro-batch.
        count: micro-batches per process, the same in all of them.
    """

    process: int
    micro: int
    count: int

    @classmethod
    def of(cls, recipe: Recipe, settings: Settings, runtime: Runtime) -> BatchSplit:
        """Divide a recipe's batch.

        Raises:
            ConfigError: there are more processes than images; or there are several processes, and each would choose
                its own micro-batch.
        """
        batch, ranks = recipe.batch_size, runtime.ranks
        if batch < ranks:
            raise ConfigError(
                f"Expected at least one image per process; got a batch of {batch} for {ranks} processes. Use "
                f"--batch-size {ranks} or fewer processes."
            )
        if ranks > 1 and settings.micro_batch == AUTO:
            raise ConfigError(
                f"--batch-size auto is for one process; got {ranks}. Use --micro-batch, such as --micro-batch 16."
            )
        micro = batch if settings.micro_batch in (None, AUTO) else int(settings.micro_batch)
        return cls.among(batch, ranks).at_most(micro)

    @classmethod
    def among(cls, batch: int, ranks: int) -> BatchSplit:
        """Divide a batch between processes that compute their images all at once."""
        process = math.ceil(batch / ranks)
        return cls(process, process, 1)

    def at_most(self, micro: int) -> BatchSplit:
        """Return the split with the fewest micro-batches of at most `micro` images."""
        count = math.ceil(self.process / max(micro, 1))
        return BatchSplit(self.process, math.ceil(self.process / count), count)
