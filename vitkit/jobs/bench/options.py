"""What to measure: Options."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import cuda

from vitkit.errors import ConfigError, pick
from vitkit.jobs.peers import PEERS
from vitkit.model.config import ViTConfig, variant
from vitkit.speed.engines import ENGINES

DEVICES = ("cpu", "cuda")


def load_average() -> float:
    """The machine's load over the last minute; NaN where the system does not tell (Windows)."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure and how; None leaves the choice to each measurement.

    Args:
        model: a variant.
        batch_size: images per batch; each size gets its own table.
        device: `cpu` (default) or `cuda`.
        dtype: precision of plain models and peers; in training, that of the matrix products.
        engine: rows of ENGINES.
        peer: rows of PEERS; empty for none.
        merge: tokens to merge per block; each number adds an int8 contender.
        compiled: whether torch.compile is measured too (default: on CUDA). On CUDA every peer then also runs at its
            best: compiled, with cuDNN attention and CUDA graphs.
        dropout: dropout rate after dense layers and positions, in training.
        drop_path: rate of stochastic depth in the last block, in training.
        data: a folder of photos.
        rounds: turns per contender.
        seconds: minimum duration of a turn.
        load: load of the machine before anything is measured.
    """

    model: str = "vit-b/16"
    batch_size: Sequence[int] | None = None
    device: str | None = None
    dtype: str | None = None
    engine: Sequence[str] | None = None
    peer: Sequence[str] | None = None
    merge: Sequence[int] | None = None
    compiled: bool | None = None
    dropout: float | None = None
    drop_path: float | None = None
    data: Path | None = None
    rounds: int = 7
    seconds: float = 0.5
    load: float = field(default_factory=load_average)

    def __post_init__(self) -> None:
        try:
            kind = self.torch_device.type
            usable = kind in DEVICES and (self.torch_device.index or 0) < (1 if kind == "cpu" else cuda.device_count())
        except RuntimeError:  # torch does not know the name
            usable = False
        if not usable:
            raise ConfigError(f"device must be cpu, or cuda on a machine that has it; got {self.device!r}.")
        if min(self.rounds, *(self.batch_size or ()), *(self.merge or ()), 1) < 1:
            raise ConfigError(
                f"batch_size, merge and rounds must be at least 1; got {self.batch_size}, {self.merge} "
                f"and {self.rounds}."
            )
        dtype = getattr(torch, self.dtype or "float32", None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigError(f"dtype must be a floating-point type of torch, such as float32; got {self.dtype!r}.")
        for name in self.engine or ():
            pick(ENGINES, name, "engine")
        for name in self.peer or ():
            pick(PEERS, name, "peer")
        if self.merge and self.torch_device.type != "cpu":
            raise ConfigError(
                f"merge is measured with OpenVINO's int8 on the CPU; got device {self.device!r}. Leave one of them out."
            )
        if self.data is not None and not self.data.is_dir():
            raise ConfigError(f"data must be a folder of photos; {str(self.data)!r} is not a folder.")
        assert self.config  # refuses unknown variants and rates

    def given(self) -> list[str]:
        """The options that were set, out of those that do not apply to every measurement."""
        names = ("batch_size", "device", "dtype", "engine", "peer", "merge", "compiled", "dropout", "drop_path", "data")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def torch_device(self) -> torch.device:
        """The device."""
        return torch.device(self.device or "cpu")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The precision (default: fp32 on the CPU, bf16 on CUDA)."""
        kind = getattr(torch, self.dtype or ("bfloat16" if self.torch_device.type == "cuda" else "float32"))
        assert isinstance(kind, torch.dtype)
        return kind

    @property
    def config(self) -> ViTConfig:
        """The architecture."""
        return variant(self.model, hidden_dropout_prob=self.dropout or 0.0, drop_path_rate=self.drop_path or 0.0)

    @property
    def compiling(self) -> bool:
        """Whether torch.compile is measured too."""
        return self.torch_device.type == "cuda" if self.compiled is None else self.compiled

    @property
    def peers(self) -> list[str]:
        """The peers to measure."""
        return list(PEERS if self.peer is None else self.peer)

    def words(self) -> str:
        """Device, precision and what else differs from the usual, for titles."""
        words = [self.torch_device.type, str(self.torch_dtype).removeprefix("torch.")]
        words += [f"dropout {self.dropout}"] if self.dropout else []
        return ", ".join(words + ([f"stochastic depth {self.drop_path}"] if self.drop_path else []))

    def batches(self, default: Sequence[int]) -> Iterator[int]:
        """Yield the batch sizes to measure. Resets the compiler before each: a second size would compile as dynamic."""
        for batch in self.batch_size or default:
            torch.compiler.reset()
            yield batch
