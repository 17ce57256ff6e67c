"""What a run would do: steps, learning rates, parameters, memory, data. Only one micro-batch is computed."""

from __future__ import annotations

import time
from typing import Any

from vitkit.data.loader import TrainLoader
from vitkit.jobs.train import Prepared
from vitkit.training import optim
from vitkit.training.memory import kept_bytes


def dry_run(ready: Prepared) -> dict[str, Any]:
    """Describe a prepared run, and measure one micro-batch of it.

    Args:
        ready: the result of `prepare`.

    Returns:
        The values that `vitkit train --dry-run` prints.
    """
    recipe, split, total = ready.recipe, ready.split, ready.recipe.total(len(ready.train))
    seconds, activations = _measure(ready)
    weights = sum(p.numel() * 4 for p in ready.model.parameters())
    trained = ready.info["trained"] * 4
    moments = 4 * optim.moments(ready.model, recipe)
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
            "average": weights if recipe.ema is not None else 0,
            "activations": activations,
            "all": weights + trained + moments + activations + (weights if recipe.ema is not None else 0),
        },
        "seconds_per_step": seconds * split.count,
        "hours": seconds * split.count * total / 3600,
        "notes": list(ready.notes),
    }


def _measure(ready: Prepared) -> tuple[float, int]:
    """Return the seconds of one micro-batch, forward and backward, and the bytes it keeps for the backward pass."""
    model, recipe, runtime, split = ready.model, ready.recipe, ready.runtime, ready.split
    loader = TrainLoader(
        ready.train,
        model.input_spec,
        recipe.augment,
        batch_size=max(split.micro, 1 + bool(recipe.mix)),
        seed=ready.settings.seed,
        mix=recipe.mix,
        sampling=recipe.sampling,
        augment_on=recipe.augment_on,
        workers=0,
        device=runtime.device,
        bad_images=ready.settings.bad_images,
    )
    batch = next(loader.batches(0, 1))
    model.to(runtime.device).train()
    model.gradient_checkpointing = bool(ready.settings.checkpointing)
    learner = ready.objective.learner(model)
    began = time.perf_counter()
    loss, kept = kept_bytes(ready.objective, learner, batch, runtime)
    (loss / len(batch)).backward()
    loss.item()
    return time.perf_counter() - began, kept
