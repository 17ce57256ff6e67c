"""Which vector is the feature? CHOICES says it; every result names its choice.

cls            the class token after the final LayerNorm: y of Eq. 4
mean           the mean of the patch tokens after the final LayerNorm (before it where the model itself does so); in
               a ResNet, the mean of the last feature map, its only feature
pre-logits     what the paper's pre-training hidden layer gives, tanh(dense(y))
cls+mean, map, distilled, aimv2   what a model with such a pool feeds to its head
projected      what CLIP's projection, a head without a bias, makes of that: the space that images share with texts
patches        all patch tokens after the final LayerNorm, row by row of the image: N x D numbers (see `ViT.maps`)
layers:-2,-1   the class tokens after these blocks (counted from 0, or from the end), each through the final
               LayerNorm, one after the other; the mean of the patches in a model without a class token
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitkit.errors import ConfigError, pick
from vitkit.model.backbone import Backbone, Config
from vitkit.model.checks import indices
from vitkit.model.parts.pools import POOLS
from vitkit.model.resnet_config import ResNetConfig
from vitkit.model.vit import ViT


def _cls(model: ViT, x: Tensor) -> Tensor:
    return model.norm(model.encode(x, rows=slice(0, 1))[:, 0])  # the last block computes no other token


def _mean(model: ViT, x: Tensor) -> Tensor:
    if model.config.pool == "mean":
        return model.features(x)
    return model.tokens(x)[:, model.config.num_prefix_tokens :].mean(1)


def _pre_logits(model: ViT, x: Tensor) -> Tensor:
    assert model.pre_logits is not None  # `choose` has refused the others
    return torch.tanh(model.pre_logits(model.features(x)))


def _own(model: ViT, x: Tensor) -> Tensor:
    return model.features(x)


def _projected(model: ViT, x: Tensor) -> Tensor:
    return model(x)


def _patches(model: ViT, x: Tensor) -> Tensor:
    return model.tokens(x)[:, model.config.num_prefix_tokens :].flatten(1)


CHOICES: dict[str, Callable[[ViT, Tensor], Tensor]] = {
    "cls": _cls,
    "mean": _mean,
    "pre-logits": _pre_logits,
    "cls+mean": _own,
    "map": _own,
    "distilled": _own,
    "aimv2": _own,
    "projected": _projected,
    "patches": _patches,
}


@dataclass(frozen=True)
class Choice:
    """A chosen feature; `choose` makes it.

    Args:
        name: its one spelling, part of the cache's key.
        layers: the blocks it is taken after; empty where it is a row of CHOICES.
        width: F, the numbers of one feature.
    """

    name: str
    layers: tuple[int, ...]
    width: int

    def of(self, model: Backbone, x: Tensor) -> Tensor:
        """Features [B, F] of pixels [B, C, H, W], by one pass of a model in eval mode.

        Args:
            model: the backbone.
            x: pixels, normalised as the model's InputSpec says.
        """
        if not isinstance(model, ViT):
            return model.features(x)
        if not self.layers:
            return CHOICES[self.name](model, x)
        found: dict[int, Tensor] = {}
        for layer, z in enumerate(model.states(x), start=-1):  # z_0 comes before block 0
            if layer in self.layers:
                c = model.config
                found[layer] = model.norm(z[:, 0] if c.class_token else z[:, c.num_prefix_tokens :].mean(1))
            if layer == max(self.layers):
                break
        return torch.cat([found[layer] for layer in self.layers], dim=1)


def choose(text: str | None, config: Config) -> Choice:
    """The feature that a word means for a model.

    Args:
        text: a row of CHOICES or `layers:...`; None for what the model's own head is fed (without pre-logits).
        config: the model's.

    Raises:
        ConfigError: no such feature, or the model does not have it.
    """
    if isinstance(config, ResNetConfig):
        if text not in (None, "mean"):
            raise ConfigError(f"A ResNet has one feature, the mean of its last feature map: mean; got {text!r}.")
        return Choice("mean", (), config.width)
    text = text or config.pool
    if match := re.fullmatch(r"layers:\s*(-?\d+(?:\s*,\s*-?\d+)*)", text):
        given = [int(number) for number in match[1].split(",")]
        layers = tuple(dict.fromkeys(indices("layers", given, config.num_hidden_layers)))
        return Choice("layers:" + ",".join(map(str, layers)), layers, len(layers) * config.hidden_size)
    if text.startswith("layers"):
        raise ConfigError(f"Expected layers:FIRST,SECOND,... such as layers:-2,-1; got {text!r}.")
    pick(CHOICES | {"layers:...": None}, text, "feature")
    if text == "cls" and not config.class_token:
        raise ConfigError("The feature 'cls' needs a class token, and this model has none; use --features mean.")
    if text == "pre-logits" and not config.pre_logits:
        raise ConfigError(
            "The feature 'pre-logits' needs the pre-training head's hidden layer, which this checkpoint "
            "does not have; use --features cls."
        )
    if CHOICES[text] is _own and text != config.pool:
        raise ConfigError(f"The feature {text!r} needs a model with pool={text!r}; this one has pool={config.pool!r}.")
    if text == "projected" and (not config.num_classes or "head" not in config.without_bias):
        raise ConfigError(
            "The feature 'projected' needs a projection, as CLIP's image model has it with its text model; this "
            "checkpoint has none."
        )
    width = {"projected": config.num_classes, "patches": config.num_patches * config.hidden_size}.get(text)
    return Choice(text, (), width or config.hidden_size * (POOLS[text].tokens if text in POOLS else 1))
