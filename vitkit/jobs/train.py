"""Data, a recipe and a model -> a run folder. Everything that cannot work is refused before anything is written."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitkit.data.base import Source
from vitkit.data.order import RANDOM_NUMBERS
from vitkit.errors import ConfigError, OutputError, pick
from vitkit.jobs.splits import train_and_val
from vitkit.model.config import InputSpec, ViTConfig, variant
from vitkit.model.vit import ViT
from vitkit.runtime import Runtime
from vitkit.speed.training import TrainingForward, refuse_fp8
from vitkit.training.build import new_model, pretrained
from vitkit.training.loop import Loop, Outcome, Watch
from vitkit.training.optim import freeze
from vitkit.training.recipe import Recipe
from vitkit.training.recipes import RECIPES
from vitkit.training.run_folder import RunFolder
from vitkit.training.settings import PRECISIONS, BatchSplit, Settings

FEW_IMAGES = 10_000  # below which training from scratch is warned of
# What must be the same when a run goes on. Processes, micro-batches, workers and devices may change.
DECIDES = ("seed", "precision")


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Args:
        model: with its initial weights.
        train: images that are trained on.
        val: images that are validated on.
        recipe: with the user's changes.
        settings: of the machine.
        runtime: processes and device.
        info: what run.json will hold.
        notes: what the user should know, a sentence each.
        out: the run's folder.
        resume: whether to go on with what is there.
    """

    model: ViT
    train: Source
    val: Source | None
    recipe: Recipe
    settings: Settings
    runtime: Runtime
    info: dict[str, Any]
    notes: tuple[str, ...]
    out: Path
    resume: bool

    @property
    def split(self) -> BatchSplit:
        """How a step's images are shared out."""
        return BatchSplit.of(self.recipe, self.settings, self.runtime)


