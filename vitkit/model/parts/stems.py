"""STEMS: what pixels pass through before they are cut into patches. The paper's hybrids have a ResNet here."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from vitkit.model.config import ViTConfig

# name -> (what makes it, the channels of its output or None for the image's own, the pixels per side of one output)
STEMS: dict[str, tuple[Callable[[ViTConfig], nn.Module], int | None, int]] = {
    "none": (lambda c: nn.Identity(), None, 1),
}
