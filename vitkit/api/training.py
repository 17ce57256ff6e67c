"""Learn from data: whole models, and classifiers on frozen features."""

from __future__ import annotations

import dataclasses
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from vitkit.api.models import Model, Weights, model_of
from vitkit.errors import ConfigError
from vitkit.interfaces import as_backbone, copy_weights, unwrapped
from vitkit.model.backbone import Config
from vitkit.model.vit import ViT

if TYPE_CHECKING:
    from vitkit.data.batch import BadImages
    from vitkit.jobs.probe import Probe
    from vitkit.jobs.tune import Tuned
    from vitkit.results import Run
    from vitkit.training.recipe import Recipe

log = logging.getLogger("vitkit")


def train(
    data: Weights | None,
    out: Weights,
    *,
    model: str | Config | nn.Module | Mapping[str, Any] | None = None,
    weights: Weights | None = None,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    resume: bool = False,
    report: bool = True,
    progress: bool = True,
    watch: Callable[[dict[str, Any]], None] | None = None,
    **how: Any,
) -> Run:
    """Train a model, and return its run.

    A model of any interface is trained in place: afterwards the object you hold has the trained weights.

    Ctrl-C, SIGTERM and SIGHUP save the run and then have their usual effect: KeyboardInterrupt, or the end of the
    process.

    Args:
        data: anything that `vitkit.data.open_splits` accepts; None resumes with the run's own.
        out: the run folder.
        model: a variant, a ViTConfig (or a dict of its fields), or a model of any interface (default: the recipe's own
            model).
        weights: pre-trained weights to fine-tune instead: anything that `vitkit.load` accepts.
        recipe: a key of RECIPES, or a Recipe or a dict of its fields (default: `finetune` with weights, `small-data`
            without).
        resume: whether to resume the run at `out`.
        report: whether to write report.html into the run folder, as the command does (default: True).
        progress: whether to print the progress: a bar on a terminal, plain lines elsewhere, and one line per epoch
            (default: True).
        watch: called with every event: a dictionary with `event`, `step` and the metrics.
        how: `image_size`, `accumulate`, `fields` of a new model, `loading` (other arguments of `vitkit.load`), and any
            field of Recipe (epochs, lr, batch_size, ...) or of Settings (seed, workers, device, precision, ...).
            `batch_size="auto"` keeps the recipe's batch and computes as many images at a time as memory allows. The
            config.toml of a run holds the arguments that repeat it.

    Raises:
        VitkitError: something cannot work; nothing has been written.

    Example:
        >>> import vitkit
        >>> model = vitkit.paper.ViT(8, 1, 2, 1, 16, 32, 2, num_classes=10)
        >>> run = vitkit.train("digits", "run", model=model, recipe="digits", steps=3, progress=False)
        >>> sorted(run.results)
        ['test_acc', 'test_loss', 'train_acc', 'train_loss']
    """
    from vitkit.errors import InputError, nearest
    from vitkit.jobs import train as job
    from vitkit.jobs.report import try_report
    from vitkit.jobs.watch import Watch
    from vitkit.jobs.watch import summary as describe_run
    from vitkit.results import Run
    from vitkit.training.recipe import Recipe
    from vitkit.training.settings import Settings

    known = {kind: {f.name for f in dataclasses.fields(kind)} for kind in (Recipe, Settings)}
    apart = ("image_size", "accumulate", "verify_data", "fields", "loading")
    others = {name: how.pop(name) for name in apart if name in how}
    names = sorted(known[Recipe] | known[Settings])
    if odd := next((name for name in how if name not in names), None):
        raise ConfigError(f"train() has no argument {odd!r}{nearest(odd, names) or '.'} It takes {', '.join(names)}.")
    vit = as_backbone(model) if isinstance(model, nn.Module) else None
    outputs = None if vit is None or vit is unwrapped(model) else vit.config.num_classes
    ready = job.prepare(
        data,
        out,
        recipe=recipe,
        model=vit if vit is not None else model,  # type: ignore[arg-type]
        weights=weights,
        resume=resume,
        changes={name: value for name, value in how.items() if name in known[Recipe]},
        settings={name: value for name, value in how.items() if name not in known[Recipe]},
        **others,
    )
    if outputs is not None and outputs != ready.model.config.num_classes:
        raise InputError(
            f"Expected a model with one output per class; it has {outputs} outputs, and {data} has "
            f"{ready.model.config.num_classes} classes. Build it with num_classes={ready.model.config.num_classes}."
        )
    for note in ready.notes if ready.runtime.main else ():
        log.warning("%s", note)
    shown = Watch() if progress and ready.runtime.main else None

    def hear(event: dict[str, Any]) -> None:
        for listener in (shown, watch):
            if listener is not None:
                listener(event)

    with shown or nullcontext():
        if shown is not None:
            shown.say(describe_run(ready.info))
        folder, outcome = job.start(ready, hear)
    trained = ready.model.cpu()
    if isinstance(model, nn.Module) and isinstance(trained, ViT):
        copy_weights(trained, model)
    if outcome.interrupted:  # whoever asked this process to stop did not mean this call alone
        if outcome.stopped and ready.runtime.main:
            log.warning(
                "Stopped at step %s of %s; everything is saved in %s. Resume with resume=True.",
                *(outcome.step, outcome.total, folder.path),
            )
        signal.raise_signal(outcome.signal)
    if report and ready.runtime.main:
        try_report(folder.path)
    return Run(folder.path)


