"""Classify, evaluate, embed and explain images."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from vitkit.api.models import Model, Weights, model_of
from vitkit.evaluation.predict import predict as predict_images
from vitkit.model.classifier import Classifier

if TYPE_CHECKING:
    from vitkit.data.batch import BadImages
    from vitkit.evaluation.predict import Given, Predictions
    from vitkit.features.filled import Embedded
    from vitkit.jobs.evaluate import Evaluation
    from vitkit.jobs.explain import Explained


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
