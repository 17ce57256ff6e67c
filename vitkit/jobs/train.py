"""Data, a recipe and a model -> a run folder. Requests that cannot work are refused before anything is written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit.checkpoints.atomic import staging
from vitkit.cuda_capture import capture
from vitkit.data import on_device
from vitkit.data.base import Source
from vitkit.data.order import RANDOM_NUMBERS
from vitkit.errors import ConfigError, UnreadableFile, pick
from vitkit.jobs.head_start import head_from_probe
from vitkit.jobs.splits import absolute, some, train_and_val, unlabelled
from vitkit.jobs.train_checks import CUSTOM, check_data, check_model, check_space, notes, other_randomness
from vitkit.model.backbone import Backbone, Config
from vitkit.model.config import InputSpec, ViTConfig, check_fields, config_from_dict
from vitkit.model.create import build, need_vit
from vitkit.model.resnet_config import ResNetConfig, resnet_name
from vitkit.model.vit import ViT
from vitkit.process_group import launch
from vitkit.runtime import Runtime
from vitkit.speed import choices
from vitkit.speed.training import TrainingForward, refuse_fp8
from vitkit.training import config_file
from vitkit.training.build import new_head, new_model, pretrained
from vitkit.training.lock import locked
from vitkit.training.loop import Loop, Outcome, Watch
from vitkit.training.lora import low_rank, merge
from vitkit.training.objectives import OBJECTIVES, Objective, for_data
from vitkit.training.optim import freeze
from vitkit.training.recipe import Recipe
from vitkit.training.recipes import RECIPES
from vitkit.training.run_folder import RunFolder, whole_config
from vitkit.training.settings import AUTO, BatchSplit, Settings
from vitkit.training.shard import check as check_shard
from vitkit.training.shard import runtime_for

# Fields of a recipe that do not affect the result, so a resumed run may differ in them.
DESCRIPTIVE = ("source", "ours", "expect", "models", "config", "small_data", "lr_choices", "lr_rule", "val")


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start.

    Args:
        model: the model with its initial weights.
        train: the training part.
        val: the validation part, if any.
        recipe: the recipe with the user's changes.
        objective: what is learnt.
        settings: the machine, logging and saving.
        runtime: device, precision and processes.
        info: the contents of run.json.
        notes: sentences that the user should read.
        out: the run folder.
        resume: whether to resume the run at `out`.
    """

    model: Backbone
    train: Source
    val: Source | None
    recipe: Recipe
    objective: Objective
    settings: Settings
    runtime: Runtime
    info: dict[str, Any]
    notes: tuple[str, ...]
    out: Path
    resume: bool

    @property
    def split(self) -> BatchSplit:
        """How the images of a step are divided between processes and micro-batches."""
        return BatchSplit.of(self.recipe, self.settings, self.runtime)


