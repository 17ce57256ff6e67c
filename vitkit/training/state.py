"""The training state, everything needed to resume: weights, optimizer moments, the running average and some numbers.

Each save is one file, written under another name, synced and renamed; only then are older files removed. So a kill at
any moment leaves a complete state. No random generator is saved, because randomness is a function of the step.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.checkpoints import containers
from vitkit.checkpoints.atomic import staging
from vitkit.errors import CheckpointError, TensorMismatch
from vitkit.training.optim import Average


@dataclass
class TrainingState:
    """How far a run has come.

    Args:
        step: updates done.
        best: highest validation accuracy so far; None before the first validation.
        best_loss: validation loss of the weights that reached `best`.
        best_step: the step of `best`.
        best_weights: the weights that reached it: `last` or `ema`.
        logged: size of metrics.jsonl in bytes at this step.
        window: sums since the last line of training metrics.
        skipped: unreadable images that were skipped and reported: name -> reason.
        scaler: state of fp16's loss scaler.
    """

    step: int = 0
    best: float | None = None
    best_loss: float = 0.0
    best_step: int = 0
    best_weights: str = "last"
    logged: int = 0
    window: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)


def write(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None, progress: TrainingState
) -> Path:
    """Write a state file, then remove older ones; return its path.

    Args:
        folder: the run's `state` folder.
        model: the bare model, as `Runtime.unwrap` returns it.
        optimizer: the optimizer of its parameters.
        average: the running average of its weights, if any.
        progress: how far the run has come.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value
    if average is not None:
        tensors |= {f"ema/{name}": value for name, value in average.weights.items()}
    name = f"step-{progress.step:012d}.safetensors"
    with staging(folder) as private:
        containers.write(tensors, private / name, {"progress": json.dumps(asdict(progress))})
    for old in folder.glob("step-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)
    return folder / name


@torch.no_grad()
def read(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None) -> TrainingState:
    """Read a state file: restore model, optimizer and average in place, and return the rest.

    Args:
        path: a file written by `write`.
        model: the bare model.
        optimizer: its optimizer.
        average: its running average, if any.

    Raises:
        CheckpointError: the file was written by another version.
        TensorMismatch: it belongs to another model.
    """
    tensors, metadata = containers.read(path)
    try:
        progress = TrainingState(**json.loads(metadata["progress"]))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a training state that this version of vitkit can read ({error}); start a new run."
        ) from error
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
        parameter.copy_(tensors[f"model/{name}"])
        if average is not None:
            average.weights[name].copy_(tensors[f"ema/{name}"])
        if name in state:
            optimizer.state[parameter] = {
                entry: value.clone() if entry == "step" and not fused else value.clone().to(parameter.device)
                for entry, value in state[name].items()
            }
    return progress
