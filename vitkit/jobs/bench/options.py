"""What to measure: Options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vitkit.errors import ConfigError, pick
from vitkit.jobs.peers import PEERS
from vitkit.model.config import ViTConfig, variant
from vitkit.speed.engines import ENGINES

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, how, and beside whom; None is each measurement's own choice.

    Args:
        model: a variant.
        batch_size: images at once, a table for each.
        device: `cpu` or `cuda`.
        dtype: of plain models and peers; in training, of the matrix products.
        engine: rows of ENGINES.
        peer: rows of PEERS; empty for none.
        merge: numbers of tokens to merge; each adds an int8 contender.
        compiled: whether contenders run compiled by torch too.
        data: a folder of photos.
        rounds: turns of each contender.
        seconds: of one turn, at least.
    """

    model: str = "vit-b/16"
    batch_size: Sequence[int] | None = None
    device: str | None = None
    dtype: str | None = None
    engine: Sequence[str] | None = None
    peer: Sequence[str] | None = None
    merge: Sequence[int] | None = None
    compiled: bool | None = None
    data: Path | None = None
    rounds: int = 7
    seconds: float = 0.5

    def __post_init__(self) -> None:
        try:
            known = self.place.type in DEVICES and (self.place.type == "cpu" or torch.cuda.is_available())
        except RuntimeError:  # torch's own word for a name that it does not know
            known = False
        if not known:
            raise ConfigError(f"device must be cpu or cuda, and there; got {self.device!r}.")
        if min(self.rounds, *(self.batch_size or ()), *(self.merge or ()), 1) < 1:
            raise ConfigError(
                f"batch_size, merge and rounds must be at least 1; got {self.batch_size}, {self.merge} "
                f"and {self.rounds}."
            )
        if (
            not isinstance(kind := getattr(torch, self.dtype or "float32", None), torch.dtype)
            or not kind.is_floating_point
        ):
            raise ConfigError(f"dtype must be a floating-point type of torch, such as float32; got {self.dtype!r}.")
        for name in self.engine or ():
            pick(ENGINES, name, "engine")
        for name in self.peer or ():
            pick(PEERS, name, "peer")
        if self.merge and self.place.type != "cpu":
            raise ConfigError("merge is measured with OpenVINO's int8 on the CPU; leave it out, or the device.")
        if self.data is not None and not self.data.is_dir():
            raise ConfigError(f"data must be a folder of photos; there is none at {str(self.data)!r}.")
        variant(self.model)

    def given(self) -> list[str]:
        """The options that somebody chose, of those that not every measurement takes."""
        names = ("batch_size", "device", "dtype", "engine", "peer", "merge", "compiled", "data")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def place(self) -> torch.device:
        """The device."""
        return torch.device(self.device or "cpu")

    @property
    def type(self) -> torch.dtype:
        """The precision: what was asked for, else fp32 on the CPU and bf16 on CUDA."""
        kind = getattr(torch, self.dtype or ("bfloat16" if self.place.type == "cuda" else "float32"))
        assert isinstance(kind, torch.dtype)
        return kind

    @property
    def config(self) -> ViTConfig:
        """The architecture."""
        return variant(self.model)

    @property
    def compiling(self) -> bool:
        """Whether contenders run compiled too: on CUDA, where nobody says."""
        return self.place.type == "cuda" if self.compiled is None else self.compiled

    @property
    def precision(self) -> str:
        """The precision, in words."""
        return str(self.type).removeprefix("torch.")

    def batches(self, usual: Sequence[int]) -> Iterator[int]:
        """The batch sizes to measure, one after another; what one has compiled would make the next one's dynamic.

        Args:
            usual: those to take when nobody says.
        """
        for batch in self.batch_size or usual:
            torch.compiler.reset()
            yield batch
