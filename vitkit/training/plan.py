"""What a run needs on N GPUs: time, memory, cores, disk and network, computed from measured figures.

A step takes as long as its share of the images computes, plus the optimizer, plus whatever of the communication the
backward pass does not hide. Everything else follows from counts: parameters, floating-point operations, tokens, bytes.
docs/scale.md says how far the results can be trusted. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vitkit.model import checks
from vitkit.model.config import ViTConfig, variant
from vitkit.model.count import flops, parameters


@dataclass(frozen=True)
class Figure:
    """A measured number.

    Args:
        value: the number.
        unit: its unit.
        what: what was measured, and where.
        date: when; docs/log.md has the entry.
    """

    value: float
    unit: str
    what: str
    date: str


FIGURES: dict[str, Figure] = {
    "fused b/16": Figure(5112, "images/s", "training ViT-B/16, batch 256, bf16, fused kernels, H200", "2026-11-18"),
    "fused l/16": Figure(1488, "images/s", "training ViT-L/16, batch 128, bf16, fused kernels, H200", "2026-11-18"),
    "plain b/16": Figure(3022, "images/s", "training ViT-B/16, batch 256, bf16, plain PyTorch, H200", "2026-11-15"),
    "decode": Figure(242, "images/s per core", "training from JPEG files, short side 256, 16 cores", "2026-11-15"),
    "image": Figure(42_124, "bytes", "mean JPEG file of 500 ImageNet photos, short side 256", "2026-11-16"),
    "activations": Figure(34, "bytes", "kept per token, width and block, bf16, plain PyTorch", "2026-11-16"),
    "checkpointed": Figure(4.6, "bytes", "the same with activation checkpointing", "2026-11-16"),
}
LINK = 50e9  # bytes per second and GPU between machines: 400 Gbit/s, an assumption; none was measured
BANDWIDTH = 4.8e12  # bytes per second of an H200's memory, by its data sheet
UPDATE = 28  # bytes that Adam reads and writes per parameter: weight, gradient, two moments
FEWEST = 32  # images per GPU and step: the speed with fewer was not measured in training
KEPT_STATES = 3  # on disk at once: the two that are kept, and the one being written


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one GPU and its link do.

    Args:
        images_per_second: of training, on one GPU (default: from FIGURES).
        fixed: seconds per step that do not depend on the images (default: the optimizer's, from BANDWIDTH).
        decode: images per second that one core reads, decodes and augments (default: from FIGURES).
        image_bytes: mean size of an image file (default: from FIGURES).
        link: bytes per second that a GPU sends to the others (default: LINK).
        overlap: share of the computing during which a GPU can also communicate (default: the backward pass, two
            thirds; all of it if the model is sharded).
    """

    images_per_second: float | None = None
    fixed: float | None = None
    decode: float = FIGURES["decode"].value
    image_bytes: float = FIGURES["image"].value
    link: float = LINK
    overlap: float | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, as far as its size matters.

    Args:
        config: the model.
        batch: images per step, over all GPUs.
        steps: updates of the run.
        images: images of the data set.
        micro: most images per GPU and forward pass (default: all of its share).
        moments: per parameter: 2 for Adam, 1 for SGD.
        ema: whether the weights are averaged.
        fused: whether the fused kernels compute it.
        checkpointing: whether activations are recomputed.
        shard: whether the model is divided over the GPUs.
    """

    config: ViTConfig
    batch: int
    steps: int
    images: int
    micro: int | None = None
    moments: int = 2
    ema: bool = False
    fused: bool = True
    checkpointing: bool = False
    shard: bool = False


def images_per_second(job: Job) -> float:
    """Estimate the training speed of one H200 from the measured model that is nearest in size.

    Args:
        job: its model, and how it is computed.
    """
    work = flops(job.config) * (4 if job.checkpointing else 3)  # a backward pass is twice a forward pass
    names = ["fused b/16", "fused l/16"] if job.fused and not (job.shard or job.checkpointing) else ["plain b/16"]
    speeds = {flops(variant(name.split()[1])): FIGURES[name].value for name in names}
    nearest = min(speeds, key=lambda size: abs(math.log(size / flops(job.config))))
    return speeds[nearest] * 3 * nearest / work


def plan(job: Job, gpus: int, machine: Machine | None = None) -> dict[str, Any]:
    """Return what a run needs on so many GPUs, in bytes, seconds and cores.

    Args:
        job: the run.
        gpus: number of GPUs.
        machine: what one of them does (default: an H200 with the measured figures).
    """
    checks.whole("gpus", gpus, 1)
    machine = machine or Machine()
    P, each = parameters(job.config), job.batch / gpus
    speed = machine.images_per_second or images_per_second(job)
    computing = each / speed
    share = (gpus - 1) / gpus
    # All-reduce sends each fp32 gradient twice per step. Sharded, every micro-batch gathers the weights twice in bf16
    # and sends the gradients once in fp32.
    passes = math.ceil(each / job.micro) if job.shard and job.micro else 1
    sent = share * P * 8 * passes
    overlap = machine.overlap if machine.overlap is not None else 1.0 if job.shard else 2 / 3
    waiting = max(0.0, sent / machine.link - overlap * computing)
    fixed = UPDATE * P / (gpus if job.shard else 1) / BANDWIDTH if machine.fixed is None else machine.fixed
    step = computing + waiting + fixed
    rate = job.batch / step
    hidden = int(overlap * job.batch / speed / (8 * P / machine.link))  # GPUs whose backward pass hides what they send
    state = 4 * P * (1 + job.moments + job.ema)
    return {
        "gpus": gpus,
        "images_per_gpu": each,
        "speed_of_one": speed,
        "seconds_per_step": step,
        "waiting": waiting / step,
        "images_per_second": rate,
        "hours": job.steps * step / 3600,
        "gpu_hours": job.steps * step / 3600 * gpus,
        "memory": memory(job, gpus),
        "cores_per_gpu": math.ceil(rate / gpus / machine.decode),
        "cores": math.ceil(rate / machine.decode),
        "read_per_second": rate * machine.image_bytes,
        "data": job.images * machine.image_bytes,
        "state": state,
        "disk": KEPT_STATES * state + 4 * 4 * P,  # and the checkpoints: best, last, ema and one being written
        "sent_per_step": sent,
        "link": machine.link,
        "link_needed": sent / (overlap * computing) if overlap else math.inf,
        "most_gpus": max(1, min(hidden, job.batch // FEWEST)),
        "limit": "images" if job.batch // FEWEST <= hidden else "link",
    }


def memory(job: Job, gpus: int) -> dict[str, float]:
    """Return the bytes that one GPU holds at the end of a forward pass, in mixed precision.

    Args:
        job: the run.
        gpus: number of GPUs.
    """
    c, P = job.config, parameters(job.config)
    parts = gpus if job.shard else 1
    tokens = c.num_prefix_tokens + c.num_patches
    one_block = FIGURES["activations"].value * tokens * c.hidden_size
    per_image = one_block * c.num_hidden_layers
    if job.checkpointing:
        per_image = FIGURES["checkpointed"].value * tokens * c.hidden_size * c.num_hidden_layers + one_block
    images = min(job.micro or math.inf, math.ceil(job.batch / gpus))
    found = {
        "weights": 4 * P / parts,
        "gradients": 4 * P / parts,
        "moments": 4 * P * job.moments / parts,
        "average": 4 * P * job.ema / parts,
        "bf16 copies": 2 * P if not job.shard else 2 * 2 * P / c.num_hidden_layers,  # sharded: of two blocks
        "activations": images * per_image,
    }
    return {**found, "all": sum(found.values())}
