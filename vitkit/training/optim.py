"""The update: which parameters are trained and which decay, the optimizer, the running average of the weights, and how
an update is carried out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.model.parts.layers import GATED
from vitkit.runtime import Runtime
from vitkit.training.adamw import OnePassAdamW, takes
from vitkit.training.lora import LowRank
from vitkit.training.muon import Muon
from vitkit.training.recipe import Recipe


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> int:
    """Freeze the parameters whose names match a pattern; return the number of weights that are still trained.

    Args:
        model: changed in place.
        patterns: `head.*`, `blocks.0.*`, or the name of a module (`patch_embedding`).

    Raises:
        ConfigError: a pattern matches no parameter, or everything would be frozen.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in names):
            raise ConfigError(
                f"--freeze expects names or patterns of parameters; {pattern!r} matches none. The names are such as "
                f"{names[0]}, {names[len(names) // 2]} and {names[-1]}."
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(_fits(name, pattern) for pattern in patterns))
    left = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not left:
        raise ConfigError(f"--freeze {' '.join(patterns)} freezes every parameter; keep some to train, such as head.*.")
    return left


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def kernels(model: nn.Module) -> set[str]:
    """Return the names of the weights that decay: the kernels of linear layers and convolutions, and their adapters."""
    found = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    adapters = [name for name, module in model.named_modules() if isinstance(module, LowRank)]
    return found | {f"{name}.{part}" for name in adapters for part in "AB"}


def layer_of(name: str, layers: int) -> int:
    """Return the layer that a parameter belongs to: 0 for the embeddings, 1..L for the blocks, L + 1 for norm and head.

    Args:
        name: the parameter's name.
        layers: L, the number of blocks.
    """
    name = name.removeprefix("vit.")  # inside the module of an objective
    if match := re.match(r"blocks\.(\d+)\.", name):
        return int(match[1]) + 1
    return layers + 1 if name.startswith(("norm.", "pool.", "pre_logits.", "head.", "predictor.")) else 0


def matrices(model: nn.Module) -> dict[str, int]:
    """Return the weights that Muon trains, the kernels of the blocks, and the number of matrices stacked in each.

    Raises:
        ConfigError: there are none.
    """
    vit = getattr(model, "vit", model)  # inside the module of an objective
    stacked = {"qkv": 3, "fc1": 2 if getattr(vit.config, "hidden_act", "") in GATED else 1}
    linear = {
        f"{name}.weight": name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)
    }
    found = {
        name: stacked.get(linear[name], 1)
        for name, p in model.named_parameters()
        if p.requires_grad and name in linear and name.removeprefix("vit.").startswith("blocks.")
    }
    if not found:
        raise ConfigError("optimizer='muon' trains the matrices of a ViT's blocks; none is trained here. Use 'adamw'.")
    return found


