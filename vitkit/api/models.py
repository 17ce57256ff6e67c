"""Models of any interface, or their names, as what the rooms take; and writing them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from vitkit.checkpoints import load
from vitkit.checkpoints import save as save_checkpoint
from vitkit.errors import ConfigError
from vitkit.interfaces import as_backbone
from vitkit.model.backbone import Backbone, Config
from vitkit.model.create import configuration

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


def config_of(model: Model | Config) -> Config:
    """Return the configuration of a variant, a file, a run, a hub id, or a model of any interface."""
    if isinstance(model, Config):
        return model
    if isinstance(model, str) and not Path(model).expanduser().exists():
        try:
            return configuration(model)
        except ConfigError:
            if not names_weights(model):
                raise
    return model_of(model).config


def names_weights(name: str) -> bool:
    """Whether a name stands for weights (a file, a run, owner/name on the hub) and not for a variant (vit-b/16)."""
    if Path(name).expanduser().exists():
        return True
    known = re.fullmatch(r"[^/]+(/[^/]+)+|.+@\w+|(vit|resnetv2)_\w+\.\w+", name)
    return bool(known) and not re.fullmatch(r"[\w+-]+/\d+", name)


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
