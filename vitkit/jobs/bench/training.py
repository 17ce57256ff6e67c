"""A training step: forward, cross entropy, backward, clip to 1, fused AdamW; the same step for everybody.

Ours is what our loop runs (`lean`, see speed/training.py) and, beside it, the model as it is. Weights are fp32; in bf16
the forward runs under autocast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.jobs.bench.limit import LIMIT, products
from vitkit.jobs.bench.options import Options
from vitkit.jobs.bench.table import Benchmark
from vitkit.jobs.bench.turns import Contenders, Run
from vitkit.jobs.peers import PEERS
from vitkit.model.vit import ViT
from vitkit.speed.training import TrainingForward

BATCH = {"cpu": 8, "cuda": 256}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of a model's step.

    Args:
        model: on its device.
    """
    kernels = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": kernels, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-4, fused=True
    )


def step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    dtype: torch.dtype,
    compiled: bool = False,
    mode: str | None = None,
) -> Run:
    """One training step.

    Args:
        model: on its device, in fp32.
        optimizer: of its parameters.
        x: pixels.
        y: classes.
        dtype: of the matrix products.
        compiled: whether torch compiles the model.
        mode: of the compiler, such as reduce-overhead, which makes CUDA graphs.
    """
    model.train()
    forward = torch.compile(model, dynamic=False, mode=mode) if compiled else model

    def step() -> None:
        with nullcontext() if dtype == torch.float32 else torch.autocast(x.device.type, dtype=dtype):
            logits = forward(x)
        F.cross_entropy(logits.float(), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # at the end: whoever waits for its turn holds no gradients

    return step


def measure(options: Options) -> Iterator[Benchmark]:
    """A table for each batch size.

    Args:
        options: of what, how, and beside whom.
    """
    if options.type not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"training is measured in float32 or bfloat16; got {options.precision}.")
    for batch in options.batches([BATCH[options.place.type]]):
        yield measure_batch(options, batch)


def measure_batch(options: Options, batch: int) -> Benchmark:
    """The table of one batch size.

    Args:
        options: of what, how, and beside whom.
        batch: images.
    """
    c, device, dtype = options.config, options.place, options.type
    found = Contenders(device)
    x = torch.randn(batch, c.num_channels, *c.image_hw, device=device)
    y = torch.randint(0, c.num_classes, (batch,), device=device)

    def add(kind: str, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        found.add(kind, name, lambda: step_of(model, optimizer, x, y, dtype))
        if options.compiling and name in found.runs:  # the same weights: compiling changes none of them
            found.add(kind, f"{name}, compiled", lambda: step_of(model, optimizer, x, y, dtype, compiled=True))

    lean, plain = ViT(c).to(device), ViT(c).to(device)
    add("ours", "lean", TrainingForward(lean, graph=True), adamw(lean))  # as a run of one process has it
    add("ours", "plain", plain, adamw(plain))
    for name in PEERS if options.peer is None else options.peer:
        try:
            theirs = PEERS[name](c).to(device)
        except ImportError as error:
            found.note(name, str(error))
        else:
            add("peer", name, theirs, adamw(theirs))
    found.add("limit", LIMIT, lambda: products(c, batch, device, dtype, backward=True))
    return found.table(
        f"{options.model}, training, batch {batch}, {device.type}, {options.precision}",
        batch,
        options.rounds,
        options.seconds,
        run="step",
    )
