"""What the outputs of a predictor are called; ImageNet's thousand classes are built in."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources

import torch

from vitkit.errors import InputError
from vitkit.model.classifier import Classifier
from vitkit.model.config import InputSpec


@dataclass(frozen=True)
class ImageNet:
    """The classes of ImageNet-1k in the order that every public checkpoint has.

    Args:
        wnids: their WordNet numbers; the order is that of these numbers.
        names: one short name each.
    """

    wnids: tuple[str, ...]
    names: tuple[str, ...]


@functools.cache
def imagenet() -> ImageNet:
    """ImageNet-1k's classes."""
    values = json.loads(resources.files("vitkit.evaluation").joinpath("imagenet.json").read_text(encoding="utf-8"))
    return ImageNet(tuple(values["wnids"]), tuple(values["names"]))


def class_names(spec: InputSpec, K: int) -> tuple[str, ...]:
    """Names of K outputs: the checkpoint's own, else ImageNet's where there are as many, else their numbers.

    Args:
        spec: the predictor's InputSpec.
        K: its outputs.
    """
    if spec.class_names:
        return spec.class_names
    return imagenet().names if len(imagenet().names) == K else tuple(str(k) for k in range(K))


def outputs_of(predictor: Classifier) -> int:
    """K: from the class names, the configuration, or one blank image.

    Args:
        predictor: a ViT, or whatever else predicts.

    Raises:
        InputError: weights without a head.
    """
    spec, config = predictor.input_spec, getattr(predictor, "config", None)
    if config is not None and not config.num_classes:
        raise InputError(
            "These weights have no head, so that they predict nothing; give them one with `vitkit probe "
            "DATA --from WEIGHTS`."
        )
    if spec.class_names:
        return len(spec.class_names)
    if config is not None:
        return int(config.num_classes)
    return int(predictor(torch.zeros(1, len(spec.mean), *spec.size)).shape[1])
