"""The learning rate, a function of the step: lr(t) = base x decay(t / T) x min(1, t / warm-up). Resuming needs nothing.

t counts the updates that are done, so the first one of a run with warm-up has a learning rate of zero (as the
authors'), and the schedule reaches its end at T, where the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from vitkit.training.recipe import Recipe

DECAYS: dict[str, Callable[[float], float]] = {  # share of the run that is done -> share of lr
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


def lr_at(recipe: Recipe, step: int, total: int) -> float:
    """The learning rate of one step.

    Args:
        recipe: base, shape, end and warm-up.
        step: t, from 0.
        total: T, steps of the run.
    """
    warmup = recipe.warmup_steps(total)
    left = DECAYS[recipe.decay](min(step / total, 1.0))
    decayed = recipe.final_lr + (recipe.lr - recipe.final_lr) * left
    return decayed * (min(1.0, step / warmup) if warmup else 1.0)
