"""Low-rank adapters (LoRA, arXiv 2106.09685): W stays as it is, and W + B A is trained through B and A alone.

Whoever reads the weight of an adapted layer, such as the fused kernels, gets W + B A. B starts at zero, so the first
forward pass equals the backbone's exactly. Adapters are merged into W in every checkpoint, and kept on their own in
the small file that checkpoints/adapters.py writes.

Legend: W [out, in], A [rank, in], B [out, rank].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitkit.checkpoints import open_checkpoint
from vitkit.checkpoints.adapters import Reference, digest
from vitkit.checkpoints.adapters import write as write_file
from vitkit.errors import ConfigError
from vitkit.model.backbone import Backbone
from vitkit.model.create import need_vit
from vitkit.model.vit import ViT
from vitkit.training.recipe import Recipe

LAYERS = ("msa.qkv", "mlp.fc1", "mlp.fc2")  # of each block


class LowRank(nn.Module):
    """W -> W + B A.

    Args:
        W: the weight; only its shape, type and device are used.
        rank: rank of B A.
        generator: draws A.
    """

    def __init__(self, W: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = W.shape
        self.A = nn.Parameter((torch.randn(rank, columns, generator=generator) / columns**0.5).to(W))
        self.B = nn.Parameter(W.new_zeros(rows, rank))

    def forward(self, W: Tensor) -> Tensor:
        """Return the weight that the layer computes with, [out, in]."""
        return W + self.B @ self.A


def adapt(model: Backbone, rank: int, seed: int) -> None:
    """Give every block of a ViT adapters and freeze everything else except the head, in place.

    Layers whose weight is frozen already get no adapter, and a frozen head stays frozen.

    Args:
        model: a ViT.
        rank: rank of the adapters.
        seed: seed of their initial A.

    Raises:
        ConfigError: the model is a ResNet, or the rank is not below the width of the layers.
    """
    vit, generator = need_vit(model, "--lora"), torch.Generator().manual_seed(seed)
    for _, layer in _layers(vit):
        if rank >= min(layer.weight.shape):
            raise ConfigError(
                f"--lora must be below {min(layer.weight.shape)}, the width of this model's layers; got {rank}. Use a "
                f"small rank such as 8."
            )
    adapted = [layer for _, layer in _layers(vit) if layer.weight.requires_grad]
    for name, parameter in vit.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name.startswith("head."))
    for layer in adapted:
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank, generator))


def low_rank(
    model: Backbone,
    recipe: Recipe,
    seed: int,
    weights: str | None,
    loading: Mapping[str, Any],
    known: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Adapt the model of a run; return what run.json says about it: the rank, and the backbone if it has a name.

    Args:
        model: the model, whose parameters are frozen as the recipe says.
        recipe: sets the rank.
        seed: the run's seed.
        weights: the name of the pre-trained weights, if any.
        loading: other arguments that they were loaded with.
        known: the result for the run that is resumed, if any.
    """
    assert recipe.lora is not None
    adapt(model, recipe.lora, seed)
    if known:
        return dict(known)
    if weights is None:
        return {"rank": recipe.lora}
    own = digest(open_checkpoint(weights, **loading).state)
    return {"rank": recipe.lora, "backbone": {"source": weights, "sha256": own, "loading": dict(loading)}}


def write(path: Path, model: Backbone, info: Mapping[str, Any]) -> None:
    """Write the adapters and the head of a model to a LoRA file, if its backbone has a name.

    Args:
        path: ends in .safetensors.
        model: a model with adapters.
        info: the result of `low_rank`.
    """
    if "backbone" in info:
        write_file(path, model, adapters(model), Reference(**info["backbone"]))


def merge(model: nn.Module) -> None:
    """Replace W by W + B A in place; the model then has no adapters, and its parameters have their own names again."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def adapters(model: Backbone) -> dict[str, Tensor]:
    """Return A and B of every adapter as `blocks.0.msa.qkv.weight.A`; empty for a model without adapters."""
    found: dict[str, Tensor] = {}
    for name, layer in _layers(model) if isinstance(model, ViT) else ():
        if parametrize.is_parametrized(layer, "weight"):
            own = layer.get_submodule("parametrizations.weight.0")
            found |= {f"{name}.weight.{part}": value.detach() for part, value in own.named_parameters()}
    return found


def _layers(vit: ViT) -> Iterator[tuple[str, nn.Linear]]:
    for i, block in enumerate(vit.blocks):
        for name in LAYERS:
            layer = block.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            yield f"blocks.{i}.{name}", layer