def pretrain(
    data: Weights | None,
    out: Weights,
    *,
    objective: str = "masked-patch",
    recipe: str | Recipe | None = None,
    resume: bool = False,
    report: bool = True,
    **how: Any,
) -> Run:
    """Train a model without labels, and return its run: weights to fine-tune (`weights=` of `train`) or to probe.

    Args:
        data: a folder of images at any depth, or anything that `vitkit.data.open_splits` accepts; labels are ignored.
        out: the run folder.
        objective: a row of OBJECTIVES that needs no labels (default: masked-patch, the paper's B.1.2).
        recipe: a key of RECIPES, or a Recipe, with this objective (default: masked-patch-small).
        resume: whether to resume the run at `out`.
        report: whether to write report.html and masked.png into the run folder, as the command does (default: True).
        how: the other arguments of `train`, such as `model`, `target`, `epochs` or `device`.

    Raises:
        VitkitError: something cannot work; nothing has been written.

    Example:
        >>> import vitkit
        >>> config = vitkit.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        ...                           image_size=8, patch_size=2, num_channels=1)
        >>> run = vitkit.pretrain("digits", "run", model=config, steps=3, warmup=0, workers=0, report=False,
        ...                       progress=False)
        >>> run.model().config.num_classes
        0
    """
    from vitkit.jobs.pretrain import choose_recipe, write_picture

    chosen = choose_recipe(objective, recipe, out if resume else None)
    run = train(data, out, recipe=chosen, resume=resume, report=report, **how)
    if report:
        write_picture(run.folder)
    return run


