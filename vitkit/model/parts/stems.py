"""STEMS: what pixels pass through before they are cut into patches. The paper's hybrids have a ResNet here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from vitkit.model.config import ViTConfig
from vitkit.model.resnet import HybridStem
from vitkit.model.resnet_config import STEM_CHANNELS, STEM_DEPTHS, STEM_PIXELS


def _resnet(depths: tuple[int, ...], c: ViTConfig) -> nn.Module:
    return HybridStem(depths, c.num_channels, c.standardisation)


# name -> (what makes it, the channels of its output or None for the image's own, the pixels per side of one output)
STEMS: dict[str, tuple[Callable[[ViTConfig], nn.Module], int | None, int]] = {
    "none": (lambda c: nn.Identity(), None, 1),
    **{name: (partial(_resnet, STEM_DEPTHS[name]), STEM_CHANNELS[name], STEM_PIXELS[name]) for name in STEM_DEPTHS},
}
