"""Check a model's inputs: pixels that can be cut into patches, head masks of the right shape."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import InputError
from vitkit.model.config import ViTConfig
from vitkit.model.resnet_config import ResNetConfig


def validate_and_pad(x: Tensor, c: ViTConfig) -> Tensor:
    """Return pixels whose sides are multiples of the patch.

    Args:
        x: [B, C, H, W].
        c: the model's configuration.

    Raises:
        InputError: wrong rank, channels or type, or a side that is not a multiple of the patch and may not be padded.
    """
    P, (H, W) = c.patch_size, checked(x, c).shape[2:]
    if c.pad_input:
        return F.pad(x, (0, -W % P, 0, -H % P))  # right and bottom, with zeros
    if H % P or W % P:
        raise InputError(
            f"Expected an image height and width that are multiples of the patch size {P}; "
            f"got {H} x {W}. Resize to {max(H // P, 1) * P} x {max(W // P, 1) * P}, or create or "
            f"load the model with pad_input=True."
        )
    return x


def checked(x: Tensor, c: ViTConfig | ResNetConfig) -> Tensor:
    """Return the pixels if they have the rank, channels and type that a model takes; else raise InputError.

    Args:
        x: [B, C, H, W].
        c: the model's configuration.
    """
    if x.dim() != 4 or x.shape[1] != c.num_channels or not (x.shape[2] and x.shape[3]):
        advice = "Other channels need a model created or loaded with num_channels=."
        if x.dim() == 3 and x.shape[0] == c.num_channels:
            advice = "For a single image, add the batch: x[None]."
        elif x.dim() == 4 and x.shape[1] == c.num_channels:
            advice = "An image has at least one pixel."
        raise InputError(f"Expected pixels [batch, {c.num_channels}, height, width]; got {list(x.shape)}. {advice}")
    if not x.is_floating_point():
        raise InputError(f"Expected floating-point pixels, normalised as model.input_spec says; got {x.dtype}.")
    return x


def masks(head_mask: Tensor | None, c: ViTConfig) -> list[Tensor | None]:
    """Return one row [h] of a head mask per layer, or None per layer.

    Args:
        head_mask: [h], the same for all layers, or [L, h].
        c: the model's configuration.
    """
    L, h = c.num_hidden_layers, c.num_attention_heads
    if head_mask is None:
        return [None] * L
    if tuple(head_mask.shape) not in ((h,), (L, h)):
        raise InputError(f"Expected a head_mask of shape [{h}] or [{L}, {h}]; got {list(head_mask.shape)}.")
    return list(head_mask.expand(L, h))