def prepare(
    data: str | Path | None,
    out: str | Path,
    *,
    recipe: str | Recipe | None = None,
    model: str | None = None,
    weights: str | Path | None = None,
    image_size: int | tuple[int, int] | None = None,
    resume: bool = False,
    accumulate: int | None = None,
    changes: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Prepared:
    """Check a run and make everything that it needs; nothing is written yet.

    Args:
        data: what `vitkit.data.open_splits` takes; when a run goes on, its own when not given. So are the next four.
        out: the run's folder.
        recipe: a row of RECIPES, or a Recipe; `finetune` with weights and `small-data` without, when not given.
        model: a variant; the recipe's own when not given.
        weights: what `vitkit.load` takes.
        image_size: pixels.
        resume: whether to go on with what is there.
        accumulate: micro-batches of a step in each process, instead of `micro_batch` in settings.
        changes: fields of Recipe that the user sets; None leaves them.
        settings: fields of Settings that the user sets; None leaves them.

    Raises:
        VitkitError: something cannot work; one sentence says what to do.
    """
    out = Path(out).expanduser()
    stored: dict[str, Any] = {}
    if resume and (out / "run.json").is_file():
        stored = dict(RunFolder.open(out).info)
        if stored.get("kind") != "train":
            raise ConfigError(f"{out} holds a {stored.get('kind')}, not a training; choose another --out.")
        if stored["same"].get("random numbers") != RANDOM_NUMBERS:
            raise ConfigError(
                f"{out} was started by a version of vitkit that draws other random numbers, so it cannot be resumed "
                f"to the same result; start a new run with another --out."
            )
    else:
        RunFolder.check_place(out)
    data = data if data is not None else stored.get("data", {}).get("spec")
    if data is None:
        raise ConfigError("Give the data to train on: a folder of images, or a name such as digits.")
    model, weights = model or stored.get("model"), str(weights) if weights else stored.get("weights")
    if model is not None and weights is not None:
        raise ConfigError("Give --model for a new model or --from for pre-trained weights, not both.")
    name, how = _recipe(recipe, weights, stored)
    how = how.change(**(changes or {}))
    given = {key: value for key, value in (settings or {}).items() if value is not None}
    chosen = Settings(**{**stored.get("settings", {}), **given})
    runtime = Runtime(chosen.device, PRECISIONS[chosen.precision])
    if accumulate is not None:
        chosen = _accumulated(chosen, how, runtime, accumulate)
    BatchSplit.of(how, chosen, runtime)
    if model is not None:
        variant(model)
    elif weights is None and how.config is None:
        raise ConfigError("What shall be trained? Give --model (see `vitkit models`) or --from with weights.")
    train, val, notes = train_and_val(data, how.val, chosen.seed)
    how.warmup_steps(how.total(len(train)))
    if how.mix and how.batch_size < 2:
        raise ConfigError("MixUp and CutMix need at least 2 images in a batch; use a larger --batch-size.")

    if stored and RunFolder.open(out).latest() and model == stored["model"] and weights == stored["weights"]:
        config = ViTConfig.from_dict(stored["same"]["config"])  # the state brings the weights
        built = ViT(config, InputSpec.from_dict(stored["input_spec"]))
    elif weights is not None:
        built = pretrained(weights, how, train.class_names, image_size)
    else:
        built = new_model(model, how, train.class_names, chosen.seed, image_size)
    if chosen.precision == "fp8":
        refuse_fp8(built.config, runtime.device)
    trained = freeze(built, how.freeze)
    notes += _notes(name, how, model, weights, built, len(train), data)
    info = {
        "kind": "train",
        "recipe_name": name,
        "recipe": how.to_dict(),
        "settings": chosen.to_dict(),
        "model": model,
        "weights": weights,
        "input_spec": built.input_spec.to_dict(),
        "processes": runtime.ranks,
        "device": str(runtime.device),
        "torch_threads": torch.get_num_threads(),
        "steps": how.total(len(train)),
        "parameters": sum(p.numel() for p in built.parameters()),
        "trained": trained,
        "data": {
            "spec": str(data),
            "train": len(train),
            "val": len(val) if val else 0,
            "classes": list(train.class_names),
            "counts": train.counts(),
        },
        "same": {
            "config": built.config.to_dict(),
            "recipe": _decisive(how),
            "random numbers": RANDOM_NUMBERS,
            **{k: getattr(chosen, k) for k in DECIDES},
            "classes": list(train.class_names),
            "data": train.fingerprint(),
            "validation data": val.fingerprint() if val else None,
            "weights": weights,
        },
    }
    if stored:
        RunFolder.open(out).check(info)
    _check_space(out, built, how)
    return Prepared(built, train, val, how, chosen, runtime, info, tuple(notes), out, resume)


def train(
    data: str | Path | None, out: str | Path, *, watch: Watch | None = None, **how: Any
) -> tuple[RunFolder, Outcome]:
    """Train, and leave a run folder.

    Args:
        data: what `vitkit.data.open_splits` takes.
        out: the run's folder.
        watch: is told what happens.
        how: everything else that `prepare` takes.
    """
    return start(prepare(data, out, **how), watch)


def start(ready: Prepared, watch: Watch | None = None) -> tuple[RunFolder, Outcome]:
    """Train what was prepared.

    Args:
        ready: what `prepare` returned.
        watch: is told what happens, in the main process.
    """
    runtime = ready.runtime
    runtime.wait()  # until all have looked at the place: the next line fills it
    run = runtime.on_main(lambda: RunFolder.create(ready.out, ready.info, resume=ready.resume))
    alone = runtime.ranks == 1 and ready.split.count == 1  # a graph's gradients can be neither shared nor added up
    loop = Loop(
        ready.model,
        ready.train,
        ready.val,
        ready.recipe,
        ready.settings,
        run,
        runtime,
        watch,
        wrap_forward=partial(TrainingForward, graph=alone, fp8=ready.settings.precision == "fp8"),
    )
    threads = torch.get_num_threads()
    if runtime.device.type == "cuda":
        torch.set_num_threads(1)  # the cores are the workers': threads that wait for small work take them away
    try:
        at = loop.resume()
        outcome = loop()
    finally:
        torch.set_num_threads(threads)
    if outcome.step == at and runtime.main and watch is not None:
        watch({"event": "note", "text": f"{run.path} is finished: all {loop.total:,} steps are done."})
    return run, outcome


def _recipe(recipe: str | Recipe | None, weights: str | None, stored: Mapping[str, Any]) -> tuple[str, Recipe]:
    if isinstance(recipe, Recipe):
        return "custom", recipe
    if stored and recipe in (None, stored["recipe_name"]):
        return stored["recipe_name"], Recipe.from_dict(stored["recipe"])
    name = recipe or ("finetune" if weights else "small-data")
    return name, pick(RECIPES, name, "recipe")


def _accumulated(settings: Settings, recipe: Recipe, runtime: Runtime, accumulate: int) -> Settings:
    process = BatchSplit.of(recipe, dataclasses.replace(settings, micro_batch=None), runtime).process
    if accumulate < 1 or process % accumulate:
        raise ConfigError(
            f"--accumulate {accumulate} does not divide the {process} images of each process; use "
            f"{max(d for d in range(1, process + 1) if process % d == 0 and d <= max(accumulate, 1))}."
        )
    return dataclasses.replace(settings, micro_batch=process // accumulate)


def _decisive(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe decides the result."""
    left_out = ("source", "expect", "models", "config", "small_data", "lr_choices", "lr_rule", "val")
    return {name: value for name, value in recipe.to_dict().items() if name not in left_out}


def _notes(
    name: str, recipe: Recipe, model: str | None, weights: str | None, built: ViT, images: int, data: str | Path
) -> list[str]:
    notes = []
    if weights is None and not recipe.small_data and images < FEW_IMAGES:
        notes.append(
            f"{images:,} images are few to train a Vision Transformer on from scratch: expect little. Learn "
            f"on frozen features (`vitkit probe {data} --from WEIGHTS`) or fine-tune (--from WEIGHTS); if it "
            f"must be from scratch, --recipe small-data is made for few images."
        )
    if weights is None and "finetune" in name:
        notes.append(f"The recipe {name!r} is made for pre-trained weights, and none are given (--from).")
    if (
        model is not None
        and recipe.models
        and not any(
            variant(model).hidden_size == variant(m).hidden_size and variant(model).patch_size == variant(m).patch_size
            for m in recipe.models
        )
    ):
        notes.append(f"The recipe {name!r} was published for {', '.join(recipe.models)}; {model} is another model.")
    return notes


def _check_space(out: Path, model: ViT, recipe: Recipe) -> None:
    """Refuse a disk that cannot hold the run: an old and a new state, and the checkpoints."""
    weights = sum(p.numel() * 4 for p in model.parameters())
    state = weights * (1 + (2 if recipe.optimizer == "adamw" else 1) + (recipe.ema is not None))
    needed = 2 * state + 4 * weights
    place = next(p for p in (out, *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OutputError(
            f"This run needs about {needed / 2**20:,.0f} MiB on the disk of {out}; "
            f"{free / 2**20:,.0f} MiB are free. Free some space, or choose another --out."
        )
