"""A training step: forward, cross entropy, backward, clipping to 1, fused AdamW; the same step for every contender.

Ours are what `vitkit train` runs, on CUDA as one graph (training/whole_step.py) of fused parts (speed/training.py), and
the plain model. Weights are fp32; in bf16 the forward pass runs under autocast.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.cpu_products import fp32_products
from vitkit.cuda_capture import capture
from vitkit.data.base import Pixels
from vitkit.data.batch import Batch
from vitkit.errors import ConfigError
from vitkit.jobs.bench.limit import LIMIT, products
from vitkit.jobs.bench.options import Options
from vitkit.jobs.bench.table import Benchmark
from vitkit.jobs.bench.turns import Contenders, Run
from vitkit.jobs.peers import PEERS, cudnn_attention
from vitkit.model.vit import ViT
from vitkit.runtime import Runtime
from vitkit.speed.choices import NAME, pinned
from vitkit.speed.training import TrainingForward
from vitkit.training.objectives import Classify
from vitkit.training.optim import Update, clipping, optimizer_for
from vitkit.training.recipe import Recipe
from vitkit.training.whole_step import EAGER, Capture, WholeStep

BATCH = {"cpu": 8, "cuda": 256}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a model that is on its device."""
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
    products: Callable[[str], AbstractContextManager[object]] = lambda device: nullcontext(),
) -> Run:
    """Return a function that does one training step.

    Args:
        model: on its device, in fp32.
        optimizer: of its parameters.
        x: pixels [B, C, H, W].
        y: classes [B].
        dtype: precision of the matrix products.
        compiled: whether torch.compile compiles the model.
        mode: mode of the compiler; `reduce-overhead` makes CUDA graphs.
        products: a context for the matrix products of a device in fp32 (default: torch's own).
    """
    model.train()
    forward = torch.compile(model, dynamic=False, mode=mode) if compiled else model

    def step() -> None:
        kind = x.device.type
        with products(kind) if dtype == torch.float32 else torch.autocast(kind, dtype=dtype):
            logits = forward(x)
        F.cross_entropy(logits.float(), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # at the end: a contender that waits for its turn holds no gradients

    return step


def whole_step(model: ViT, x: Tensor, y: Tensor, precision: str, fp8: bool = False, capture: Capture = capture) -> Run:
    """Return a function that does one training step as `vitkit train` does it on one CUDA device.

    Args:
        model: on its device, in fp32.
        x: pixels [B, C, H, W].
        y: classes [B].
        precision: of the matrix products, a key of PRECISIONS.
        fp8: whether those of the blocks run in fp8.
        capture: captures work on the device.
    """
    recipe = Recipe(source="the step of `step_of`", steps=1, batch_size=len(x), lr=1e-4, weight_decay=0.1, clip=1.0)
    runtime, optimizer = Runtime(str(x.device), precision), optimizer_for(model, recipe, graph=True)
    parameters = list(model.train().parameters())
    clip = clipping(optimizer, parameters, recipe.clip, runtime)
    update = Update(optimizer, parameters, None, clip, runtime.scaler)
    objective = Classify(recipe, 0, Pixels(np.zeros((1, 1, 1, 3), np.uint8), [0], ["a"]))
    step = WholeStep(TrainingForward(model, fp8=fp8), objective, update, len(x), runtime, capture)
    batch = Batch(x, y, torch.arange(len(x), device=x.device), y, torch.ones(len(x), device=x.device))
    with tempfile.TemporaryDirectory() as folder, pinned(Path(folder) / NAME):  # as in a run folder
        for _ in range(EAGER):
            step.work(batch)
        step(batch)
    return lambda: step(batch)


def measure(options: Options) -> Iterator[Benchmark]:
    """Yield one table per batch size, in float32 or bfloat16."""
    if options.torch_dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"training is measured in float32 or bfloat16; got {options.dtype}.")
    for batch in options.batches([BATCH[options.torch_device.type]]):
        yield measure_batch(options, batch)


def measure_batch(options: Options, batch: int) -> Benchmark:
    """Measure one batch size."""
    c, device, dtype = options.config, options.torch_device, options.torch_dtype
    cuda = device.type == "cuda"
    found = Contenders(options)
    x = torch.randn(batch, c.num_channels, *c.image_hw, device=device)
    y = torch.randint(0, c.num_classes, (batch,), device=device)

    def step(model: nn.Module, compiled: bool = False, mode: str | None = None, **how: Any) -> Run:
        model.to(device)
        return step_of(model, adamw(model), x, y, dtype, compiled, mode, **how)

    def peer(name: str, compiled: bool = False, mode: str | None = None) -> Run:
        return step(PEERS[name](c), compiled, mode)

    if cuda and dtype == torch.bfloat16:
        found.add("ours", "train", lambda: whole_step(ViT(c).to(device), x, y, "bf16"))
        found.add("ours", "train --precision fp8", lambda: whole_step(ViT(c).to(device), x, y, "bf16", fp8=True))
    else:
        found.add("ours", "train", lambda: step(TrainingForward(ViT(c)), products=fp32_products))
    if options.compiling and not cuda:  # on CUDA nothing is left to compile
        found.add("ours", "train --compile", lambda: step(TrainingForward(ViT(c)), compiled=True))
    found.add("ours", "plain model", lambda: step(ViT(c)))
    for name in options.peers:
        if not found.add("peer", name, partial(peer, name)) or not options.compiling:
            continue
        found.add("peer", f"{name}, compiled", partial(peer, name, compiled=True))
        if cuda:
            with cudnn_attention():
                best = partial(peer, name, compiled=True, mode="reduce-overhead")
                found.add("peer", f"{name}, compiled, cuDNN attention, CUDA graphs", best)
    found.add("limit", LIMIT, lambda: products(c, batch, device, dtype, backward=True))
    return found.table(f"{options.model}, training, batch {batch}, {options.words()}", batch, run="step")
