"""The peers' own models, of the same architecture, for measuring beside ours; all are optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from vitkit.checkpoints.verify import peer
from vitkit.errors import MissingDependency
from vitkit.model.config import ViTConfig


def library(name: str) -> Any:
    """Import a peer.

    Args:
        name: of the module.
    """
    if importlib.util.find_spec(name.split(".", maxsplit=1)[0]) is None:
        raise MissingDependency(
            f"{name} is not installed; pip install {name.split('.', maxsplit=1)[0]} to have it measured too."
        )
    return peer(name)


def timm(c: ViTConfig) -> nn.Module:
    """timm's VisionTransformer."""
    model: nn.Module = library("timm.models.vision_transformer").VisionTransformer(
        img_size=c.image_hw,
        patch_size=c.patch_size,
        in_chans=c.num_channels,
        num_classes=c.num_classes,
        embed_dim=c.hidden_size,
        depth=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        mlp_ratio=c.intermediate_size / c.hidden_size,
    )
    return model


class Logits(nn.Module):
    """A model of Hugging Face's that gives its logits.

    Args:
        model: ViTForImageClassification.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K]."""
        return self.model(x).logits


def transformers(c: ViTConfig) -> nn.Module:
    """transformers' ViT with its fastest attention."""
    hub = library("transformers")
    config = hub.ViTConfig(
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        intermediate_size=c.intermediate_size,
        image_size=c.image_size,
        patch_size=c.patch_size,
        num_channels=c.num_channels,
        num_labels=c.num_classes,
        attn_implementation="sdpa",
    )
    return Logits(hub.ViTForImageClassification(config))


def torchvision(c: ViTConfig) -> nn.Module:
    """torchvision's VisionTransformer."""
    model: nn.Module = library("torchvision.models.vision_transformer").VisionTransformer(
        image_size=c.image_hw[0],
        patch_size=c.patch_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        hidden_dim=c.hidden_size,
        mlp_dim=c.intermediate_size,
        num_classes=c.num_classes,
    )
    return model


def vit_pytorch(c: ViTConfig) -> nn.Module:
    """vit-pytorch's ViT."""
    model: nn.Module = library("vit_pytorch").ViT(
        image_size=c.image_hw,
        patch_size=c.patch_size,
        num_classes=c.num_classes,
        dim=c.hidden_size,
        depth=c.num_hidden_layers,
        heads=c.num_attention_heads,
        mlp_dim=c.intermediate_size,
        channels=c.num_channels,
        dim_head=c.head_size,
    )
    return model


PEERS: dict[str, Callable[[ViTConfig], nn.Module]] = {
    "timm": timm,
    "transformers": transformers,
    "torchvision": torchvision,
    "vit-pytorch": vit_pytorch,
}
