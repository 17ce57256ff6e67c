"""The public functions: everything the command line does, in Python, for any of the three interfaces.

Each takes a model (a ViT, a paper.ViT, one of the twelve classes) or the name of weights, and returns an object that
shows itself in a notebook. What does not belong here: any work of its own; these functions call jobs and rooms.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import nn

from vitkit.checkpoints import load
from vitkit.checkpoints import save as save_checkpoint
from vitkit.errors import ConfigError
from vitkit.evaluation.predict import predict as predict_images
from vitkit.interfaces import as_backbone, copy_weights, unwrapped
from vitkit.model.backbone import Backbone, Config
from vitkit.model.classifier import Classifier
from vitkit.model.create import configuration, need_vit
from vitkit.model.vit import ViT

if TYPE_CHECKING:
    from vitkit.data.doctor import Report
    from vitkit.data.loader import BadImages
    from vitkit.evaluation.predict import Given, Predictions
    from vitkit.explanations.describe import Summary
    from vitkit.features.embed import Embedded
    from vitkit.jobs.evaluate import Evaluation
    from vitkit.jobs.explain import Explained
    from vitkit.jobs.export import ExportedFile
    from vitkit.jobs.figures import Drawing
    from vitkit.jobs.patches import Patches
    from vitkit.jobs.probe import Probe
    from vitkit.jobs.search import Hit
    from vitkit.jobs.share import Pushed
    from vitkit.jobs.suggest import Suggestions
    from vitkit.jobs.tune import Tuned
    from vitkit.jobs.walk import Walk
    from vitkit.results import Run
    from vitkit.server.server import Running
    from vitkit.training.recipe import Recipe

log = logging.getLogger("vitkit")

Weights = str | Path
Model = nn.Module | Weights  # a model of any interface, or anything that `vitkit.load` accepts


def model_of(model: Model, device: str | None = None) -> Backbone:
    """Return a model of any interface, or the name of weights, as a ViT or a ResNet.

    Args:
        model: a ViT, a paper.ViT, one of the twelve classes, or anything that `vitkit.load` accepts.
        device: where to put it (default: where it is).
    """
    found = load(model) if isinstance(model, str | Path) else as_backbone(model)
    return found if device is None else found.to(device)


def save(model: nn.Module, path: Weights, dialect: str = "native", *, extra: Mapping[str, str] | None = None) -> Path:
    """Write a model of any interface, completely or not at all.

    Args:
        model: a ViT, a paper.ViT, or one of the twelve classes.
        path: a file with one of the dialect's suffixes, or (huggingface, and those ending in -hf) a folder.
        dialect: a row of `vitkit.checkpoints.DIALECTS` (default: native).
        extra: free-form strings to keep in a native file.

    Returns:
        The path of the weights.

    Example:
        >>> import vitkit
        >>> vitkit.save(vitkit.paper.ViT(num_transformer_layers=1, num_classes=3), "mine.safetensors").name
        'mine.safetensors'
    """
    return save_checkpoint(as_backbone(model), Path(path).expanduser(), dialect, extra=extra)


def predict(
    model: Model | Classifier,
    images: Given | Iterable[Given],
    *,
    top: int = 5,
    batch_size: int = 64,
    workers: int | None = 0,
    bad_images: BadImages = "fail",
) -> Predictions:
    """Classify images.

    Args:
        model: a model of any interface, an exported model, or anything that `vitkit.load` accepts.
        images: a file, a folder, a pattern such as `photos/*.jpg`, encoded bytes, a Pillow image, a uint8 array
            [H, W] or [H, W, C], or several of these.
        top: number of classes per image (default: 5).
        batch_size: images per batch (default: 64).
        workers: worker processes for decoding; None for one per core (default: 0).
        bad_images: `fail` raises BadImage; `skip` leaves the image out and lists it in the result's `skipped`.

    Returns:
        One Prediction per image, in order; each has `name`, `probability`, `guesses` and `plot()`.

    Example:
        >>> import numpy as np, vitkit
        >>> model = vitkit.create("vit-ti/16", num_classes=3, num_hidden_layers=1)
        >>> len(vitkit.predict(model, np.zeros((64, 64, 3), np.uint8), top=2)[0].guesses)
        2
    """
    if isinstance(model, nn.Module | str | Path):
        model = model_of(model)
    return predict_images(model, images, top=top, batch_size=batch_size, workers=workers, bad_images=bad_images)


def evaluate(
    model: Model,
    data: Weights,
    *,
    split: str | None = None,
    in_order: bool = False,
    device: str = "auto",
    precision: str = "auto",
    batch_size: int | None = None,
    workers: int | None = None,
    bad_images: BadImages = "fail",
) -> Evaluation:
    """Evaluate a model on a data set.

    Args:
        model: a model of any interface, or anything that `vitkit.load` accepts.
        data: a folder with one folder per class, or anything else that `vitkit.data.open_splits` accepts.
        split: the part to evaluate (default: what was held out of the run, else `test` or `val`).
        in_order: whether the data's classes are in the order of the model's outputs, whatever their names.
        device: auto, cpu, cuda, cuda:1 or mps (default: auto).
        precision: fp32, bf16 or fp16 (default: bf16 on CUDA, fp32 elsewhere).
        batch_size: images per batch (default: 256 on CUDA for images of up to 256 pixels, 64 otherwise).
        workers: worker processes for decoding (default: one per core).
        bad_images: `fail` raises BadImage; `skip` leaves the image out and lists it.

    Returns:
        The measures, with `plot()` for the confusion matrix.

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=10, num_hidden_layers=1)
        >>> vitkit.evaluate(model, "digits", in_order=True, workers=0).measures.n
        1797
    """
    from vitkit.jobs import evaluate as job
    from vitkit.runtime import Runtime

    runtime = Runtime(device, precision)
    run = job.run_of(model) if isinstance(model, str | Path) else None
    source, part = job.part_of(data, split, run)
    return job.evaluate(
        model_of(model, str(runtime.device)),
        source,
        weights=str(model) if isinstance(model, str | Path) else type(model).__name__,
        data=str(data),
        part=part,
        same_order=in_order,
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
        bad_images=bad_images,
    )


def embed(
    model: Model,
    data: Weights,
    *,
    split: str | None = None,
    features: str | None = None,
    cache: Weights | None = None,
    device: str = "auto",
    precision: str = "auto",
    batch_size: int | None = None,
    workers: int | None = None,
    bad_images: BadImages = "fail",
) -> dict[str, Embedded]:
    """Compute the features of a data set, each image once; later calls read them from the cache.

    Args:
        model: a model of any interface, or anything that `vitkit.load` accepts.
        data: anything that `vitkit.data.open_splits` accepts.
        split: one part of the data (default: all parts).
        features: which vector, see `vitkit.features.choose` (default: what the model's own head reads).
        cache: folder of the feature cache (default: $VITKIT_CACHE, or the user's cache folder).
        device: auto, cpu, cuda, cuda:1 or mps (default: auto).
        precision: fp32, bf16 or fp16 (default: bf16 on CUDA, fp32 elsewhere).
        batch_size: images per batch (default: 256 on CUDA for images of up to 256 pixels, 64 otherwise).
        workers: worker processes for decoding (default: one per core).
        bad_images: `fail` raises BadImage; `skip` leaves the image out and lists it.

    Returns:
        {part: Embedded} with `features` [N, F], `labels` [N], `names` and `class_names`.

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=0, num_hidden_layers=1)
        >>> vitkit.embed(model, "digits", cache="cache", workers=0)["all"].features.shape
        (1797, 192)
    """
    from vitkit.jobs import embed as job
    from vitkit.runtime import Runtime

    runtime = Runtime(device, precision)
    found = job.embed(
        model_of(model, str(runtime.device)),
        job.parts_of(data, split),
        job.open_cache(cache),
        features=features,
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
        bad_images=bad_images,
    )
    return {name: part.read() for name, part in found.parts.items()}


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


def doctor(
    data: Weights,
    *,
    weights: Model | None = None,
    fix: Weights | None = None,
    page: Weights | None = None,
    cache: Weights | None = None,
    device: str = "auto",
    precision: str = "auto",
    batch_size: int | None = None,
    workers: int | None = None,
) -> Report:
    """Check a data set: unreadable images, files that are not read, classes, duplicates, sizes, and doubtful labels.

    Args:
        data: anything that `vitkit.data.open_splits` accepts.
        weights: a model of any interface, or anything that `vitkit.load` accepts; its features find near-duplicates and
            suspected wrong labels (default: near-duplicates by a perceptual hash, no labels).
        fix: a new folder for a cleaned copy, or a new .csv file for a list of the good images; the data itself is never
            changed (default: neither).
        page: an HTML file with the pictures (default: none).
        cache: folder of the feature cache (default: $VITKIT_CACHE, or the user's cache folder).
        device: auto, cpu, cuda, cuda:1 or mps (default: auto).
        precision: fp32, bf16 or fp16 (default: bf16 on CUDA, fp32 elsewhere).
        batch_size: images per batch (default: 256 on CUDA for images of up to 256 pixels, 64 otherwise).
        workers: worker processes for decoding (default: one per core).

    Returns:
        The report: `problems`, `unread`, `bad`, `notes`, `duplicates`, `near`, `suspects`, `healthy` and more.

    Example:
        >>> import vitkit
        >>> vitkit.doctor("digits", workers=0).healthy
        True
    """
    from vitkit.data.clean import check_place, clean
    from vitkit.jobs import doctor as job
    from vitkit.jobs.embed import open_cache
    from vitkit.runtime import Runtime

    if fix is not None:
        check_place(data, fix)
    runtime = Runtime(device, precision) if weights is not None else None
    report = job.doctor(
        data,
        model=model_of(weights, str(runtime.device)) if weights is not None and runtime is not None else None,
        cache=open_cache(cache) if weights is not None else None,
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
    )
    if page is not None:
        job.write_page(report, page)
    if fix is not None:
        clean(report, fix)
    return report


def search(
    model: Model,
    data: Weights,
    images: Given | Iterable[Given],
    *,
    count: int = 10,
    split: str | None = None,
    features: str | None = None,
    cache: Weights | None = None,
    device: str = "auto",
    precision: str = "auto",
    batch_size: int | None = None,
    workers: int | None = None,
) -> list[list[Hit]]:
    """Find the images of a data set that are most similar to a query, by their features.

    Args:
        model: a model of any interface, or anything that `vitkit.load` accepts.
        data: anything that `vitkit.data.open_splits` accepts, or a folder of photos without classes.
        images: the queries: anything that `predict` accepts.
        count: number of images per query (default: 10).
        split: one part of the data (default: all parts).
        features: which vector, see `vitkit.features.choose` (default: what the model's own head reads).
        cache: folder of the feature cache (default: $VITKIT_CACHE, or the user's cache folder).
        device: auto, cpu, cuda, cuda:1 or mps (default: auto).
        precision: fp32, bf16 or fp16 (default: bf16 on CUDA, fp32 elsewhere).
        batch_size: images per batch (default: 256 on CUDA for images of up to 256 pixels, 64 otherwise).
        workers: worker processes for decoding (default: one per core).

    Returns:
        For each query its hits, the most similar first; each has `filepath`, `label` and `similarity`.

    Example:
        >>> import vitkit
        >>> from vitkit.data import open_source
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=0, num_hidden_layers=1)
        >>> digit = open_source("digits", "all").raw(7)[:, :, 0]
        >>> vitkit.search(model, "digits", digit, count=1, cache="cache", workers=0)[0][0].filepath
        'digit 7'
    """
    from vitkit.jobs import search as job
    from vitkit.jobs.embed import open_cache
    from vitkit.runtime import Runtime

    runtime = Runtime(device, precision)
    return job.search(
        model_of(model, str(runtime.device)),
        job.sources_of(data, split),
        images,
        open_cache(cache),
        count=count,
        features=features,
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
    )


def near_duplicates(
    model: Model,
    data: Weights,
    *,
    similarity: float | None = None,
    split: str | None = None,
    features: str | None = None,
    cache: Weights | None = None,
    device: str = "auto",
    precision: str = "auto",
    batch_size: int | None = None,
    workers: int | None = None,
) -> list[list[Hit]]:
    """Find the images of a data set that are nearly the same, within and across its parts, by their features.

    Args:
        model: a model of any interface, or anything that `vitkit.load` accepts.
        data: anything that `vitkit.data.open_splits` accepts, or a folder of photos without classes.
        similarity: smallest cosine similarity of a pair (default: high, and unusual in this data).
        split: one part of the data (default: all parts).
        features: which vector, see `vitkit.features.choose` (default: what the model's own head reads).
        cache: folder of the feature cache (default: $VITKIT_CACHE, or the user's cache folder).
        device: auto, cpu, cuda or mps (default: auto).
        precision: fp32, bf16 or fp16 (default: bf16 on CUDA, fp32 elsewhere).
        batch_size: images per batch (default: 256 on CUDA for images of up to 256 pixels, 64 otherwise).
        workers: worker processes for decoding (default: one per core).

    Returns:
        Groups of images that are joined by pairs, the largest first; each image has `filepath`, `split`, `label`, and
        its `similarity` to the first of its group.

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=0, num_hidden_layers=1)
        >>> groups = vitkit.near_duplicates(model, "digits", similarity=1, cache="cache", workers=0)
        >>> all(len(group) > 1 for group in groups)
        True
    """
    from vitkit.jobs import search as job
    from vitkit.jobs.embed import open_cache
    from vitkit.runtime import Runtime

    runtime = Runtime(device, precision)
    return job.near_duplicates(
        model_of(model, str(runtime.device)),
        job.sources_of(data, split),
        open_cache(cache),
        similarity=similarity,
        features=features,
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
    )


def suggest(
    model: Model,
    images: Given | Iterable[Given],
    *,
    count: int = 50,
    cache: Weights | None = None,
    device: str = "auto",
    precision: str = "auto",
    batch_size: int | None = None,
    workers: int | None = None,
) -> Suggestions:
    """Suggest which photos to label next: those that the model is unsure about, and that differ from each other.

    Args:
        model: the classifier so far: a model of any interface, or anything that `vitkit.load` accepts.
        images: the unlabelled photos: anything that `predict` accepts.
        count: number of photos to suggest (default: 50).
        cache: folder of the feature cache (default: $VITKIT_CACHE, or the user's cache folder).
        device: auto, cpu, cuda, cuda:1 or mps (default: auto).
        precision: fp32, bf16 or fp16 (default: bf16 on CUDA, fp32 elsewhere).
        batch_size: images per batch (default: 256 on CUDA for images of up to 256 pixels, 64 otherwise).
        workers: worker processes for decoding (default: one per core).

    Returns:
        `photos`, the most useful first, each with `image`, `guess` and `margin`; and `skipped`.

    Example:
        >>> import numpy as np, vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=3, num_hidden_layers=1)
        >>> photos = [np.full((40, 40, 3), 20 * i, np.uint8) for i in range(9)]
        >>> len(vitkit.suggest(model, photos, count=4, cache="cache", workers=0).photos)
        4
    """
    from vitkit.jobs import suggest as job
    from vitkit.jobs.embed import open_cache
    from vitkit.runtime import Runtime

    runtime = Runtime(device, precision)
    return job.suggest(
        model_of(model, str(runtime.device)),
        images,
        open_cache(cache),
        count=count,
        batch_size=batch_size,
        workers=workers,
        runtime=runtime,
    )


def explain(
    model: Model,
    images: Given | Iterable[Given],
    out: Weights | None = None,
    *,
    target: str | None = None,
    patch: str | None = None,
    layer: int | None = None,
    occlusion: bool = False,
    registers: bool = False,
) -> list[Explained]:
    """Show what a model looks at: attention, rollout, gradients, similarity of patches, and optionally occlusion.

    Args:
        model: a model of any interface, or anything that `vitkit.load` accepts.
        images: anything that `predict` accepts.
        out: folder for the files (default: a temporary folder).
        target: name or number of the class to explain (default: the most probable class of each image).
        patch: patch to compare the others with, `ROW,COLUMN` counted from 0 (default: the middle one).
        layer: compare patches in z_layer, 0 to L (default: after the final LayerNorm).
        occlusion: whether to compute the occlusion map, which is slow.
        registers: whether to compute the maps with test-time registers, against bright corners.

    Returns:
        One Explained per image; each has `predictions`, `folder` and `plot()`.

    Example:
        >>> import numpy as np, vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=64, num_classes=3, num_hidden_layers=2)
        >>> vitkit.explain(model, np.zeros((64, 64, 3), np.uint8), "looks")[0].folder.name
        'image 0'
    """
    from vitkit.jobs.explain import explain as job

    folder = Path(out).expanduser() if out is not None else Path(tempfile.mkdtemp(prefix="vitkit-explain-"))
    return list(
        job(
            model_of(model),
            images,
            folder,
            target=target,
            patch=patch,
            layer=layer,
            occlusion=occlusion,
            registers=registers,
        )
    )


def plot(
    model: Model,
    name: str,
    images: Given | Iterable[Given] | None = None,
    *,
    target: str | None = None,
    patch: str | None = None,
    layer: int | None = None,
    count: int = 128,
) -> Drawing:
    """Draw one figure of the paper, or any other plot of `vitkit figures --list`, for a model.

    Args:
        model: a model of any interface, or anything that `vitkit.load` accepts.
        name: filters, positions, distance, rollouts, attention, similarity or another row of
            `vitkit.explanations.plots.PLOTS`.
        images: anything that `predict` accepts, or the name of a data set; a plot of a single image uses the first
            (default: the two sample photos).
        target: name or number of the class to explain (default: the most probable class).
        patch: patch to compare the others with, `ROW,COLUMN` counted from 0 (default: the middle one).
        layer: compare patches in z_layer, 0 to L (default: after the final LayerNorm).
        count: maximum number of images from a data set or a folder (default: 128).

    Returns:
        The plot, which a notebook shows: `arrays`, `caption` and `plot()`.

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=64, num_classes=3, num_hidden_layers=2)
        >>> vitkit.plot(model, "distance").arrays["distance"].shape
        (2, 3)
    """
    from vitkit.evaluation.names import class_names
    from vitkit.explanations.common import PlotOptions
    from vitkit.jobs.explain import patch_of, target_of
    from vitkit.jobs.figures import plot as job

    found = model_of(model)
    names = class_names(found) if found.config.num_classes else ()
    options = PlotOptions(
        target=target_of(target, names),
        patch=patch_of(patch, need_vit(found, "Comparing patches").config.grid) if patch is not None else None,
        layer=layer,
        names=names,
    )
    return job(found, name, images, count=count, options=options)


def report(run: Run | Weights, out: Weights | None = None) -> Path:
    """Write the HTML report of a run, and return its path.

    Args:
        run: a Run, or its folder.
        out: the HTML file (default: `report.html` in the run folder).

    Example:
        >>> import vitkit
        >>> model = vitkit.create(image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=1,
        ...                       num_attention_heads=2, intermediate_size=32, num_classes=10)
        >>> run = vitkit.train("digits", "run", model=model, recipe="digits", steps=2, progress=False, report=False)
        >>> vitkit.report(run).name
        'report.html'
    """
    from vitkit.jobs.report import report as job

    return job(run if isinstance(run, str | Path) else run.path, out=out)


def card(run: Run | Weights, out: Weights | None = None, *, licence: str | None = None) -> Path:
    """Write the model card of a run, and return its path.

    Args:
        run: a Run, or its folder.
        out: the Markdown file (default: `README.md` in the run folder).
        licence: licence of the weights, such as apache-2.0 (default: what the weights state).

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=0, num_hidden_layers=1)
        >>> found = vitkit.probe(model, "digits", "run", methods=["ridge"], cache="cache", workers=0)
        >>> vitkit.card(found.run, licence="apache-2.0").name
        'README.md'
    """
    from vitkit.jobs.share import write_card

    return write_card(run if isinstance(run, str | Path) else run.path, out, licence=licence)


def push(
    run: Run | Weights, name: str, *, private: bool = False, licence: str | None = None, dry_run: bool = False
) -> Pushed:
    """Send a run's model with its card to the Hugging Face hub; logs, training states and photos are not sent.

    Args:
        run: a Run, or its folder.
        name: owner/name on the hub.
        private: whether only you can see a new repository (default: False).
        licence: licence of the weights, such as apache-2.0 (default: what the weights state).
        dry_run: whether to only list what would be sent, without a network (default: False).

    Returns:
        `files` with their sizes, and `url`.

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=0, num_hidden_layers=1)
        >>> found = vitkit.probe(model, "digits", "run", methods=["ridge"], cache="cache", workers=0)
        >>> "README.md" in vitkit.push(found.run, "you/digits", licence="apache-2.0", dry_run=True).files
        True
    """
    from vitkit.jobs.share import push as job

    folder = run if isinstance(run, str | Path) else run.path
    return job(folder, name, private=private, licence=licence, dry_run=dry_run)


def summary(model: Model | Config, *, batch: int = 1, depth: int | None = None) -> Summary:
    """List the modules of a model with their shapes and parameters.

    Args:
        model: a variant's name, a ViTConfig, a model of any interface, or anything that `vitkit.load` accepts.
        batch: images per batch, for the shapes (default: 1).
        depth: show modules only down to this depth (default: all).

    Example:
        >>> import vitkit
        >>> vitkit.summary("vit-b/16").parameters
        86567656
    """
    from vitkit.explanations.describe import Summary, describe

    config = config_of(model)
    return Summary(config, [row for row in describe(config, batch) if depth is None or row.depth <= depth])


def config_of(model: Model | Config) -> Config:
    """Return the configuration of a variant, a file, a run, a hub id, or a model of any interface."""
    if isinstance(model, Config):
        return model
    if isinstance(model, str) and not Path(model).expanduser().exists():
        try:
            return configuration(model)
        except ConfigError:
            if not _names_weights(model):
                raise
    return model_of(model).config


def _names_weights(name: str) -> bool:
    """Whether a name stands for weights (a file, a run, owner/name on the hub) and not for a variant (vit-b/16)."""
    if Path(name).expanduser().exists():
        return True
    known = re.fullmatch(r"[^/]+(/[^/]+)+|.+@\w+|(vit|resnetv2)_\w+\.\w+", name)
    return bool(known) and not re.fullmatch(r"[\w+-]+/\d+", name)


def patches(image: Given | None = None, model: Model = "vit-b/16") -> Patches:
    """Cut an image into patches and embed them: every step of Eq. 1 as an array and as a picture.

    Args:
        image: any image that `predict` accepts (default: a sample photo).
        model: a model of any interface, anything that `vitkit.load` accepts, or a variant, which gets random weights
            (default: vit-b/16).

    Returns:
        The arrays by name, their `shapes`, and `plot()`.

    Example:
        >>> import vitkit
        >>> found = vitkit.patches(model="vit-ti/16")
        >>> found.arrays["maps"].shape, found.arrays["flattened"].shape
        ((192, 14, 14), (1, 196))
    """
    from vitkit.jobs.patches import model_for
    from vitkit.jobs.patches import patches as job

    trained = not isinstance(model, str) or _names_weights(model)
    return job(need_vit(model_of(model), "vitkit.patches") if trained else model_for(str(model)), image)


def walk(model: Model, image: Given | None = None) -> Walk:
    """Take one photo through Eqs. 1-4, and keep the tensor of every step.

    Args:
        model: a model of any interface, anything that `vitkit.load` accepts, or a variant, which gets random weights.
        image: any image that `predict` accepts (default: a sample photo).

    Returns:
        A list of steps, from the pixels to the logits, with `probabilities`, `best()` and `plot()`.

    Example:
        >>> import vitkit
        >>> steps = vitkit.walk(vitkit.create("vit-ti/16", num_classes=3, num_hidden_layers=1))
        >>> steps[1].shape, steps[-1].shape
        ((1, 192, 14, 14), (1, 3))
    """
    from vitkit.jobs.patches import model_for
    from vitkit.jobs.walk import walk as job

    trained = not isinstance(model, str) or _names_weights(model)
    return job(need_vit(model_of(model), "vitkit.walk") if trained else model_for(str(model)), image)


def export(model: Model, to: str, out: Weights, *, data: Weights | None = None, merge: int = 0) -> ExportedFile:
    """Export a model for another runtime, and compare the file with the model.

    Args:
        model: a model of any interface, or anything that `vitkit.load` accepts.
        to: onnx, openvino or openvino-int8.
        out: the file.
        data: images to compare on, and to calibrate int8 with (default: random pixels; int8 needs images).
        merge: tokens to merge in each block (default: none).

    Example:
        >>> import vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=3, num_hidden_layers=1)
        >>> vitkit.export(model, "onnx", "tiny.onnx").path.name
        'tiny.onnx'
    """
    from vitkit.jobs.export import export_file, images_for

    vit = model_of(model)
    weights = model if isinstance(model, str | Path) else ""
    shown = images_for(data, weights, vit, 300 if to == "openvino-int8" else 0, 200)
    return export_file(vit, to, out, shown, merge=merge, source=str(weights))


@overload
def teach(model: Model, out: str | Path, *, host: str = ..., port: int = ..., wait: Literal[True] = ...) -> None: ...


@overload
def teach(model: Model, out: str | Path, *, host: str = ..., port: int = ..., wait: Literal[False]) -> Running: ...


def teach(
    model: Model, out: str | Path, *, host: str = "127.0.0.1", port: int = 8000, wait: bool = True
) -> Running | None:
    """Open a web page on which photos become a classifier, which is saved as a run.

    Args:
        model: the backbone: a model of any interface, or anything that `vitkit.load` accepts.
        out: run folder: a new one, or one that was taught before with the same model.
        host: address to listen on (default: this machine only).
        port: port; 0 for any free one (default: 8000).
        wait: whether to serve until Ctrl-C; otherwise return the running server, with its `url` and `stop()`
            (default: True).

    Example:
        >>> import tempfile, vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=0, num_hidden_layers=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with vitkit.teach(model, f"{folder}/desk", port=0, wait=False) as server:
        ...         server.url.startswith("http://127.0.0.1:")
        True
    """
    from functools import partial

    from vitkit.features.online import use_one_thread
    from vitkit.jobs.teach import save
    from vitkit.server.app import create_app
    from vitkit.server.server import Running, is_local, listen, run
    from vitkit.server.service import Service
    from vitkit.server.settings import LOCAL, Settings
    from vitkit.server.teach import Lessons

    source = str(model) if isinstance(model, str | Path) else type(model).__name__
    with listen(host, port) as bound:
        backbone = model_of(model).eval()
        service = Service(backbone, Settings(hosts=LOCAL if is_local(host) else None), source=source)
        service.warm()
        use_one_thread()
        app = create_app(service, Lessons(service, out, partial(save, backbone, source)))
        if not wait:
            return Running(app, bound.dup())
        print(f"vitkit: teach at http://{host}:{bound.getsockname()[1]}/#teach; Ctrl-C stops it.", flush=True)
        run(app, bound)
    return None


@overload
def serve(
    model: Model, *, host: str = ..., port: int = ..., engine: str | None = ..., wait: Literal[True] = ...
) -> None: ...


@overload
def serve(
    model: Model, *, host: str = ..., port: int = ..., engine: str | None = ..., wait: Literal[False]
) -> Running: ...


def serve(
    model: Model, *, host: str = "127.0.0.1", port: int = 8000, engine: str | None = None, wait: bool = True
) -> Running | None:
    """Serve a model with its web page and API, until Ctrl-C or in the background.

    Args:
        model: a model of any interface, or anything that `vitkit.load` accepts.
        host: address to listen on (default: this machine only).
        port: port; 0 for any free one (default: 8000).
        engine: a row of `vitkit.speed.ENGINES` (default: `cpu-fused` on the CPU, else `torch`).
        wait: whether to serve until Ctrl-C; otherwise return the running server, with its `url` and `stop()`
            (default: True).

    Example:
        >>> import urllib.request, vitkit
        >>> model = vitkit.create("vit-ti/16", image_size=32, num_classes=3, num_hidden_layers=1)
        >>> with vitkit.serve(model, port=0, wait=False) as server:
        ...     urllib.request.urlopen(f"{server.url}/healthz").status
        200
    """
    from vitkit.server.app import create_app
    from vitkit.server.server import Running, is_local, listen, run
    from vitkit.server.service import Service
    from vitkit.server.settings import LOCAL, Settings

    settings = Settings(hosts=LOCAL if is_local(host) else None)
    source = str(model) if isinstance(model, str | Path) else type(model).__name__
    bound = listen(host, port)
    try:
        service = Service(model_of(model).eval(), settings, engine=engine, source=source)
        if isinstance(model, str | Path) and is_local(host):
            from vitkit.jobs.photos import open_photos

            service.photos = open_photos(model, service.model)
        service.warm()
        if not wait:
            return Running(create_app(service), bound)
        print(f"vitkit: {source} is served at http://{host}:{bound.getsockname()[1]}; Ctrl-C stops it.", flush=True)
        run(create_app(service), bound)
    except BaseException:
        bound.close()
        raise
    bound.close()
    return None