def prepare(
    data: str | Path | None,
    out: str | Path,
    *,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    model: str | Config | Backbone | Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    weights: str | Path | None = None,
    loading: Mapping[str, Any] | None = None,
    image_size: int | tuple[int, int] | None = None,
    resume: bool = False,
    accumulate: int | None = None,
    verify_data: bool = False,
    changes: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Prepared:
    """Check a request and build everything that the run needs, without writing anything.

    A resumed run remembers `data`, `recipe`, `model`, `weights`, `loading` and `settings`.

    Args:
        data: anything that `vitkit.data.open_splits` accepts.
        out: the run folder.
        recipe: a key of RECIPES, or a Recipe or a dict of its fields (default: `finetune` with weights, `small-data`
            without).
        model: a variant, a configuration or a dict of its fields, or a model to train in place (default: the recipe's
            own model).
        fields: fields of the configuration to change in a new model.
        weights: anything that `vitkit.load` accepts.
        loading: other arguments of `vitkit.load`, such as `num_attention_heads` or `mean`.
        image_size: in pixels (default: the recipe's, or else the model's own).
        resume: whether to resume the run at `out`, if there is one. A process that torchrun restarted does so anyway.
        accumulate: micro-batches per step and process; an alternative to `micro_batch` in settings.
        verify_data: record every byte of the images, or compare with what was recorded (default: parts of each image).
        changes: fields of Recipe to change; values of None are ignored.
        settings: fields of Settings to set; values of None are ignored.

    Raises:
        VitkitError: the request cannot work.
    """
    out = Path(out).expanduser()
    if restarted := not resume and _own_run(out):
        resume = True
    stored = _stored_info(out, resume)
    data = data if data is not None else RunFolder(out, stored).data
    if not str(data):
        if resume and not stored:
            raise ConfigError(f"There is no run at {out}. `vitkit runs` lists your runs; a new run needs its data.")
        raise ConfigError("Give the data to train on: a folder of images, or a name such as digits.")
    recipe = Recipe.from_dict(recipe) if isinstance(recipe, Mapping) else recipe
    model = config_from_dict(model) if isinstance(model, Mapping) else model
    own, model = (model, CUSTOM) if isinstance(model, Backbone | Config) else (None, model or stored.get("model"))
    kind: type[Config] = ResNetConfig if resnet_name(str(model)) or isinstance(own, ResNetConfig) else ViTConfig
    fields = check_fields(fields or stored.get("fields") or {}, "A model", kind)
    weights = str(weights) if weights else stored.get("weights")
    loading = loading or stored.get("loading") or {}
    if loading and weights is None:
        raise ConfigError(
            f"Expected --from with {', '.join(loading)}, which only applies to weights; got none. Give weights."
        )
    name, how = _choose_recipe(recipe, weights, stored)
    changes, settings = dict(changes or {}), dict(settings or {})
    if changes.get("batch_size") == AUTO:  # the recipe's batch, computed as many images at a time as memory allows
        if settings.get("micro_batch") is not None or accumulate is not None:
            raise ConfigError("--batch-size auto chooses the micro-batch; leave --micro-batch and --accumulate out.")
        settings["micro_batch"] = changes.pop("batch_size")
    how = how.change(**changes)
    if how.teacher is not None:
        how = dataclasses.replace(how, teacher=config_file.absolute_weights(how.teacher))
    check_model(model, weights, fields, how)
    chosen, runtime = _choose_settings(settings, accumulate, stored, how)
    kind_of = OBJECTIVES[how.objective]
    train, val, remarks = (train_and_val if kind_of.labels else unlabelled)(data, how.val, chosen.seed)
    train = some(train, how.images, chosen.seed)
    how = for_data(how, train)
    kind_of = OBJECTIVES[how.objective]
    head: dict[str, Any] = {"bias": kind_of.head_bias(how, train)}
    check_data(how, val)
    how.warmup_steps(how.total(len(train)))  # refuses a warm-up that is too long

    restored = bool(stored and RunFolder(out, stored).latest())
    if restored and model == stored["model"] and weights == stored["weights"]:
        config = config_from_dict(stored["same"]["config"])  # the weights come from the state
        built = own if isinstance(own, Backbone) else build(config, InputSpec.from_dict(stored["input_spec"]))
        built.licence = stored.get("licence", "")
    elif weights is not None:
        built = pretrained(weights, how, train.class_names, image_size, several=train.several, **head, **loading)
    elif isinstance(own, Backbone):
        built = own
        if own.config.num_classes != len(train.class_names):
            new_head(own, train.class_names, **head)
    else:
        new = own or (config_from_dict(stored["same"]["config"]) if model == CUSTOM else model)
        built = new_model(new, how, train.class_names, chosen.seed, image_size, fields, **head)
    thresholds = (0.5,) * len(train.class_names) if train.several else ()  # until a validation chooses them
    built.input_spec = dataclasses.replace(
        built.input_spec, class_names=tuple(train.class_names), thresholds=thresholds
    )
    built.known = None  # training changes the features that it holds for
    objective = kind_of(how, chosen.seed, train)
    objective.check(built)
    if how.from_probe and not restored:
        head_from_probe(built, train, chosen, runtime)
    if how.augment_on == "device":
        on_device.check(how.augment, built.input_spec, train, runtime.device)
    if chosen.precision == "fp8":
        if not objective.fused:
            raise ConfigError(f"--precision fp8 is for classification; use --precision bf16 with {how.objective}.")
        refuse_fp8(need_vit(built, "--precision fp8").config, runtime.device, bool(chosen.checkpointing))
    freeze(built, how.freeze)
    parameters = sum(p.numel() for p in built.parameters())
    lora = low_rank(built, how, chosen.seed, weights, loading, stored.get("lora")) if how.lora else {}

    ready = Prepared(built, train, val, how, objective, chosen, runtime, {}, (), out, resume)
    more: dict[str, Any] = {"fields": dict(fields), "loading": dict(loading), "licence": built.licence, "lora": lora}
    more |= {"image_size": image_size, "own_weights": isinstance(own, Backbone)}
    more["parameters"] = parameters  # without adapters, which checkpoints do not have
    info = _describe(ready, name, model, weights, data) | {key: value for key, value in more.items() if value}
    if verify_data and stored and "verified data" not in stored["same"]:
        remarks.append("The run was started without --verify-data, so only parts of each image can be compared.")
    elif verify_data:
        info["same"]["verified data"] = [part.fingerprint(whole=True) for part in (train, val) if part is not None]
    if stored:
        RunFolder(out, stored).check(info)
    remarks += check_shard(chosen, how, built, runtime.ranks, own is built)
    check_space(out, built, how)
    if resume and not stored:
        remarks.append(f"There is no run at {out} to resume; a new one starts.")
    if restarted:
        remarks.append(f"{out} was started by this torchrun job, so the run is resumed.")
    remarks += notes(name, how, model, weights, len(train), data) + other_randomness(ready, stored)
    return dataclasses.replace(ready, info=info, notes=tuple(remarks))


def train(
    data: str | Path | None, out: str | Path, *, watch: Watch | None = None, **how: Any
) -> tuple[RunFolder, Outcome]:
    """Train a model; return its run folder and how the run ended.

    Args:
        data: anything that `vitkit.data.open_splits` accepts.
        out: the run folder.
        watch: called with every event.
        how: the other arguments of `prepare`.
    """
    return start(prepare(data, out, **how), watch)


def start(ready: Prepared, watch: Watch | None = None) -> tuple[RunFolder, Outcome]:
    """Start, or resume, a prepared run.

    Args:
        ready: the result of `prepare`.
        watch: called with every event, in the main process.
    """
    runtime = ready.runtime
    if jobs := sorted(set(runtime.gather(launch())) - {""}):
        ready.info["launch"] = jobs
    runtime.wait()  # until every process has checked that `out` is free: the next line creates it
    with ExitStack() as until_the_end:
        lock = runtime.on_main(lambda: until_the_end.enter_context(locked(ready.out)))
        if lock and watch is not None:
            watch({"event": "note", "text": lock})
        run = runtime.on_main(lambda: _create(ready))
        return run, train_into(ready, run, watch)


def _create(ready: Prepared) -> RunFolder:
    """Create or open the run folder; a new one gets the file that repeats the run."""
    run = RunFolder.create(ready.out, ready.info, resume=ready.resume)
    if not (run.path / config_file.FILE).exists():
        with run.writing(), staging(run.path) as private:
            text = config_file.as_toml(run.info)
            (private / config_file.FILE).write_bytes(text.encode("utf-8", "backslashreplace"))
    return run


def train_into(ready: Prepared, run: RunFolder, watch: Watch | None = None) -> Outcome:
    """Train, or resume, in a run folder that exists.

    Args:
        ready: the result of `prepare`.
        run: the run folder.
        watch: called with every event, in the main process.
    """
    runtime = ready.runtime
    # CUDA graphs cannot accumulate gradients. Several processes average them after the graph of the backward pass.
    graph = ready.split.count == 1 and ready.settings.micro_batch != AUTO
    wrap = partial(wrapped, graph=graph, fp8=ready.settings.precision == "fp8")
    loop = Loop(
        ready.model,
        ready.train,
        ready.val,
        ready.recipe,
        ready.objective,
        ready.settings,
        run,
        runtime,
        watch,
        **({} if runtime.sharded else {"wrap_forward": wrap}),
        capture=capture if graph and runtime.ranks == 1 and runtime.device.type == "cuda" else None,
    )
    threads = torch.get_num_threads()
    if runtime.device.type == "cuda":
        torch.set_num_threads(1)  # leave the cores to the decoding workers
    try:
        # Several processes would have to agree on their choices; they run torch's products.
        with choices.pinned(run.path / choices.NAME) if runtime.ranks == 1 else nullcontext():
            at = loop.resume()
            outcome = loop()
    finally:
        torch.set_num_threads(threads)
    merge(ready.model)
    if outcome.step == at and runtime.main and watch is not None:
        done = f"it stopped early: {outcome.why}" if outcome.why else f"all {loop.total:,} steps are done"
        watch({"event": "note", "text": f"{run.path} is already finished: {done}."})
    return outcome


def wrapped(model: Backbone, graph: bool, fp8: bool) -> nn.Module:
    """Return the fused training forward of a ViT; a ResNet is its own."""
    return TrainingForward(model, graph=graph, fp8=fp8) if isinstance(model, ViT) else model


def _stored_info(out: Path, resume: bool) -> dict[str, Any]:
    """Return the run.json of the run to resume; empty for a new run, whose folder must be free."""
    if not (resume and RunFolder.exists(out)):
        RunFolder.check_place(out)
        return {}
    run = RunFolder.open(out, resume=True)
    stored = run.info
    if stored.get("kind") != "train":
        raise ConfigError(f"--resume expects a training run; {out} holds a {stored.get('kind')}. Choose another --out.")
    needed = ("same", "recipe", "recipe_name", "settings", "model", "weights", "input_spec", "processes", "device")
    if missing := [name for name in needed if name not in stored]:
        raise UnreadableFile(
            f"{out / 'run.json'} is damaged: it lacks {missing[0]!r}, and no state has a copy. Start another run with "
            f"a new --out."
        )
    with run.reading():  # whatever is damaged shows here
        Recipe.from_dict(stored["recipe"]).to_dict()
        Settings(**stored["settings"])
        whole_config(stored)
        dict(stored.get("fields") or {})
        for name in ("recipe_name", "model", "weights"):
            if not isinstance(stored[name], str | None):
                raise TypeError(f"{name} is {stored[name]!r}")
        random_numbers = stored["same"].get("random numbers")
    if random_numbers != RANDOM_NUMBERS:
        raise ConfigError(
            f"{out} was started by a version of vitkit that draws other random numbers, so it cannot be resumed "
            f"to the same result; start a new run with another --out."
        )
    return stored


def _own_run(out: Path) -> bool:
    """Return whether the torchrun job of this process started the run at `out`: the process was then restarted."""
    return bool(launch() and RunFolder.exists(out) and launch() in RunFolder.open(out).info.get("launch", ()))


def _choose_recipe(recipe: str | Recipe | None, weights: str | None, stored: Mapping[str, Any]) -> tuple[str, Recipe]:
    if isinstance(recipe, Recipe):
        return "custom", recipe
    if stored and recipe in (None, stored["recipe_name"]):
        return stored["recipe_name"], Recipe.from_dict(stored["recipe"])
    name = recipe or ("finetune" if weights else "small-data")
    return name, pick(RECIPES, name, "recipe")


def _choose_settings(
    given: Mapping[str, Any], accumulate: int | None, stored: Mapping[str, Any], recipe: Recipe
) -> tuple[Settings, Runtime]:
    """Return the settings and the runtime of a run whose batch can be divided as asked."""
    given = {name: value for name, value in given.items() if value is not None}
    if "shard" in given:
        given = {"checkpointing": None, **given}  # the default follows
    settings = Settings(**{**stored.get("settings", {}), **given})
    runtime = runtime_for(settings)
    if accumulate is not None:
        whole = BatchSplit.of(recipe, dataclasses.replace(settings, micro_batch=None), runtime)
        parts = min(max(accumulate, 1), whole.process)
        split = whole.at_most(math.ceil(whole.process / parts))
        if split.count != accumulate:
            raise ConfigError(
                f"The {whole.process} images of each process cannot be divided evenly into --accumulate {accumulate} "
                f"parts. Use --accumulate {split.count}."
            )
        settings = dataclasses.replace(settings, micro_batch=split.micro)
    BatchSplit.of(recipe, settings, runtime)
    if recipe.mix and recipe.batch_size < 2:
        raise ConfigError("MixUp and CutMix need a batch of at least 2 images; got 1. Use a larger --batch-size.")
    return settings, runtime


def _describe(ready: Prepared, name: str, model: str | None, weights: str | None, data: str | Path) -> dict[str, Any]:
    """Return the contents of run.json."""
    recipe, settings, built, train, val = ready.recipe, ready.settings, ready.model, ready.train, ready.val
    return {
        "kind": "train",
        "recipe_name": name,
        "recipe": recipe.to_dict(),
        "settings": settings.to_dict(),
        "model": model,
        "weights": weights,
        "input_spec": built.input_spec.to_dict(),
        "processes": ready.runtime.ranks,
        "device": str(ready.runtime.device),
        "torch_threads": torch.get_num_threads(),
        "steps": recipe.total(len(train)),
        "parameters": sum(p.numel() for p in built.parameters()),
        "trained": sum(p.numel() for p in built.parameters() if p.requires_grad),
        "data": {
            "spec": str(data),
            "path": absolute(data),
            "train": len(train),
            "val": len(val) if val else 0,
            "classes": list(train.class_names),
            "counts": train.counts(),
            **({"several": True} if train.several else {}),
        },
        # A resumed run must agree in these. Processes, micro-batches, workers and devices may change.
        "same": {
            "config": built.config.to_dict(),
            "recipe": {key: value for key, value in recipe.to_dict().items() if key not in DESCRIPTIVE},
            "random numbers": RANDOM_NUMBERS,
            "seed": settings.seed,
            "precision": settings.precision,
            "classes": list(train.class_names),
            "data": train.fingerprint(),
            "validation data": val.fingerprint() if val else None,
            "weights": weights,
            **ready.objective.identity(),
        },
    }
