"""What a model consists of: every module with its shapes and parameters.

Nothing is computed: the model runs on the meta device, where tensors have shapes but no values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.model.config import ViTConfig
from vitkit.model.vit import ViT

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module.

    Args:
        name: path inside the model (`blocks.0.msa.qkv`); empty for the model itself.
        kind: its class.
        input: shape of its input.
        output: shape of its output.
        parameters: number of parameters, including those of its submodules.
        trainable: whether any parameter is trainable; None for a module without parameters.
    """

    name: str
    kind: str
    input: Shape
    output: Shape
    parameters: int
    trainable: bool | None

    @property
    def depth(self) -> int:
        """Return the number of modules that contain this one."""
        return self.name.count(".") + 1 if self.name else 0


def _shape(value: Any) -> Shape:
    while isinstance(value, tuple) and value and not isinstance(value[0], int):
        value = value[0]
    return tuple(value.shape if isinstance(value, Tensor) else value)


def meta(config: ViTConfig, batch: int = 1) -> tuple[ViT, Tensor]:
    """Return a model and a batch of images of its size, both on the meta device."""
    with torch.device("meta"):
        return ViT(config).eval(), torch.empty(batch, config.num_channels, *config.image_hw)


def describe(config: ViTConfig, batch: int = 1) -> list[Row]:
    """List every module of a model, in the order in which an image passes through them.

    Args:
        config: the architecture.
        batch: batch size B of the shapes (default: 1).
    """
    model, x = meta(config, batch)
    shapes: dict[nn.Module, list[Shape]] = {}

    def entered(module: nn.Module, given: Any) -> None:
        shapes.setdefault(module, [_shape(given)])

    def left(module: nn.Module, _given: Any, result: Any) -> None:
        shapes[module].append(_shape(result))

    for module in model.modules():
        module.register_forward_pre_hook(entered)
        module.register_forward_hook(left)
    model(x)
    names = {module: name for name, module in model.named_modules()}
    rows = []
    for module, (given, result, *_) in shapes.items():
        trains = [p.requires_grad for p in module.parameters()]
        rows.append(
            Row(
                name=names[module],
                kind=type(module).__name__,
                input=given,
                output=result,
                parameters=sum(p.numel() for p in module.parameters()),
                trainable=any(trains) if trains else None,
            )
        )
    return rows
