"""What a recipe is: every number of a training run that is not about the machine, with the place it comes from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from vitkit.data.augment import Augment
from vitkit.data.mix import Mix
from vitkit.errors import ConfigError, nearest
from vitkit.model import checks
from vitkit.model.config import ViTConfig

Optimizer = Literal["adamw", "sgd"]
Decay = Literal["linear", "cosine", "constant"]
Loss = Literal["softmax", "sigmoid"]
LRRule = Literal["fixed", "linear", "sqrt"]

RULES: dict[str, float] = {"fixed": 0.0, "linear": 1.0, "sqrt": 0.5}  # lr x (batch / the recipe's batch) ** this
INCEPTION = Augment(scale=(0.05, 1.0))  # the authors' random crop, and a flip
UNMIXED = Mix()
LONGEST_WARMUP = 1 / 3  # of a run


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained. Derived recipes are `dataclasses.replace(recipe, ...)`, or `change` by a user.

    Weight decay is decoupled (AdamW): each update takes lr x weight_decay x w off a kernel. It is relative to the
    learning rate, as in the authors' code, so the paper's 0.1 is 0.1 here. Coupled L2, the decay added to the gradient,
    cannot be expressed: SGD goes without decay, as in Table 4.

    Args:
        source: where the numbers are from.
        expect: what it is for, and what to expect of it.
        models: variants it was published for; empty for any.
        config: the model it was made for, where that is no variant; what is trained when no model is named.
        small_data: whether it is meant for training from scratch on few images.
        image_size: pixels; None for the model's own.
        epochs: passes over the data; this or steps.
        steps: optimiser steps; this or epochs.
        batch_size: images of a step, over all processes and micro-batches.
        optimizer: `adamw` or `sgd`.
        lr: highest learning rate, at batch_size.
        lr_choices: those that the publication chose from, on a held-out part of train (`vitkit sweep`).
        lr_rule: what another batch size does to lr: `fixed` nothing, `linear` and `sqrt` scale it.
        betas: of AdamW.
        momentum: of SGD.
        weight_decay: of kernels; biases, norms, tokens and positions do not decay.
        decay: shape of the schedule after warm-up.
        final_lr: learning rate at the end of the decay.
        warmup: steps of linear warm-up; below 1, share of the run.
        clip: largest global norm of the gradient; None for no limit.
        ema: decay of the running average of the weights (Polyak); None for none.
        layer_decay: factor on the learning rate of each layer against the one above it; None for none.
        loss: `softmax` (one class an image) or `sigmoid` (each class by itself).
        label_smoothing: share of each target that is spread over all classes.
        dropout: after dense layers and positions.
        drop_path: stochastic depth of the last block.
        pre_logits: whether a new model's head has the paper's hidden layer.
        head_bias: initial bias of a new head.
        freeze: patterns of parameter names that are not trained (`blocks.0.*`).
        val: share of train that is held out where the data set has no validation part.
        augment: how images are varied.
        mix: MixUp and CutMix.
    """

    source: str
    expect: str = ""
    models: tuple[str, ...] = ()
    config: ViTConfig | None = None
    small_data: bool = False
    image_size: int | None = None
    epochs: float | None = None
    steps: int | None = None
    batch_size: int
    optimizer: Optimizer = "adamw"
    lr: float
    lr_choices: tuple[float, ...] = ()
    lr_rule: LRRule = "fixed"
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.9
    weight_decay: float = 0.0
    decay: Decay = "cosine"
    final_lr: float = 0.0
    warmup: float = 0
    clip: float | None = None
    ema: float | None = None
    layer_decay: float | None = None
    loss: Loss = "softmax"
    label_smoothing: float = 0.0
    dropout: float = 0.0
    drop_path: float = 0.0
    pre_logits: bool = False
    head_bias: float = 0.0
    freeze: tuple[str, ...] = ()
    val: float = 0.1
    augment: Augment = INCEPTION
    mix: Mix = UNMIXED

    def __post_init__(self) -> None:
        for name in ("models", "lr_choices", "betas", "freeze"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(
                f"A recipe has epochs or steps, and not both; got epochs={self.epochs}, steps={self.steps}."
            )
        checks.number("epochs", self.epochs if self.epochs is not None else 1, 0, open_low=True)
        checks.whole("steps", self.steps if self.steps is not None else 1, 1)
        checks.whole("batch_size", self.batch_size, 1)
        checks.number("lr", self.lr, 0, open_low=True)
        for name in ("weight_decay", "final_lr", "warmup"):
            checks.number(name, getattr(self, name), 0)
        for name in ("label_smoothing", "dropout", "drop_path", "momentum", "val"):
            checks.number(name, getattr(self, name), 0, 1)
        for name in ("clip", "layer_decay", "ema"):
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name), 0, math.inf if name == "clip" else 1, open_low=True)
        checks.one_of("optimizer", self.optimizer, Optimizer)
        checks.one_of("decay", self.decay, Decay)
        checks.one_of("loss", self.loss, Loss)
        checks.one_of("lr_rule", self.lr_rule, LRRule)
        if self.val == 1:
            raise ConfigError("val must leave something to train on; got 1.")
        if self.optimizer == "sgd" and self.weight_decay:
            raise ConfigError(
                f"SGD would add the decay to the gradient, which is not the paper's decoupled one; use "
                f"optimizer='adamw' or weight_decay=0, not {self.weight_decay:g}."
            )
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ConfigError(f"warmup is a whole number of steps, or a share of the run below 1; got {self.warmup!r}.")
        if self.final_lr > self.lr:
            raise ConfigError(f"final_lr must not exceed lr; got {self.final_lr:g} and {self.lr:g}.")

    def change(self, **given: Any) -> Recipe:
        """The recipe with a user's settings; what is None stays as it is.

        epochs replaces steps and the other way round; another batch size changes lr as `lr_rule` says, unless lr is
        given too.

        Args:
            given: fields of Recipe.
        """
        known = [f.name for f in fields(self)]
        changes = {name: value for name, value in given.items() if value is not None}
        for name in changes:
            if name not in known:
                raise ConfigError(f"A recipe has no field {name!r}{nearest(name, known) or '.'}")
        if "epochs" in changes and "steps" in changes:
            raise ConfigError("Give epochs or steps, not both.")
        if "epochs" in changes:
            changes["steps"] = None
        elif "steps" in changes:
            changes["epochs"] = None
        if "batch_size" in changes and "lr" not in changes:
            checks.whole("batch_size", changes["batch_size"], 1)
            rule = changes.get("lr_rule", self.lr_rule)
            checks.one_of("lr_rule", rule, LRRule)
            changes["lr"] = self.lr * (changes["batch_size"] / self.batch_size) ** RULES[rule]
        return dataclasses.replace(self, **changes)

    def total(self, images: int) -> int:
        """Steps of the run.

        Args:
            images: size of the training part.
        """
        if self.steps is not None:
            return self.steps
        return max(1, -(-round((self.epochs or 0) * images) // self.batch_size))

    def warmup_steps(self, total: int) -> int:
        """Steps of the warm-up.

        Args:
            total: steps of the run.

        Raises:
            ConfigError: it would take more than a third of the run; says what to use.
        """
        wanted = round(self.warmup * total) if self.warmup < 1 else int(self.warmup)
        if wanted > total * LONGEST_WARMUP:
            raise ConfigError(
                f"A warm-up of {wanted:,} steps is more than a third of the {total:,} steps of this run; "
                f"use --warmup {int(total * LONGEST_WARMUP / 3)} (or at most "
                f"{int(total * LONGEST_WARMUP)}), or train longer."
            )
        return wanted

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON can hold them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["config"] = self.config.to_dict() if self.config else None
        values["augment"], values["mix"] = dataclasses.asdict(self.augment), dataclasses.asdict(self.mix)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Build from `to_dict`'s result."""
        config = ViTConfig.from_dict(values["config"]) if values["config"] else None
        return cls(**{**values, "config": config, "augment": Augment(**values["augment"]), "mix": Mix(**values["mix"])})
