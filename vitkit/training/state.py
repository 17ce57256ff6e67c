"""The training state, everything needed to resume: weights, optimizer moments, the running average and some numbers.

Each save is one file, written under another name, synced and renamed; only then are all but the newest KEPT removed. So
a kill at any moment leaves a complete state. Checksums in its metadata, computed while the file is written, cover every
value that a run resumes from. No random generator is saved, because randomness is a function of the step. shard.py
writes the states of a run whose processes hold a part of the model each; `read` restores both kinds.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.checkpoints import containers
from vitkit.checkpoints.atomic import staging
from vitkit.errors import CheckpointError, TensorMismatch, UnreadableFile
from vitkit.training import shard
from vitkit.training.optim import Average
from vitkit.training.run_folder import Header

KEPT = 2  # states: the newest, and the one before it in case the newest is damaged


@dataclass
class TrainingState:
    """How far a run has come.

    Args:
        step: updates done.
        pending: whether logging and validating after the last update are still to be done.
        best: highest validation accuracy so far, or minus the lowest loss if the objective judges by it; None before
            the first validation.
        best_loss: validation loss of the weights that reached `best`.
        best_step: the step of `best`.
        best_weights: the weights that reached it: `last` or `ema`.
        stale: validations since the last that was better than all before it.
        ended: why the run stopped before its last step; empty if it did not.
        micro: images per forward pass, where `--batch-size auto` has found them; 0 where it has not.
        logged: size of metrics.jsonl in bytes at this step.
        window: sums since the last line of training metrics.
        epoch: the same sums since the last line about an epoch.
        skipped: unreadable images that were skipped and reported: name -> reason.
        scaler: state of fp16's loss scaler.
        thresholds: those that the last validation chose: `last` or `ema` -> one per label; empty for other objectives.
    """

    step: int = 0
    pending: bool = False
    best: float | None = None
    best_loss: float = 0.0
    best_step: int = 0
    best_weights: str = "last"
    stale: int = 0
    ended: str = ""
    micro: int = 0
    logged: int = 0
    window: dict[str, float] = field(default_factory=dict)
    epoch: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    thresholds: dict[str, list[float]] = field(default_factory=dict)


def write(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    progress: TrainingState,
    info: Mapping[str, Any],
) -> Path:
    """Write a state file, then remove all but the newest KEPT; return its path.

    Args:
        folder: the run's `state` folder.
        model: the module whose parameters are trained, not wrapped for several processes.
        optimizer: the optimizer of its parameters.
        average: the running average of its weights, if any.
        progress: how far the run has come.
        info: the contents of run.json, which can be rebuilt from this copy.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found[f"model/{name}"] = parameter
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer/{name}/{key}"] = value
    if average is not None:
        found |= {f"ema/{name}": value for name, value in average.weights.items()}
    tensors = {name: value.detach().cpu().contiguous() for name, value in found.items()}
    file = f"step-{progress.step:012d}.safetensors"
    header = Header({"progress": asdict(progress), "run": dict(info)})
    with staging(folder) as private:
        with ThreadPoolExecutor(1) as pool:
            tensor_sum = pool.submit(_checksum, tensors)
            containers.write(tensors, private / file, header.metadata())
        header.fill_in(private / file, tensor_sum.result())
    shard.prune(folder, KEPT)
    return folder / file


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """Hash the names, types, shapes and bytes of tensors. Bytes enter as CRC-32, which is as fast as writing them."""

    def line(item: tuple[str, Tensor]) -> str:
        name, tensor = item
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return f"{name} {tensor.dtype} {list(tensor.shape)} {crc:08x}\n"

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return hashlib.sha256("".join(pool.map(line, sorted(tensors.items()))).encode()).hexdigest()


@torch.no_grad()
def read(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None) -> TrainingState:
    """Read a state file: restore model, optimizer and average in place, and return the rest.

    Args:
        path: a file written by `write` or by `shard.write`.
        model: the module whose parameters are trained, not wrapped for several processes.
        optimizer: its optimizer.
        average: its running average, if any.

    Raises:
        UnreadableFile: the file is damaged; nothing has been restored.
        CheckpointError: the file was written by another version.
        TensorMismatch: it belongs to another model.
    """
    header = Header.of(path)
    if shard.PARTS in header.values:
        progress = _progress(path, header)
        shard.read(path, header, model, optimizer, average)
        return progress
    try:
        tensors, _ = containers.read(path)
    except CheckpointError as error:
        raise UnreadableFile(f"{path} is damaged: it is not a complete safetensors file.") from error
    if header.tensor_sum != _checksum(tensors):
        raise UnreadableFile(f"{path} is damaged: its checksum does not match.")
    progress = _progress(path, header)
    fused = optimizer.defaults.get("fused")
    state: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "optimizer":
            name, _, entry = name.rpartition("/")
            state.setdefault(name, {})[entry] = value
    for name, parameter in model.named_parameters():
        if tensors.get(f"model/{name}", torch.empty(0)).shape != parameter.shape:
            raise TensorMismatch(
                f"{path} belongs to another model: {name} is missing or has another shape; start a new run."
            )
        parameter.copy_(shard.divided(tensors[f"model/{name}"], parameter))
        if average is not None:
            average.weights[name].copy_(shard.divided(tensors[f"ema/{name}"], parameter))
        if name in state:
            optimizer.state[parameter] = {
                entry: value.clone()
                if entry == "step" and not fused
                else shard.divided(value.clone().to(parameter.device), parameter)
                for entry, value in state[name].items()
            }
    return progress


def _progress(path: Path, header: Header) -> TrainingState:
    try:
        return TrainingState(**header.values["progress"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a training state that this version of vitkit can read ({error}); start a new run."
        ) from error
