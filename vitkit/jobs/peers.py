"""Other libraries' own models of the same architecture, to compare ours with; every library is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vitkit.checkpoints.verify import peer
from vitkit.errors import ConfigError, MissingDependency
from vitkit.model.config import ViTConfig

Model = TypeVar("Model", bound=nn.Module)


def library(name: str) -> Any:
    """Import another library's module.

    Args:
        name: dotted name of the module.

    Raises:
        MissingDependency: the library is not installed.
    """
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise MissingDependency(f"{package} is not installed; to measure it too: pip install {package}.")
    return peer(name)


def randomize(model: Model) -> Model:
    """Replace parameters that start as zeros or ones: arithmetic on zeros can run faster than on other numbers."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() < 2 or not p.abs().max():
                p.add_(torch.randn_like(p) * 0.02)
    return model


@contextmanager
def cudnn_attention() -> Iterator[None]:
    """Compile whatever runs first inside this context with cuDNN's attention, which it keeps afterwards."""
    others = (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_math_sdp,
    )
    for enable in others:
        enable(False)
    try:
        yield
    finally:
        for enable in others:
            enable(True)


def timm(c: ViTConfig) -> nn.Module:
    """Build timm's VisionTransformer."""
    model: nn.Module = library("timm.models.vision_transformer").VisionTransformer(
        img_size=c.image_hw,
        patch_size=c.patch_size,
        in_chans=c.num_channels,
        num_classes=c.num_classes,
        embed_dim=c.hidden_size,
        depth=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        mlp_ratio=c.intermediate_size / c.hidden_size,
        pos_drop_rate=c.hidden_dropout_prob,
        proj_drop_rate=c.hidden_dropout_prob,
        drop_path_rate=c.drop_path_rate,
    )
    return model


def no_stochastic_depth(c: ViTConfig, name: str) -> None:
    """Refuse stochastic depth for a library that does not have it."""
    if c.drop_path_rate:
        raise ConfigError(f"{name} has no stochastic depth.")


class Logits(nn.Module):
    """A Hugging Face model that returns its logits alone.

    Args:
        model: ViTForImageClassification.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, K]."""
        return self.model(x).logits


def transformers(c: ViTConfig) -> nn.Module:
    """Build transformers' ViT with its fastest attention."""
    no_stochastic_depth(c, "transformers")
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
        hidden_dropout_prob=c.hidden_dropout_prob,
        attn_implementation="sdpa",
    )
    return Logits(hub.ViTForImageClassification(config))


def torchvision(c: ViTConfig) -> nn.Module:
    """Build torchvision's VisionTransformer."""
    no_stochastic_depth(c, "torchvision")
    model: nn.Module = library("torchvision.models.vision_transformer").VisionTransformer(
        image_size=c.image_hw[0],
        patch_size=c.patch_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        hidden_dim=c.hidden_size,
        mlp_dim=c.intermediate_size,
        num_classes=c.num_classes,
        dropout=c.hidden_dropout_prob,
    )
    return model


def vit_pytorch(c: ViTConfig) -> nn.Module:
    """Build vit-pytorch's ViT."""
    no_stochastic_depth(c, "vit-pytorch")
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
        dropout=c.hidden_dropout_prob,
        emb_dropout=c.hidden_dropout_prob,
    )
    return model


PEERS: dict[str, Callable[[ViTConfig], nn.Module]] = {
    "timm": timm,
    "transformers": transformers,
    "torchvision": torchvision,
    "vit-pytorch": vit_pytorch,
}
