"""What every model of ours has, a ViT or a ResNet: pixels -> features -> logits, and a description of itself."""

from __future__ import annotations

from torch import Tensor, nn

from vitkit.model.config import InputSpec, ViTConfig
from vitkit.model.known import Known
from vitkit.model.resnet_config import ResNetConfig

Config = ViTConfig | ResNetConfig


class Backbone(nn.Module):
    """A classifier with features. Its subclasses are `vit.ViT` and `resnet.ResNet`.

    `config` is the architecture, `input_spec` what it expects as input, `gradient_checkpointing` trades time for
    memory in training, and `licence` is that of the weights it was loaded from. `known` says what its classes look
    like, so that it can answer "none of these"; None if it cannot.
    """

    config: Config
    input_spec: InputSpec
    gradient_checkpointing: bool
    licence: str
    known: Known | None = None
    head: nn.Module

    def features(self, x: Tensor) -> Tensor:
        """Features [B, config.width] of pixels [B, C, H, W], normalised as `input_spec` says."""
        raise NotImplementedError

    def classify(self, y: Tensor) -> Tensor:
        """Logits [B, K] of features [B, config.width]."""
        raise NotImplementedError

    def set_image_size(self, size: int | tuple[int, int]) -> None:
        """Change the image size that the model is for, in place."""
        raise NotImplementedError
