"""What a run is told about the machine and about itself: everything that is no part of the recipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from vitkit import runtime
from vitkit.errors import ConfigError, pick
from vitkit.model import checks
from vitkit.runtime import Runtime
from vitkit.training.recipe import Recipe
from vitkit.training.track import NAMES

BadImages = Literal["fail", "skip"]
PRECISIONS = {**{name: name for name in runtime.PRECISIONS}, "fp8": "bf16"}  # -> the runtime's


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is carried out.

    Args:
        seed: decides initial weights, order, augmentation, mixing, dropout and the held-out part.
        precision: fp32, bf16, fp16, or fp8 (bf16 with some matrix products in 8 bits; CUDA).
        device: auto, cpu, cuda or mps.
        micro_batch: images that a process takes at once; the rest of its share is accumulated. None for all at once.
        workers: processes that decode; None for one a core.
        bad_images: `fail`, or `skip` those that cannot be read.
        compile: whether torch.compile is used.
        deterministic: whether CUDA uses only kernels that repeat to the bit (slower; the CPU's always do).
        checkpointing: whether activations are computed twice, to save memory.
        log_every: steps between lines of training metrics.
        evaluate_every: steps between validations; None for once an epoch (less often in a run of very many), and at
            the end.
        save_every: steps between saves; None for at every validation.
        trackers: rows of track.NAMES.
    """

    seed: int = 0
    precision: str = "fp32"
    device: str = "auto"
    micro_batch: int | None = None
    workers: int | None = None
    bad_images: BadImages = "fail"
    compile: bool = False
    deterministic: bool = False
    checkpointing: bool = False
    log_every: int = 10
    evaluate_every: int | None = None
    save_every: int | None = None
    trackers: tuple[str, ...] = ("tensorboard",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "trackers", tuple(self.trackers))
        checks.whole("seed", self.seed, 0)
        checks.whole("log_every", self.log_every, 1)
        for name in ("micro_batch", "evaluate_every", "save_every"):
            if getattr(self, name) is not None:
                checks.whole(name, getattr(self, name), 1)
        if self.workers is not None:
            checks.whole("workers", self.workers, 0)
        if self.bad_images not in get_args(BadImages):
            checks.one_of("bad_images", self.bad_images, BadImages)
        pick(PRECISIONS, self.precision, "precision")
        for name in self.trackers:
            pick(NAMES, name, "tracker")

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON can hold them."""
        return {**asdict(self), "trackers": list(self.trackers)}


@dataclass(frozen=True)
class BatchSplit:
    """How a step's images are shared out.

    Args:
        process: images of each process.
        micro: images that it takes at once.
        count: micro-batches that it takes.
    """

    process: int
    micro: int
    count: int

    @classmethod
    def of(cls, recipe: Recipe, settings: Settings, runtime: Runtime) -> BatchSplit:
        """Share a recipe's batch out.

        Raises:
            ConfigError: it does not divide; says what to use.
        """
        batch, ranks = recipe.batch_size, runtime.ranks
        if batch % ranks:
            raise ConfigError(
                f"A batch of {batch} cannot be shared equally by {ranks} processes; use --batch-size "
                f"{max(batch // ranks, 1) * ranks}."
            )
        process = batch // ranks
        micro = settings.micro_batch or process
        if micro > process or process % micro:
            divisor = max(d for d in range(1, process + 1) if process % d == 0 and d <= micro)
            raise ConfigError(
                f"--micro-batch {micro} does not divide the {process} images of each process; use {divisor}."
            )
        return cls(process, micro, process // micro)