def probe(
    model: Model,
    data: Weights,
    out: Weights,
    *,
    methods: Sequence[str] = ("logistic",),
    features: str | None = None,
    accept: float | None = None,
    cache: Weights | None = None,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    batch_size: int | None = None,
    workers: int | None = None,
    bad_images: BadImages = "fail",
) -> Probe:
    """Fit a classifier to the frozen features of a model, and write a run folder with it.

    Args:
        model: a model of any interface, or anything that `vitkit.load` accepts.
        data: anything that `vitkit.data.open_splits` accepts.
        out: the run folder; it must not hold a run yet.
        methods: rows of `vitkit.features.METHODS`; the first one's head is saved (default: logistic).
        features: which vector, see `vitkit.features.choose` (default: what the model's own head reads).
        accept: share of images of the known classes to accept, such as 0.95; `predict` answers "none of these" for
            images farther away (default: every image gets a class).
        cache: folder of the feature cache (default: $VITKIT_CACHE, or the user's cache folder).
        seed: random seed (default: 0).
        device: auto, cpu, cuda, cuda:1 or mps (default: auto).
        precision: fp32, bf16 or fp16 (default: bf16 on CUDA, fp32 elsewhere).
        batch_size: images per batch (default: 256 on CUDA for images of up to 256 pixels, 64 otherwise).
        workers: worker processes for decoding (default: one per core).
        bad_images: `fail` raises BadImage; `skip` leaves the image out and lists it.

    Returns:
        The run, the model with its new head, and the evaluation on the held-out images.

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=0, num_hidden_layers=1)
        >>> found = vitkit.probe(model, "digits", "run", methods=["ridge"], cache="cache", workers=0)
        >>> found.model.config.num_classes
        10
    """
    from vitkit.features.probe import Options
    from vitkit.jobs import embed as job_of_embed
    from vitkit.jobs import probe as job
    from vitkit.runtime import Runtime

    runtime = Runtime(device, precision)
    return job.probe(
        model_of(model, str(runtime.device)),
        data,
        out,
        job_of_embed.open_cache(cache),
        methods=tuple(methods),
        options=Options(seed=seed),
        features=features,
        weights=str(model) if isinstance(model, str | Path) else "",
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
        bad_images=bad_images,
        accept=accept,
    )


def tune(
    model: Model,
    data: Weights,
    out: Weights,
    *,
    minutes: float = 10.0,
    folds: int = 3,
    cache: Weights | None = None,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    batch_size: int | None = None,
    workers: int | None = None,
    bad_images: BadImages = "fail",
    report: bool = True,
    progress: bool = True,
) -> Tuned:
    """Choose the best classifier for some photos within a time limit: a probe, fine-tuning from it, or adapters.

    A candidate replaces the probe only if its cross-validated gain on the training images exceeds one standard error,
    or more if several are compared. The test images are read once, at the end.

    Args:
        model: the backbone: a model of any interface, or anything that `vitkit.load` accepts.
        data: anything that `vitkit.data.open_splits` accepts.
        out: the run folder.
        minutes: time limit; the probe is fitted even if it takes longer (default: 10).
        folds: folds of the cross-validation (default: 3).
        cache: folder of the feature cache (default: $VITKIT_CACHE, or the user's cache folder).
        seed: random seed (default: 0).
        device: auto, cpu, cuda or mps (default: auto).
        precision: fp32, bf16 or fp16 (default: bf16 on CUDA, fp32 elsewhere).
        batch_size: images per batch where nothing is trained (default: 256 on CUDA for images of up to 256 pixels,
            64 otherwise).
        workers: worker processes for decoding (default: one per core).
        bad_images: `fail` raises BadImage; `skip` leaves the image out and lists it.
        report: whether to write report.html into the run folder, as the command does (default: True).
        progress: whether to print a line at every stage (default: True).

    Returns:
        `run`, `found` with everything that was `tried`, `evaluation`, and `plot()`.

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=16, patch_size=8, num_classes=0, num_hidden_layers=1)
        >>> tuned = vitkit.tune(model, "digits", "tuned", minutes=0.001, cache="cache", workers=0, report=False,
        ...                     progress=False)
        >>> tuned.found.name, [row.name for row in tuned.found.tried][0]
        ('probe', 'probe')
    """
    from vitkit.jobs import tune as job
    from vitkit.jobs.embed import open_cache
    from vitkit.jobs.report import try_report
    from vitkit.runtime import Runtime

    runtime = Runtime(device, precision)
    found = job.tune(
        model_of(model, str(runtime.device)),
        data,
        out,
        open_cache(cache),
        minutes=minutes,
        seed=seed,
        folds=folds,
        weights=str(model) if isinstance(model, str | Path) else type(model).__name__,
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
        say=print if progress else lambda sentence: None,
        bad_images=bad_images,
    )
    if report:
        try_report(found.run.path)
    return found
