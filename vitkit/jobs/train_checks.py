"""What is refused or noted about a request to train, before anything is written."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vitkit.data.base import Source
from vitkit.errors import ConfigError, OutputError
from vitkit.model.backbone import Backbone
from vitkit.model.create import configuration
from vitkit.training.objectives import OBJECTIVES
from vitkit.training.optim import moments
from vitkit.training.recipe import Recipe
from vitkit.training.settings import AUTO, BatchSplit
from vitkit.training.state import KEPT

if TYPE_CHECKING:
    from vitkit.jobs.train import Prepared

CUSTOM = "custom"  # in run.json: a model that was passed in Python
FEW_IMAGES = 10_000  # fewer than these are too few to train from scratch


def check_model(model: str | None, weights: str | None, fields: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse a request that names two models to train, none, or one that does not exist."""
    if model is not None and weights is not None:
        raise ConfigError("Expected either --model (a new model) or --from (pre-trained weights); got both.")
    if fields and weights is not None:
        raise ConfigError(f"Expected --set with a new model; got --set {next(iter(fields))} and --from weights.")
    if model is not None and model != CUSTOM:
        configuration(model, **fields)
    elif model is None and weights is None and recipe.config is None:
        raise ConfigError("This recipe needs a model: give --model (see `vitkit models`) or --from with weights.")
    for name, given in (("--lora", recipe.lora), ("--from-probe", recipe.from_probe)):
        if given and weights is None and model != CUSTOM:
            raise ConfigError(f"{name} is for pre-trained weights; got a new model. Give weights with --from.")
        if given and recipe.objective != "classify":
            other = "a teacher" if recipe.objective == "distil" else f"the objective {recipe.objective}"
            raise ConfigError(f"{name} is for classification and cannot be combined with {other}.")


def check_data(recipe: Recipe, val: Source | None) -> None:
    """Refuse a recipe that asks of the data what it does not have."""
    if recipe.early_stop is not None and val is None:
        raise ConfigError(
            "--early-stop needs images to validate on; got none. Use --val 0.1, or a val folder, or leave it out."
        )
    option = "--class-weights" if recipe.class_weights == "balanced" else "--sampling"
    if recipe.objective == "several-labels" and "balanced" in (recipe.class_weights, recipe.sampling):
        raise ConfigError(f"{option} balanced needs one class per image; this data has several labels. Leave it out.")
    if not OBJECTIVES[recipe.objective].labels and "balanced" in (recipe.class_weights, recipe.sampling):
        raise ConfigError(f"{option} balanced needs labels, and {recipe.objective} uses none; leave it out.")


def check_space(out: Path, model: Backbone, recipe: Recipe) -> None:
    """Refuse to start if the disk cannot hold the states (those that are kept and a new one) and the checkpoints."""
    weights = sum(p.numel() * 4 for p in model.parameters())
    state = weights * (1 + (recipe.ema is not None)) + 4 * moments(model, recipe)
    needed = (KEPT + 1) * state + 4 * weights
    place = next(p for p in (out, *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OutputError(
            f"This run needs about {math.ceil(needed / 2**20):,} MiB of disk space at {out}; only {free // 2**20:,} "
            f"MiB are free. Free some space, or choose another --out."
        )


def notes(
    name: str, recipe: Recipe, model: str | None, weights: str | None, images: int, data: str | Path
) -> list[str]:
    """Return sentences about a request that can work, but may not do what the user expects."""
    notes = []
    if weights is None and not recipe.small_data and images < FEW_IMAGES and OBJECTIVES[recipe.objective].labels:
        notes.append(
            f"{images:,} images are too few to train a Vision Transformer well from scratch. Train a probe on frozen "
            f"features (`vitkit probe {data} --from WEIGHTS`) or fine-tune (--from WEIGHTS); to train from scratch "
            f"anyway, use --recipe small-data."
        )
    if weights is None and "finetune" in name:
        notes.append(f"The recipe {name!r} is meant for pre-trained weights; give them with --from.")
    if (
        model not in (None, CUSTOM)
        and recipe.models
        and not any(configuration(model) == configuration(m) for m in recipe.models)
    ):
        notes.append(f"The recipe {name!r} was published for {', '.join(recipe.models)}, not for {model}.")
    return notes


def other_randomness(ready: Prepared, stored: Mapping[str, Any]) -> list[str]:
    """Warn if dropout in a resumed run draws other numbers than in an uninterrupted one."""
    if not stored or not (ready.recipe.dropout or ready.recipe.drop_path):
        return []
    processes = stored["processes"]
    micro, whole = stored["settings"]["micro_batch"], BatchSplit.among(ready.recipe.batch_size, processes)
    micro = micro if micro == AUTO else whole.at_most(micro or whole.process).micro
    now = AUTO if ready.settings.micro_batch == AUTO else ready.split.micro
    device = torch.device(stored["device"]).type
    changed = [
        f"{what} from {old} to {new}"
        for what, old, new in (
            ("micro-batch", micro, now),
            ("processes", processes, ready.runtime.ranks),
            ("device", device, ready.runtime.device.type),
        )
        if old != new
    ]
    if not changed:
        return []
    return [
        f"This run uses dropout or stochastic depth, whose random numbers depend on what has changed since it was "
        f"started: {', '.join(changed)}. Its result will differ from that of an uninterrupted run."
    ]
