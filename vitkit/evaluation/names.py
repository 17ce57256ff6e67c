"""What the outputs of a predictor are called; ImageNet's thousand classes are built in."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources

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
