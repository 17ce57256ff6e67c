"""Names for a model's outputs; those of the 1000 ImageNet classes are built in."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources

import torch

from vitkit.errors import InputError
from vitkit.model.classifier import Classifier


@dataclass(frozen=True)
class ImageNet:
    """The classes of ImageNet-1k, in the order of every public checkpoint.

    Args:
        wnids: WordNet IDs, which also define the order.
        names: one short name for each class.
    """

    wnids: tuple[str, ...]
    names: tuple[str, ...]


@functools.cache
def imagenet() -> ImageNet:
    """Return the classes of ImageNet-1k."""
    values = json.loads(resources.files("vitkit.evaluation").joinpath("imagenet.json").read_text(encoding="utf-8"))
    return ImageNet(tuple(values["wnids"]), tuple(values["names"]))


def class_names(model: Classifier) -> tuple[str, ...]:
    """Return one name for each of the model's K outputs.

    They are the checkpoint's own names, or ImageNet's if there are none and K is 1000, or "0", "1", ... otherwise.

    Args:
        model: a ViT or any other classifier.

    Raises:
        InputError: the weights have no head.
    """
    spec, config = model.input_spec, getattr(model, "config", None)
    if config is not None and not config.num_classes:
        raise InputError(
            "Expected weights with a classification head; these have no head. Fit one with `vitkit probe DATA "
            "--from WEIGHTS`."
        )
    if spec.class_names:
        return spec.class_names
    K = config.num_classes if config is not None else model(torch.zeros(1, len(spec.mean), *spec.size)).shape[1]
    return imagenet().names if len(imagenet().names) == K else tuple(str(k) for k in range(K))


def answer_names(model: Classifier) -> tuple[str, ...]:
    """Return the names of the model's classes, for predictions.

    Raises:
        InputError: the weights have no head, or one that is CLIP's projection and knows no classes.
    """
    config = getattr(model, "config", None)
    if "head" in getattr(config, "without_bias", ()) and not model.input_spec.class_names:
        raise InputError(
            "Expected weights with a classification head; this head is a projection into the space that images share "
            "with texts, and its outputs are not classes. Fit one with `vitkit probe DATA --from WEIGHTS`."
        )
    return class_names(model)
