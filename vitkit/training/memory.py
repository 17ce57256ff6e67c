"""How much memory a forward pass keeps for the backward pass, and how many images fit into what is left.

On an accelerator nothing needs to be estimated: an allocation that does not fit raises an error. The CPU has no such
error; the system ends the process instead.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from vitkit.data.batch import Batch
from vitkit.model.config import InputSpec
from vitkit.runtime import Runtime
from vitkit.training.objectives import Objective

SHARE = 0.8  # of the free memory that may be used
WORK = 1.5  # memory of a forward and backward pass, relative to what is kept between them


def kept_bytes(objective: Objective, learner: nn.Module, batch: Batch, runtime: Runtime) -> tuple[Tensor, int]:
    """Compute the loss of a batch; return it, and the bytes that its backward pass needs besides the parameters.

    Args:
        objective: what is learnt.
        learner: the result of `objective.learner`.
        batch: the images.
        runtime: sets the precision.
    """
    own = {p.untyped_storage().data_ptr() for p in learner.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss, _ = objective.loss(learner, batch, 0, runtime)
    return loss, sum(kept.values())


def images_that_fit(
    objective: Objective, learner: nn.Module, spec: InputSpec, runtime: Runtime, free: int | None = None
) -> int | None:
    """Estimate how many images a forward and backward pass on the CPU can take at once; None if nobody knows.

    Args:
        objective: what is learnt.
        learner: the result of `objective.learner`, in training mode.
        spec: the input that the model expects.
        runtime: sets the precision.
        free: free memory in bytes (default: this machine's, or what its container allows).
    """
    free = free_bytes() if free is None else free
    if free is None:
        return None
    zeros, count = torch.zeros(2, dtype=torch.int64), 2
    batch = Batch(torch.zeros(count, len(spec.mean), *spec.size), zeros, zeros, zeros, torch.ones(count))
    _, kept = kept_bytes(objective, learner, batch, runtime)
    moments = 3 * sum(p.numel() * 4 for p in learner.parameters() if p.requires_grad)  # gradients, and two moments
    return max(1, int((SHARE * free - moments) / (WORK * kept / count)))


def room(device: torch.device) -> int | None:
    """Return the memory of a GPU in bytes, or of the CPU what is free; None if nobody knows."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return free_bytes() if device.type == "cpu" else None


def free_bytes() -> int | None:
    """Return the free memory of this machine in bytes, or what is left to its container if that is less."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        found += [int(limit) - int(used)] if limit != "max" else []
    except (OSError, ValueError):  # another system, or no container
        if not found and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
            found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    return min(found, default=None)
