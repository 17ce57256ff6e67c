"""Which parameters are trained, which of them decay, how fast each layer learns, and by which optimiser."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from vitkit.errors import ConfigError
from vitkit.training.recipe import Recipe


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> int:
    """Stop training the parameters whose names fit; returns how many numbers are still trained.

    Args:
        model: changed in place.
        patterns: `head.*`, `blocks.0.*`, or the name of a module (`patch_embedding`).

    Raises:
        ConfigError: a pattern fits nothing, or nothing is left.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in names):
            raise ConfigError(
                f"--freeze {pattern!r} fits no parameter; their names are such as {names[0]}, "
                f"{names[len(names) // 2]} and {names[-1]}."
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(_fits(name, pattern) for pattern in patterns))
    left = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not left:
        raise ConfigError(f"--freeze {' '.join(patterns)} leaves nothing to train; leave the head out, for instance.")
    return left


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def kernels(model: nn.Module) -> set[str]:
    """Names of the weights that decay: matrices of linear layers and convolutions, nothing else."""
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}


def layer_of(name: str, layers: int) -> int:
    """Where a parameter stands: 0 the embeddings, 1 to L the blocks, L + 1 the norm and the head.

    Args:
        name: of the parameter.
        layers: L.
    """
    if match := re.match(r"blocks\.(\d+)\.", name):
        return int(match[1]) + 1
    return layers + 1 if name.startswith(("norm.", "pre_logits.", "head.")) else 0


def groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Parameter groups: one for each pair of (weight decay, learning-rate factor); `scale` is the factor.

    Args:
        model: a ViT; frozen parameters are left out.
        recipe: weight decay and layer decay.
    """
    decaying, layers = kernels(model), len(getattr(model, "blocks", ()))
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale = 1.0 if recipe.layer_decay is None else recipe.layer_decay ** (layers + 1 - layer_of(name, layers))
            decay = recipe.weight_decay if name in decaying else 0.0
            found.setdefault((decay, scale), []).append(parameter)
    return [{"params": params, "weight_decay": decay, "scale": scale} for (decay, scale), params in found.items()]


def optimizer_for(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimiser over a model that is on its device already; the fused kernel where there is one.

    Args:
        model: a ViT.
        recipe: which one, and its numbers.
    """
    fused = next(model.parameters()).device.type in ("cuda", "cpu")
    how: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups(model, recipe), lr=recipe.lr, momentum=recipe.momentum, **how)
    return torch.optim.AdamW(groups(model, recipe), lr=recipe.lr, betas=recipe.betas, **how)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its part of the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]