def groups(model: nn.Module, recipe: Recipe, stacked: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, one per (weight decay, learning-rate factor, matrices per weight).

    In each, `scale` is the factor and `pieces` the number of matrices, 0 for other parameters.

    Args:
        model: a ViT; frozen parameters are left out.
        recipe: sets weight decay and layer decay.
        stacked: weights with matrices and their number (default: none).
    """
    decaying, layers = kernels(model), len(getattr(getattr(model, "vit", model), "blocks", ()))
    found: dict[tuple[float, float, int], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale = 1.0 if recipe.layer_decay is None else recipe.layer_decay ** (layers + 1 - layer_of(name, layers))
            decay = recipe.weight_decay if name in decaying else 0.0
            found.setdefault((decay, scale, (stacked or {}).get(name, 0)), []).append(parameter)
    return [
        {"params": params, "weight_decay": decay, "scale": scale, "pieces": pieces}
        for (decay, scale, pieces), params in found.items()
    ]


def _adamw(model: nn.Module, recipe: Recipe, **how: Any) -> torch.optim.Optimizer:
    kind = OnePassAdamW if how.get("capturable") and takes(model.parameters()) else torch.optim.AdamW
    return kind(groups(model, recipe), lr=recipe.lr, betas=recipe.betas, **how)


def _adam(model: nn.Module, recipe: Recipe, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups(model, recipe), lr=recipe.lr, betas=recipe.betas, **how)


def _sgd(model: nn.Module, recipe: Recipe, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(model, recipe), lr=recipe.lr, momentum=recipe.momentum, **how)


def _muon(model: nn.Module, recipe: Recipe, **how: Any) -> torch.optim.Optimizer:
    return Muon(groups(model, recipe, matrices(model)), recipe.momentum, lr=recipe.lr, betas=recipe.betas, **how)


# Name -> (model, recipe, which kernels) -> optimizer.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adam": _adam,
    "sgd": _sgd,
    "muon": _muon,
}


@contextmanager
def _without_compiler() -> Iterator[None]:
    """A context in which parameter groups can be added without importing torch's compiler."""
    plain: Any = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    if hasattr(plain, "__dynamo_disable"):
        yield
        return
    plain.__dynamo_disable = plain  # where torch keeps the function that it calls instead
    try:
        yield
    finally:
        del plain.__dynamo_disable


def _plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Replace an optimizer's methods by what torch wraps, in place; return the optimizer.

    The wrappers keep torch's compiler away from these methods, and import it on their first call, which takes seconds.
    Nothing here compiles an optimizer.
    """
    for name in ("step", "zero_grad", "state_dict", "load_state_dict"):
        method = MethodType(inspect.unwrap(getattr(type(optimizer), name)), optimizer)
        setattr(optimizer, name, torch.no_grad()(method) if name == "step" else method)
    return optimizer


GRAPHS = ("adamw", "adam", "muon")  # optimizers whose update can be a CUDA graph


def optimizer_for(model: nn.Module, recipe: Recipe, graph: bool = False) -> torch.optim.Optimizer:
    """Create the recipe's optimizer, with a fused kernel if there is one.

    Args:
        model: a ViT that is already on its device.
        recipe: sets the optimizer and its numbers.
        graph: whether its update may become a CUDA graph: its learning rates are then numbers on the device.
    """
    first = next(model.parameters())
    fused = first.device.type in ("cuda", "cpu")
    if recipe.optimizer == "sgd" and type(first.data) is not Tensor:
        fused = False  # torch has no fused SGD for sharded parameters
    how = {"fused": True} if fused else {"foreach": True}
    graph = graph and first.is_cuda and recipe.optimizer in GRAPHS
    with _without_compiler():
        optimizer = OPTIMIZERS[recipe.optimizer](model, recipe, **how, **({"capturable": True} if graph else {}))
    for group in optimizer.param_groups if graph else ():
        group["lr"] = torch.tensor(recipe.lr, device=first.device)
    if isinstance(optimizer, Muon) and optimizer.adamw is not None:
        _plain(optimizer.adamw)
    return _plain(optimizer)


def moments(model: nn.Module, recipe: Recipe) -> int:
    """Return how many numbers the optimizer keeps besides the weights: one per weight, or two for Adam and AdamW."""
    single = recipe.optimizer == "sgd"
    stacked = matrices(model) if recipe.optimizer == "muon" else {}
    trained = ((name, p.numel()) for name, p in model.named_parameters() if p.requires_grad)
    return sum(count * (1 if single or name in stacked else 2) for name, count in trained)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group: `lr` times the group's factor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * group["scale"])
        else:
            group["lr"] = lr * group["scale"]


def clipping(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], limit: float | None, runtime: Runtime
) -> Callable[[], Tensor]:
    """Return a function that clips gradients to a norm, at the latest as the optimizer reads them, and returns the norm
    before that.

    Args:
        optimizer: made by `optimizer_for`.
        parameters: everything that it trains.
        limit: the largest norm allowed; None for any.
        runtime: device, precision and processes.
    """
    if isinstance(optimizer, OnePassAdamW) and not runtime.scaler.is_enabled():
        return partial(optimizer.measure, limit)
    return partial(runtime.clip, optimizer, parameters, limit)


class Average:
    """The running (Polyak) average of the weights; after each step, average = decay x average + (1 - decay) x weights.

    Args:
        model: the model to average; the average starts as a copy of its weights.
        decay: close to 1, such as 0.9999.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._live: list[Tensor] = list(model.parameters())  # once: a list of them takes a while to make

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the model's present weights."""
        torch._foreach_lerp_(list(self.weights.values()), self._live, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[nn.Module]:
        """A context in which the model has the averaged weights; afterwards it has its own again."""
        self._swap()
        try:
            yield self.model
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.model.named_parameters():
            own = parameter.detach().clone()
            parameter.copy_(self.weights[name])
            self.weights[name].copy_(own)


# If fused, `found_inf` stops their update.
GUARDED = (OnePassAdamW, torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, Muon)


class Update:
    """What turns gradients into new weights: clipping, then the optimizer and the running average.

    The device does not wait for the host: if the loss or the gradient is not finite, fused optimizers leave the weights
    as they are, and the host can ask afterwards.

    Args:
        optimizer: made by `optimizer_for`.
        parameters: everything that it trains.
        average: the running average of the weights, if any.
        clip: made by `clipping`.
        scaler: that of fp16.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        average: Average | None,
        clip: Callable[[], Tensor],
        scaler: torch.amp.GradScaler,
    ) -> None:
        self.optimizer, self.parameters, self.average = optimizer, parameters, average
        self.clip, self.scaler = clip, scaler
        sharded = type(parameters[0].data) is not Tensor
        fused = type(optimizer) in GUARDED and bool(optimizer.defaults["fused"])
        self.guarded = fused and not sharded and not scaler.is_enabled()  # whether broken numbers change no weights
        self.capturable = self.guarded and bool(optimizer.defaults.get("capturable"))  # as a CUDA graph

    def measure(self, sums: Tensor) -> Tensor:
        """Clip the gradients; return these sums, the loss first, and then the gradients' norm before clipping.

        Args:
            sums: [n].
        """
        total = torch.cat([sums, self.clip().detach().float()[None]])
        if self.guarded:
            broken = ~(total[0].isfinite() & total[-1].isfinite())
            self.optimizer.found_inf = broken.float()  # type: ignore[attr-defined]
        return total

    def apply(self) -> None:
        """Update the weights and their average."""
        self.scaler.step(self.optimizer)  # fp16 skips the update if a gradient overflowed
        self.scaler.update()
        if self.average is not None:
            self.average.update()
