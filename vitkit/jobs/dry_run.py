"""What a run would do: steps, learning rates, parameters, memory, data. Only some images of a micro-batch are computed.

With a number of GPUs, also what the run would need there: training/plan.py, with what can be measured here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vitkit.data.base import Source
from vitkit.data.train_loader import TrainLoader
from vitkit.jobs.train import Prepared, wrapped
from vitkit.model.create import need_vit
from vitkit.model.parts.fit import unfit
from vitkit.speed.training import TAKES
from vitkit.training import optim
from vitkit.training.memory import kept_bytes, room
from vitkit.training.plan import Job, Machine, plan
from vitkit.training.settings import AUTO

IMAGES = {"cpu": 16, "cuda": 256}  # that are computed at most: a micro-batch may take more memory than there is
PASSES = 3  # on a GPU, where the first pass also compiles and allocates; the fastest counts


@dataclass(frozen=True)
class Measured:
    """One micro-batch.

    Args:
        seconds: of its forward and backward pass.
        kept: bytes that it keeps for the backward pass.
        decoded: images per second that one core reads, decodes and augments.
        images: that were computed; the rest of the micro-batch is taken to be like them.
    """

    seconds: float
    kept: int
    decoded: float
    images: int


def dry_run(ready: Prepared, gpus: int | None = None) -> dict[str, Any]:
    """Describe a prepared run, and measure one micro-batch of it, or some of its images.

    Args:
        ready: the result of `prepare`.
        gpus: number of GPUs to plan for (default: no plan).

    Returns:
        The values that `vitkit train --dry-run` prints.
    """
    recipe, split, total = ready.recipe, ready.split, ready.recipe.total(len(ready.train))
    measured = _measure(ready)
    seconds, activations = measured.seconds, measured.kept
    weights = sum(p.numel() * 4 for p in ready.model.parameters())
    trained = ready.info["trained"] * 4
    moments = 4 * optim.moments(ready.model, recipe)
    average = weights if recipe.ema is not None else 0
    needed, there = weights + trained + moments + average + activations, room(ready.runtime.device)
    notes = list(ready.notes)
    if there is not None and needed > there and ready.settings.micro_batch != AUTO:
        notes.append(
            f"A step needs about {needed / 2**30:,.1f} GiB; {ready.runtime.device} has {there / 2**30:,.1f}. "
            f"Use --micro-batch {AUTO}."
        )
    points = {
        step: recipe.lr_at(step, total)
        for step in sorted({0, recipe.warmup_steps(total), total // 2, total - 1, total})
    }
    return {
        "data": ready.info["data"],
        "recipe": ready.info["recipe_name"],
        "parameters": ready.info["parameters"],
        "trained": ready.info["trained"],
        "image_size": ready.model.config.image_size,
        "steps": total,
        "epochs": total * recipe.batch_size / len(ready.train),
        "batch": {
            "images": recipe.batch_size,
            "processes": ready.runtime.ranks,
            "each": split.process,
            "micro": split.micro,
            "accumulated": split.count,
            "even": ready.runtime.ranks * split.count * split.micro == recipe.batch_size,
        },
        "optimizer": recipe.optimizer,
        "lr": points,
        "warmup": recipe.warmup_steps(total),
        "precision": ready.settings.precision,
        "device": str(ready.runtime.device),
        "memory": {
            "weights": weights,
            "gradients": trained,
            "moments": moments,
            "average": average,
            "activations": activations,
            "all": needed,
        },
        "seconds_per_step": seconds * split.count,
        "hours": seconds * split.count * total / 3600,
        "measured_images": measured.images,
        "notes": notes,
        **({} if gpus is None else {"scale": scale(ready, gpus, measured)}),
    }


def scale(ready: Prepared, gpus: int, measured: Measured) -> dict[str, Any]:
    """Return what a run needs on so many GPUs: those of this machine, or else H200s.

    Args:
        ready: the result of `prepare`.
        gpus: number of GPUs.
        measured: what was measured here.
    """
    recipe, settings, here = ready.recipe, ready.settings, ready.runtime.device.type == "cuda"
    c = need_vit(ready.model, "--gpus").config
    job = Job(
        config=c,
        batch=recipe.batch_size,
        steps=recipe.total(len(ready.train)),
        images=len(ready.train),
        micro=settings.micro_batch if isinstance(settings.micro_batch, int) else None,
        moments=1 if recipe.optimizer == "sgd" else 2,
        ema=recipe.ema is not None,
        fused=ready.objective.fused and not unfit(c, TAKES),
        checkpointing=bool(settings.checkpointing),
        shard=settings.shard,
    )
    speed = ready.split.micro / measured.seconds if here else None
    machine = Machine(images_per_second=speed, decode=measured.decoded, image_bytes=_file_size(ready.train))
    name = torch.cuda.get_device_name(ready.runtime.device) if here else "H200"
    return {"gpu": name, "measured_here": here, "decode": measured.decoded, **plan(job, gpus, machine)}


def _file_size(source: Source, sample: int = 64) -> float:
    """Return the mean size in bytes of an image as it is stored, of some images from all parts of a source."""
    places = np.linspace(0, len(source) - 1, min(sample, len(source))).astype(int)
    found = []
    for i in places:
        if (file := source.place(int(i))) is not None:
            found.append(file.stat().st_size)
        else:
            raw = source.raw(int(i))
            found.append(len(raw) if isinstance(raw, bytes) else np.asarray(raw).nbytes)
    return float(np.mean(found))


def _measure(ready: Prepared) -> Measured:
    model, recipe, runtime, split = ready.model, ready.recipe, ready.runtime, ready.split
    loader = TrainLoader(
        ready.train,
        model.input_spec,
        recipe.augment,
        batch_size=max(min(split.micro, IMAGES.get(runtime.device.type, IMAGES["cpu"])), 1 + bool(recipe.mix)),
        seed=ready.settings.seed,
        mix=recipe.mix,
        sampling=recipe.sampling,
        augment_on=recipe.augment_on,
        workers=0,
        device=runtime.device,
        bad_images=ready.settings.bad_images,
    )
    began = time.process_time()  # of one core, whatever else this machine does
    batch = next(loader.batches(0, 1))
    decoded = len(batch) / max(time.process_time() - began, 1e-6)
    model.to(runtime.device).train()
    model.gradient_checkpointing = bool(ready.settings.checkpointing)
    learner = ready.objective.learner(model)
    began = time.perf_counter()
    loss, kept = kept_bytes(ready.objective, learner, batch, runtime)
    (loss / len(batch)).backward()
    loss.item()
    seconds = time.perf_counter() - began
    if runtime.device.type == "cuda":
        fused = learner is model and not ready.settings.shard
        forward = wrapped(model, graph=False, fp8=ready.settings.precision == "fp8") if fused else learner
        for _ in range(PASSES):
            began = time.perf_counter()
            loss, _ = ready.objective.loss(forward, batch, 0, runtime)
            (loss / len(batch)).backward()
            loss.item()
            torch.cuda.synchronize()
            seconds = min(seconds, time.perf_counter() - began)
    larger = split.micro / len(batch)
    return Measured(seconds * larger, round(kept * larger), decoded, len(batch))
