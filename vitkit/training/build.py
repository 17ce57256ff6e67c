"""The model that a run starts from: new, or pre-trained with a new head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit.checkpoints import load
from vitkit.model.backbone import Backbone, Config
from vitkit.model.config import InputSpec
from vitkit.model.create import build, configuration
from vitkit.model.resnet_config import resnet_name
from vitkit.model.vit import ViT
from vitkit.training.recipe import Recipe


def new_model(
    name: str | Config | None,
    recipe: Recipe,
    classes: Sequence[str],
    seed: int,
    image_size: int | tuple[int, int] | None = None,
    fields: Mapping[str, Any] | None = None,
    bias: float | Sequence[float] | None = None,
) -> Backbone:
    """Create a model with random weights, which depend only on the seed.

    Args:
        name: a variant or a configuration; None for the recipe's own model.
        recipe: sets the image size, the evaluation's crop, the dropout and the head.
        classes: the class names, one per output; empty for no head.
        seed: random seed of the weights.
        image_size: in pixels (default: the recipe's, or else the model's own).
        fields: fields of the configuration to change.
        bias: initial bias of the head, one or one per output (default: the recipe's).
    """
    size = image_size or (recipe.image_size if name is None or isinstance(name, str) else None)
    changes: dict[str, Any] = {
        "num_classes": len(classes),
        "hidden_dropout_prob": recipe.dropout,
        "drop_path_rate": recipe.drop_path,
        **({"image_size": size} if size else {}),
        **(fields or {}),
    }
    if isinstance(name, str):
        hidden = {} if resnet_name(name) else {"pre_logits": recipe.pre_logits}  # a ResNet's head is always one layer
        config = configuration(name, **{**hidden, **changes})
    else:
        base = name or recipe.config
        assert base is not None  # `prepare` has checked it
        config = dataclasses.replace(base, **changes)
    spec = dataclasses.replace(InputSpec.of(config), class_names=tuple(classes))
    if recipe.eval_crop is not None:
        spec = dataclasses.replace(spec, resize="crop", crop=recipe.eval_crop)
    torch.manual_seed(seed)
    model = build(config, spec)
    if classes:
        _set_bias(model.head, recipe.head_bias if bias is None else bias)
    return model


def pretrained(
    source: str | Path,
    recipe: Recipe,
    classes: Sequence[str],
    image_size: int | tuple[int, int] | None = None,
    *,
    bias: float | Sequence[float] | None = None,
    several: bool = False,
    **overrides: Any,
) -> Backbone:
    """Load a pre-trained model. A head for exactly these classes is kept; any other is replaced by zeros (section 3.1).

    Args:
        source: anything that `vitkit.load` accepts.
        recipe: sets the image size and the dropout.
        classes: the class names, one per output.
        image_size: in pixels (default: the recipe's, or else that of the weights).
        bias: initial bias of a new head, one or one per output (default: the recipe's).
        several: whether an image can have several of the classes; a head for the other kind is replaced.
        overrides: other arguments of `vitkit.load`.
    """
    model = load(
        source,
        image_size=image_size or recipe.image_size,
        hidden_dropout_prob=recipe.dropout,
        drop_path_rate=recipe.drop_path,
        dtype="float32",
        **overrides,
    )
    with torch.no_grad():  # copies: `load` may have mapped the parameters from the file
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    kept = model.input_spec.class_names == tuple(classes) and model.input_spec.several == several
    if not kept or not (classes or isinstance(model.head, nn.Identity)):
        new_head(model, classes, recipe.head_bias if bias is None else bias)
    return model


def new_head(model: Backbone, classes: Sequence[str], bias: float | Sequence[float] = 0.0) -> None:
    """Replace the whole head by one linear layer with zero weights, in place; without classes, by nothing.

    Args:
        model: a ViT or a ResNet.
        classes: the class names, one per new output.
        bias: initial bias of every output, or of each (default: 0).
    """
    if isinstance(model, ViT):
        without = tuple(name for name in model.config.without_bias if name != "head")  # CLIP's projection has no bias
        model.config = dataclasses.replace(model.config, pre_logits=False, without_bias=without)
        model.pre_logits = None
    model.config = dataclasses.replace(model.config, num_classes=len(classes))
    model.input_spec = dataclasses.replace(model.input_spec, class_names=tuple(classes), thresholds=())
    if not classes:
        model.head = nn.Identity()
        return
    new = model.pool.head(model.config) if isinstance(model, ViT) else nn.Linear(model.config.width, len(classes))
    model.head = new
    for parameter in new.parameters():
        nn.init.zeros_(parameter)
    _set_bias(new, bias)


def _set_bias(head: nn.Module, value: float | Sequence[float]) -> None:
    """Set every bias of a head; DeiT's distilled models have two layers."""
    for layer in head.modules():
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            with torch.no_grad():
                layer.bias.copy_(torch.as_tensor(value, dtype=layer.bias.dtype).expand_as(layer.bias))
