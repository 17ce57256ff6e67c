"""A new model by name, or from a configuration."""

from __future__ import annotations

from typing import Any

from vitkit.errors import ConfigError
from vitkit.model.backbone import Backbone, Config
from vitkit.model.config import InputSpec, variant
from vitkit.model.resnet import ResNet
from vitkit.model.resnet_config import ResNetConfig, resnet_name, resnet_variant
from vitkit.model.vit import ViT


def create(
    name: str = "vit-b/16", *, numerics: str | None = None, input_spec: InputSpec | None = None, **fields: Any
) -> Backbone:
    """Create a new model with random weights: a ViT, or a ResNet.

    Args:
        name: a variant: `vit-b/16`, `ViT-Base`, timm's `vit_base_patch16_224`, or a ResNet such as `r50x1` (default:
            vit-b/16; see `vitkit models`).
        numerics: a row of NUMERICS; `google` gives the tanh GELU (default: the paper's).
        input_spec: how images are prepared for it (default: see `InputSpec.of`).
        fields: any field of the configuration, for a model of your own (hidden_size=256, num_hidden_layers=6,
            num_classes=3).

    Example:
        >>> import vitkit
        >>> vitkit.create("vit-ti/16", num_classes=3, num_hidden_layers=6).config.hidden_size
        192
    """
    return build(configuration(name, numerics=numerics, **fields), input_spec)


def configuration(name: str, *, numerics: str | None = None, **fields: Any) -> Config:
    """Return the configuration of a variant, a ViT or a ResNet. The arguments are those of `create`."""
    of = resnet_variant if resnet_name(name) else variant
    return of(name, numerics=numerics, **fields)


def build(config: Config, input_spec: InputSpec | None = None) -> Backbone:
    """Return a new model of this architecture, with random weights."""
    if isinstance(config, ResNetConfig):
        return ResNet(config, input_spec)
    return ViT(config, input_spec)


def need_vit(model: Backbone, what: str) -> ViT:
    """Return the model as a ViT; raise if it is a ResNet, which has neither tokens nor attention.

    Args:
        model: any model of ours.
        what: what needs a ViT, for the message.

    Raises:
        ConfigError: it is not a ViT.
    """
    if isinstance(model, ViT):
        return model
    raise ConfigError(f"{what} needs a Vision Transformer; this model is a ResNet, which has no tokens or attention.")
