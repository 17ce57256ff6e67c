"""All that going on needs, in one file a save: weights, the optimiser's moments, the average, and a few numbers.

The file is whole or not there (written beside, synced, renamed), and older ones go only when it is safe: a kill at any
moment leaves one complete state. No generator is saved, because none is used: randomness is a function of the step.
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
from vitkit.training.ema import Average


@dataclass
class TrainingState:
    """Where a run is.

    Args:
        step: updates that are done.
        best: highest validation accuracy so far; None before the first.
        best_step: when that was.
        best_weights: whose it was: `last` or `ema`.
        logged: bytes of metrics.jsonl at that step.
        window: sums since the last line of metrics.
        skipped: images that could not be read, and why; already told of.
        scaler: state of fp16's loss scale.
    """

    step: int = 0
    best: float | None = None
    best_step: int = 0
    best_weights: str = "last"
    logged: int = 0
    window: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)


def write(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None, progress: TrainingState
) -> Path:
    """Write a state, then remove the older ones.

    Args:
        folder: the run's `state`.
        model: bare, as `Runtime.unwrap` gives it.
        optimizer: over its parameters.
        average: of its weights.
        progress: where the run is.
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
    with staging(folder) as beside:
        containers.write(tensors, beside / name, {"progress": json.dumps(asdict(progress))})
    for old in folder.glob("step-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)
    return folder / name


@torch.no_grad()
def read(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None) -> TrainingState:
    """Bring everything to where it was when `path` was written.

    Args:
        path: what `write` returned.
        model: changed in place.
        optimizer: changed in place.
        average: changed in place.

    Raises:
        CheckpointError: the file is of another model or another version.
    """
    tensors, metadata = containers.read(path)
    try:
        progress = TrainingState(**json.loads(metadata["progress"]))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is no state that this version can read ({error}); start another run.") from error
    fused = optimizer.defaults.get("fused")
    state: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "optimizer":
            name, _, entry = name.rpartition("/")
            state.setdefault(name, {})[entry] = value
    for name, parameter in model.named_parameters():
        if tensors.get(f"model/{name}", torch.empty(0)).shape != parameter.shape:
            raise TensorMismatch(f"{path} is of another model: {name} is missing or of another shape.")
        parameter.copy_(tensors[f"model/{name}"])
        if average is not None:
            average.weights[name].copy_(tensors[f"ema/{name}"])
        if name in state:
            optimizer.state[parameter] = {
                entry: value.clone() if entry == "step" and not fused else value.clone().to(parameter.device)
                for entry, value in state[name].items()
            }
    return progress
