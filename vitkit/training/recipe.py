"""What a recipe is: every number of a training run that does not concern the machine, and their source."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from vitkit.data.augment import Augment
from vitkit.data.mix import Mix
from vitkit.errors import ConfigError, nearest
from vitkit.model import checks
from vitkit.model.config import ViTConfig

Optimizer = Literal["adamw", "adam", "sgd", "muon"]
Decay = Literal["linear", "cosine", "constant"]
Loss = Literal["softmax", "sigmoid"]
Objective = Literal["classify", "several-labels", "masked-patch", "distil"]
Target = Literal["mean", "4x4", "patch"]
Sampling = Literal["uniform", "balanced"]
AugmentOn = Literal["cpu", "device"]
ClassWeights = Literal["equal", "balanced"]
LRRule = Literal["fixed", "linear", "sqrt"]
DecayFrom = Literal["warmup", "start"]

RULES: dict[str, float] = {"fixed": 0.0, "linear": 1.0, "sqrt": 0.5}  # lr x (batch / the recipe's batch) ** this
DECAYS: dict[str, Callable[[float], float]] = {  # progress, 0 to 1 -> share of lr
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
}
_Part = TypeVar("_Part", Augment, Mix)
INCEPTION = Augment(scale=(0.05, 1.0))  # the authors' random crop, and a flip
UNMIXED = Mix()
TEACHING = {"teacher_share": 0.9, "teacher_temperature": 4.0}  # with a teacher, unless the user says otherwise
LONGEST_WARMUP = 1 / 3  # of a run


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained. Derive a recipe by `dataclasses.replace(recipe, ...)`; `change` applies a user's options.

    Weight decay is decoupled (AdamW): each update subtracts lr x weight_decay x w from a kernel. It is relative to the
    learning rate, as in the authors' code, so the paper's 0.1 is 0.1 here. Coupled L2, where the decay is added to the
    gradient, cannot be expressed: SGD has no weight decay, as in Table 4.

    Args:
        source: where the numbers come from.
        ours: what is not from the source.
        expect: what the recipe is for, and the result to expect.
        models: the variants that it was published for; empty for any.
        config: the recipe's own model, trained when the user names none; None if the user has to name one.
        small_data: whether the recipe is meant for training from scratch on few images.
        objective: what is learnt, a row of `objectives.OBJECTIVES`.
        target: what masked-patch predicts, a row of `masked.TARGETS`.
        images: training images to use, a count or, below 1, a share: the same share of every class, chosen by the seed;
            a larger subset contains the smaller ones. None for all of them.
        image_size: in pixels; None for the model's own.
        eval_crop: share of the resized image's side that a new model's evaluation keeps, such as 224 / 256; None to
            resize both sides to the image size.
        epochs: passes over the data; give either this or `steps`.
        steps: optimizer steps; give either this or `epochs`.
        batch_size: images per step, over all processes and micro-batches.
        optimizer: a row of `optim.OPTIMIZERS`: `adamw`, `adam`, `sgd` or `muon`. Table 3 says Adam; the authors' code
            decays weights separately from the gradient, which is AdamW. `adam` adds the decay to the gradient instead.
            `muon` is Muon for the matrices of the blocks and AdamW for everything else, with one learning rate.
        lr: the base learning rate, at `batch_size`.
        lr_choices: learning rates that the publication chose from, on a held-out part of train (`vitkit sweep`).
        lr_rule: how lr follows another batch size: `fixed` (not at all), `linear` or `sqrt`.
        betas: AdamW's.
        momentum: SGD's and Muon's.
        weight_decay: weight decay of kernels; biases, norms, tokens and positions do not decay.
        decay: shape of the schedule after the warm-up: `linear`, `cosine` or `constant`.
        decay_from: where the decay's progress is counted from: the end of the `warmup`, as the paper's authors do, or
            the `start` of the run, as timm does.
        final_lr: learning rate at the end of the decay.
        warmup: steps of linear warm-up; a value below 1 is a share of the run.
        warmup_lr: learning rate that the warm-up starts from.
        clip: largest global norm of the gradient; None for no limit.
        ema: decay of the running (Polyak) average of the weights; None for no average.
        layer_decay: learning rate of each layer relative to the layer above it; None for equal rates.
        loss: `softmax` (one class per image) or `sigmoid` (each class independently).
        label_smoothing: share of each target that is spread over all classes; with several labels per image, each moves
            by this share towards 1/2.
        class_weights: `equal`, or `balanced`: in the loss an image counts in inverse proportion to the images of its
            class, as scikit-learn's `balanced` does. Evaluation is not weighted.
        sampling: `uniform` (each image once per epoch), or `balanced` (every class equally often; an epoch keeps its
            number of images).
        teacher: with the objective `distil`, weights whose answers are learnt too: anything that `vitkit.load` accepts.
        teacher_share: share of the teacher's answers in the loss, 0.9 if a teacher is given alone; the labels have the
            rest.
        teacher_temperature: what both models' logits are divided by before they are compared, 4 if a teacher is given
            alone.
        early_stop: validations in a row without a better one after which the run stops; None to train to the end.
        dropout: dropout rate after dense layers and position embeddings.
        drop_path: stochastic-depth rate of the last block; it grows linearly from 0 at the first.
        pre_logits: whether a new model's head has the paper's hidden layer.
        head_bias: initial bias of a new head; with several labels per image it starts from each label's frequency.
        freeze: patterns of the names of parameters that are not trained (`blocks.0.*`).
        from_probe: whether a pre-trained model's head starts from the probe, that is logistic regression on frozen
            features, instead of zeros.
        lora: rank of low-rank adapters on qkv and the MLP of every block; only they and the head are trained. None to
            train all parameters.
        val: share of train that is held out if the data set has no validation part.
        augment: the augmentation of single images.
        augment_on: where they are augmented: `cpu`, or, for images of one size in memory, the `device` that trains; its
            random numbers are others, and its pixels are rounded differently.
        mix: MixUp and CutMix.
    """

    source: str
    ours: str = ""
    expect: str = ""
    models: tuple[str, ...] = ()
    config: ViTConfig | None = None
    small_data: bool = False
    objective: Objective = "classify"
    target: Target = "mean"
    images: float | None = None
    image_size: int | None = None
    eval_crop: float | None = None
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
    decay_from: DecayFrom = "warmup"
    final_lr: float = 0.0
    warmup: float = 0
    warmup_lr: float = 0.0
    clip: float | None = None
    ema: float | None = None
    layer_decay: float | None = None
    loss: Loss = "softmax"
    label_smoothing: float = 0.0
    class_weights: ClassWeights = "equal"
    sampling: Sampling = "uniform"
    teacher: str | None = None
    teacher_share: float | None = None
    teacher_temperature: float | None = None
    early_stop: int | None = None
    dropout: float = 0.0
    drop_path: float = 0.0
    pre_logits: bool = False
    head_bias: float = 0.0
    freeze: tuple[str, ...] = ()
    from_probe: bool = False
    lora: int | None = None
    val: float = 0.1
    augment: Augment = INCEPTION
    augment_on: AugmentOn = "cpu"
    mix: Mix = UNMIXED

    def __post_init__(self) -> None:
        if isinstance(self.augment, Mapping):
            object.__setattr__(self, "augment", _changed(Augment(), "augment", self.augment))
        if isinstance(self.mix, Mapping):
            object.__setattr__(self, "mix", _changed(Mix(), "mix", self.mix))
        if isinstance(self.config, Mapping):
            object.__setattr__(self, "config", ViTConfig.from_dict(self.config))
        for name in ("models", "lr_choices", "betas", "freeze"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(f"A recipe needs either epochs or steps; got epochs={self.epochs}, steps={self.steps}.")
        checks.number("epochs", self.epochs if self.epochs is not None else 1, 0, open_low=True)
        checks.whole("steps", self.steps if self.steps is not None else 1, 1)
        checks.whole("batch_size", self.batch_size, 1)
        checks.whole("lora", self.lora if self.lora is not None else 1, 1)
        checks.number("lr", self.lr, 0, open_low=True)
        for name in ("weight_decay", "final_lr", "warmup", "warmup_lr"):
            checks.number(name, getattr(self, name), 0)
        for name in ("label_smoothing", "dropout", "drop_path", "momentum", "val"):
            checks.number(name, getattr(self, name), 0, 1, open_high=name in ("dropout", "drop_path"))
        for name in ("clip", "layer_decay", "ema", "eval_crop"):
            if getattr(self, name) is not None:
                high = math.inf if name == "clip" else 1
                checks.number(name, getattr(self, name), 0, high, open_low=True, open_high=name == "ema")
        checks.one_of("optimizer", self.optimizer, Optimizer)
        checks.one_of("decay", self.decay, Decay)
        checks.one_of("decay_from", self.decay_from, DecayFrom)
        checks.one_of("loss", self.loss, Loss)
        checks.one_of("objective", self.objective, Objective)
        checks.one_of("target", self.target, Target)
        checks.one_of("lr_rule", self.lr_rule, LRRule)
        checks.one_of("class_weights", self.class_weights, ClassWeights)
        checks.one_of("sampling", self.sampling, Sampling)
        checks.one_of("augment_on", self.augment_on, AugmentOn)
        for name, usual in TEACHING.items():
            if self.teacher is None and getattr(self, name) is not None:
                raise ConfigError(f"{name} is for a run with a teacher; got none. Give --teacher, or leave it out.")
            if self.teacher is not None and getattr(self, name) is None:
                object.__setattr__(self, name, usual)
        if self.teacher is not None:
            checks.number("teacher_share", self.teacher_share, 0, 1, open_low=True)
            checks.number("teacher_temperature", self.teacher_temperature, 0, open_low=True)
        if (self.objective == "distil") != (self.teacher is not None):
            raise ConfigError(
                f"The objective distil needs a teacher, and no other has one; got objective={self.objective!r} and "
                f"teacher={self.teacher!r}."
            )
        if self.teacher is not None and self.loss != "softmax":
            raise ConfigError(
                f"A teacher's answers are probabilities over all classes; got loss={self.loss!r}. Use --loss softmax."
            )
        if self.early_stop is not None:
            checks.whole("early_stop", self.early_stop, 1)
        if self.class_weights == self.sampling == "balanced":
            raise ConfigError(
                "Expected class_weights='balanced' or sampling='balanced'; got both, which would balance the classes "
                "twice. Leave one out."
            )
        if self.val == 1:
            raise ConfigError("val must be below 1, to leave something to train on; got 1.")
        if self.optimizer == "sgd" and self.weight_decay:
            raise ConfigError(
                f"SGD needs weight_decay=0, because its weight decay is not decoupled as the paper's is; got "
                f"{self.weight_decay:g}. Set it to 0, or use optimizer='adamw'."
            )
        if self.images is not None:
            checks.number("images", self.images, 0, open_low=True)
            if self.images >= 1 and self.images != int(self.images):
                raise ConfigError(f"images must be a whole number of images or a share below 1; got {self.images!r}.")
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ConfigError(f"warmup must be a whole number of steps or a share below 1; got {self.warmup!r}.")
        if self.final_lr > self.lr:
            raise ConfigError(
                f"final_lr must not exceed lr; got {self.final_lr:g} for final_lr and {self.lr:g} for lr (with lr_rule "
                f"{self.lr_rule!r}). Give --final-lr, such as 0, or a higher --lr."
            )

    def change(self, **given: Any) -> Recipe:
        """Return the recipe with a user's changes. Values of None are ignored.

        `epochs` replaces `steps` and vice versa. A new batch size scales lr by `lr_rule`, unless lr is given too.

        Args:
            given: fields of Recipe.
        """
        known = [f.name for f in fields(self)]
        changes = {name: value for name, value in given.items() if value is not None}
        for name in changes:
            if name not in known:
                raise ConfigError(f"A recipe has no field {name!r}{nearest(name, known) or '.'}")
        for name in {"augment", "mix"} & set(changes):
            if isinstance(changes[name], Mapping):
                changes[name] = _changed(getattr(self, name), name, changes[name])
        if changes.get("teacher") is not None:
            changes["teacher"] = str(changes["teacher"])
            if self.objective == "classify":
                changes.setdefault("objective", "distil")
        if "epochs" in changes and "steps" in changes:
            raise ConfigError("Expected either epochs or steps; got both. Leave one out.")
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
        """Return the number of steps of a run.

        Args:
            images: size of the training part.
        """
        if self.steps is not None:
            return self.steps
        return max(1, -(-round((self.epochs or 0) * images) // self.batch_size))

    def warmup_steps(self, total: int) -> int:
        """Return the number of warm-up steps.

        Args:
            total: steps of the run.

        Raises:
            ConfigError: the warm-up would take more than a third of the run.
        """
        wanted = round(self.warmup * total) if self.warmup < 1 else int(self.warmup)
        if wanted > total * LONGEST_WARMUP:
            most = int(total * LONGEST_WARMUP)
            fits = f"--warmup {most // 3} (or at most {most})," if most else "--warmup 0"
            raise ConfigError(
                f"The warm-up must take at most a third of the run; got {wanted:,} of {total:,} "
                f"step{'s' * (total != 1)}. Use {fits} or train longer."
            )
        return wanted

    def lr_at(self, step: int, total: int) -> float:
        """Return the learning rate of one update; `formula` says the same in words.

        Args:
            step: t, the number of updates already done; 0 for the first.
            total: T, steps of the run.
        """
        warmup = self.warmup_steps(total)
        if step < warmup:
            return self.warmup_lr + (self.lr - self.warmup_lr) * step / warmup
        start = warmup if self.decay_from == "warmup" else 0
        progress = min((step - start) / (total - start), 1.0)
        return self.final_lr + (self.lr - self.final_lr) * DECAYS[self.decay](progress)

    @property
    def formula(self) -> str:
        """The learning rate as a formula of t (updates done), T (updates of the run) and w (warm-up)."""
        if self.decay == "constant":
            after = f"{self.lr:g}"
        else:
            shape = {"linear": "(1 - p)", "cosine": "(1 + cos(pi p)) / 2"}[self.decay]
            p = "(t - w) / (T - w)" if self.decay_from == "warmup" else "t / T"
            after = f"{_between(self.final_lr, self.lr)} {shape}, p = {p}"
        return f"{_between(self.warmup_lr, self.lr)} t / w while t < w, then {after}" if self.warmup else after

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["config"] = self.config.to_dict() if self.config else None
        values["augment"], values["mix"] = dataclasses.asdict(self.augment), dataclasses.asdict(self.mix)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Create a recipe from the result of `to_dict`; fields that are missing have their defaults.

        Raises:
            ConfigError: there is no such field.
        """
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(f"A recipe has no field {name!r}{nearest(name, known) or '.'}")
        if missing := [f.name for f in fields(cls) if f.default is dataclasses.MISSING and f.name not in values]:
            raise ConfigError(f"A recipe needs {', '.join(missing)}; got none.")
        for name, value in values.items():
            usual = getattr(cls, name, None)
            if value is not None and any(isinstance(usual, kind) != isinstance(value, kind) for kind in _kinds(usual)):
                raise ConfigError(f"The {name} of a recipe is like {usual!r}; got {value!r}.")
        return cls(**values)


def _kinds(usual: Any) -> tuple[Any, ...]:
    """Return the kinds of values that tell a number, a word and yes or no apart, if `usual` is one of these."""
    return (bool, int | float, str) if isinstance(usual, bool | int | float | str) else ()


def _changed(part: _Part, name: str, values: Mapping[str, Any]) -> _Part:
    """Return an Augment or a Mix with other values."""
    known = [f.name for f in fields(part)]
    if odd := next((key for key in values if key not in known), None):
        raise ConfigError(f"{name} has no field {odd!r}{nearest(odd, known) or '.'}")
    return dataclasses.replace(part, **values)


def _between(low: float, high: float) -> str:
    return f"{low:g} + ({high:g} - {low:g})" if low else f"{high:g}"
