"""OBJECTIVES: what a run learns. The loop knows none of them by name; a recipe chooses one.

An objective turns a batch into a loss and judges weights on the validation part. It may add parameters of its own
around the model; these are trained and saved with the run's state, while the run's checkpoints hold the model.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data.base import Source
from vitkit.data.batch import Batch
from vitkit.data.eval_loader import EvalLoader
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.labels import best_thresholds, cross_entropy, mean_average_precision, sigmoid
from vitkit.evaluation.logits import logits_of
from vitkit.evaluation.measure import answers
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import evaluating
from vitkit.model.create import need_vit
from vitkit.runtime import Runtime
from vitkit.training.class_weights import balanced, weigh
from vitkit.training.loss import LOSSES
from vitkit.training.masked import TARGETS, VALIDATION, MaskedPatches, check, keys_of
from vitkit.training.recipe import Recipe
from vitkit.training.teacher import Teacher


class Objective(ABC):
    """What a run learns.

    Args:
        recipe: the run's recipe.
        seed: the run's seed.
        train: the training part.
    """

    labels = True  # whether the images need labels
    fused = True  # whether the model's fused training forward can be used
    judge = "top1"  # what the best weights have: the highest of this on the validation part, or the lowest `loss`

    def __init__(self, recipe: Recipe, seed: int, train: Source) -> None:
        self.recipe, self.seed = recipe, seed

    def check(self, model: Backbone) -> None:
        """Refuse a recipe or a model that this objective cannot train; raises ConfigError."""
        return

    def identity(self) -> dict[str, str]:
        """Return what a resumed run must agree in, besides the recipe, the model and the data."""
        return {}

    @classmethod
    def head_bias(cls, recipe: Recipe, train: Source) -> float | list[float]:
        """Return the initial bias of a new head: one for all outputs, or one for each."""
        return recipe.head_bias

    def learner(self, model: Backbone) -> nn.Module:
        """Return the module whose parameters are trained: the model, or a module that has it as `vit`.

        Args:
            model: the model, on its device.
        """
        return model

    def beside(self, learner: nn.Module) -> dict[str, Tensor]:
        """Return the learner's tensors that checkpoints keep beside the model's.

        Args:
            learner: the result of `learner`.
        """
        return {name: p for name, p in learner.state_dict().items() if not name.startswith("vit.")}

    @property
    def counts(self) -> bool:
        """Whether there are answers that are right or wrong, and so an accuracy."""
        return True

    @property
    def capturable(self) -> bool:
        """Whether `loss` can be part of a CUDA graph: it does the same work in every step, and all of it there."""
        return False

    @abstractmethod
    def loss(self, forward: nn.Module, batch: Batch, step: int, runtime: Runtime) -> tuple[Tensor, Tensor]:
        """Return the loss in fp32 and the number of correct answers, both summed over the images.

        Args:
            forward: the learner, or a faster or distributed form of it.
            batch: the images.
            step: the step, from 0.
            runtime: sets the precision.
        """

    @abstractmethod
    def validate(self, learner: nn.Module, source: Source, runtime: Runtime, **how: Any) -> dict[str, Any]:
        """Return the metrics of the learner's present weights: `loss`, `images`, and what `judge` names.

        `thresholds`, if there are any, are kept with the weights, see InputSpec.

        Args:
            learner: the result of `learner`.
            source: the validation part.
            runtime: processes, device and precision.
            how: `batch_size`, `workers` and `bad_images`.
        """


class Classify(Objective):
    """Name the class of each image: the paper's supervised training."""

    def __init__(self, recipe: Recipe, seed: int, train: Source) -> None:
        super().__init__(recipe, seed, train)
        self.weights = balanced(list(train.counts().values())) if recipe.class_weights == "balanced" else None

    def beside(self, learner: nn.Module) -> dict[str, Tensor]:
        """See Objective."""
        return {}

    @property
    def capturable(self) -> bool:
        """See Objective; class weights come from the host."""
        return self.weights is None

    def loss(self, forward: nn.Module, batch: Batch, step: int, runtime: Runtime) -> tuple[Tensor, Tensor]:
        """See Objective; a mixed image counts as its larger part."""
        with runtime.autocast():
            logits = forward(batch.pixels)
        logits = logits.float()
        recipe = self.recipe
        weighed, factor = (batch, None) if self.weights is None else weigh(batch, self.weights)
        loss = LOSSES[recipe.loss](logits, weighed, recipe.label_smoothing, bool(recipe.mix))
        loss = self.taught(loss, logits, batch, runtime)
        loss = (loss if factor is None else loss * factor).sum()
        with torch.no_grad():
            truth = torch.where(batch.weight >= 0.5, batch.labels, batch.others)
            return loss, (logits.argmax(1) == truth).sum().float()

    def taught(self, loss: Tensor, logits: Tensor, batch: Batch, runtime: Runtime) -> Tensor:
        """Return the loss of each image, [B], with whatever is learnt besides the labels: here nothing.

        Args:
            loss: [B], against the labels.
            logits: [B, K] in fp32.
            batch: the images.
            runtime: sets the precision.
        """
        return loss

    def validate(self, learner: nn.Module, source: Source, runtime: Runtime, **how: Any) -> dict[str, Any]:
        """See Objective."""
        assert isinstance(learner, Backbone)
        outputs = logits_of(learner, source, runtime=runtime, **how)
        _, rank, _, truth = answers(outputs.logits, outputs.labels)
        return {
            "loss": float(-truth.mean()),
            "top1": float((rank == 0).mean()),
            "top5": float((rank < 5).mean()),
            "images": len(outputs),
        }


class SeveralLabels(Classify):
    """Say of each label whether the image has it: sigmoid outputs, judged by mAP."""

    judge = "mean_ap"

    @classmethod
    def head_bias(cls, recipe: Recipe, train: Source) -> list[float]:
        """See Objective; the log-odds of each label, so that a head of zero weights starts with its frequency."""
        return [math.log((n + 0.5) / (len(train) - n + 0.5)) for n in train.counts().values()]

    @property
    def counts(self) -> bool:
        """See Objective; an image is not right or wrong as a whole."""
        return False

    def loss(self, forward: nn.Module, batch: Batch, step: int, runtime: Runtime) -> tuple[Tensor, Tensor]:
        """See Objective."""
        with runtime.autocast():
            logits = forward(batch.pixels)
        loss = LOSSES["sigmoid"](logits.float(), batch, self.recipe.label_smoothing, bool(self.recipe.mix)).sum()
        return loss, torch.zeros((), device=loss.device)

    def validate(self, learner: nn.Module, source: Source, runtime: Runtime, **how: Any) -> dict[str, Any]:
        """See Objective; the thresholds are those with the highest F1 of each label."""
        assert isinstance(learner, Backbone)
        outputs = logits_of(learner, source, runtime=runtime, **how)
        p = sigmoid(outputs.logits)
        return {
            "loss": cross_entropy(outputs.logits, outputs.labels),
            "mean_ap": mean_average_precision(p, outputs.labels),
            "images": len(outputs),
            "thresholds": list(best_thresholds(p, outputs.labels)),
        }


class MaskedPatch(Objective):
    """Predict what hidden patches show (B.1.2): needs no labels."""

    labels, fused, judge = False, False, "loss"

    def check(self, model: Backbone) -> None:
        """See Objective."""
        check(need_vit(model, "Masked patch prediction").config, self.recipe.target)
        if self.recipe.mix:
            raise ConfigError("Masked patch prediction needs whole images; use a recipe without MixUp and CutMix.")

    def learner(self, model: Backbone) -> MaskedPatches:
        """See Objective."""
        return MaskedPatches(need_vit(model, "Masked patch prediction"), self.recipe.target)

    @property
    def counts(self) -> bool:
        """See Objective; a regression has no right answers."""
        return TARGETS[self.recipe.target].side is not None

    def loss(self, forward: nn.Module, batch: Batch, step: int, runtime: Runtime) -> tuple[Tensor, Tensor]:
        """See Objective; an image's answers count as the share of its colours that are right."""
        with runtime.autocast():
            loss, right = forward(batch.pixels, keys_of(self.seed, step, batch.index))
        return loss.sum(), right.sum()

    def validate(self, learner: nn.Module, source: Source, runtime: Runtime, **how: Any) -> dict[str, Any]:
        """See Objective; the masks are the same at every validation."""
        assert isinstance(learner, MaskedPatches)
        place: dict[str, Any] = {"rank": runtime.rank, "ranks": runtime.ranks, "device": runtime.device}
        loader = EvalLoader(source, learner.vit.input_spec, **place, **how)
        sums = torch.zeros(3, dtype=torch.float64)  # loss, right colours, images
        for batch in loader:
            with evaluating(learner), runtime.autocast():
                keys = keys_of(self.seed, VALIDATION, batch.index.to(runtime.device))
                loss, right = learner(batch.pixels, keys)
            sums += torch.tensor([float(loss.double().sum()), float(right.double().sum()), len(batch)])
        totals = [sum(part[i] for part in runtime.gather(sums.tolist())) for i in range(3)]
        if not totals[2]:
            raise DataError("Expected at least one readable image to validate on; got none.")
        accuracy = {"top1": totals[1] / totals[2]} if self.counts else {}
        return {"loss": totals[0] / totals[2], **accuracy, "images": int(totals[2])}


class Distil(Classify):
    """Learn a teacher's answers besides the labels: distillation of logits (arXiv 1503.02531).

    The loss of an image is (1 - s) L(labels) + s T^2 KL(p_T || q_T), with p_T and q_T the teacher's and the student's
    probabilities at temperature T and s the teacher's share. The teacher is frozen and sees the student's view of each
    image, augmented and mixed as it is.
    """

    def __init__(self, recipe: Recipe, seed: int, train: Source) -> None:
        super().__init__(recipe, seed, train)
        assert recipe.teacher is not None  # `Recipe` has checked it
        self.teacher = Teacher(recipe.teacher, train.class_names)

    @property
    def capturable(self) -> bool:
        """See Objective; a teacher may be a model that cannot be captured."""
        return False

    def check(self, model: Backbone) -> None:
        """See Objective."""
        self.teacher.check(model.input_spec)

    def identity(self) -> dict[str, str]:
        """See Objective."""
        return {"teacher": self.teacher.checksum}

    def learner(self, model: Backbone) -> nn.Module:
        """See Objective; also takes the teacher to the model's device."""
        self.teacher.follow(model)
        return model

    def taught(self, loss: Tensor, logits: Tensor, batch: Batch, runtime: Runtime) -> Tensor:
        """See Classify."""
        T, share = self.recipe.teacher_temperature, self.recipe.teacher_share
        assert T is not None  # `Recipe` has set both
        assert share is not None
        with torch.no_grad(), runtime.autocast():
            answers = self.teacher(batch.pixels)
        p, q = (x.float().div(T).log_softmax(1) for x in (answers, logits))
        return (1 - share) * loss + share * T**2 * F.kl_div(q, p, reduction="none", log_target=True).sum(1)


OBJECTIVES: dict[str, type[Objective]] = {
    "classify": Classify,
    "several-labels": SeveralLabels,
    "masked-patch": MaskedPatch,
    "distil": Distil,
}


def for_data(recipe: Recipe, train: Source) -> Recipe:
    """Return the recipe for a data set: one that classifies learns several labels per image where the data has them.

    Args:
        recipe: the recipe.
        train: the training part.
    """
    if recipe.objective == "several-labels" and not train.several:
        raise ConfigError(
            "The objective several-labels needs several labels per image: a table with a column 'labels', or with one "
            "column of 0 and 1 per label. This data has one class per image; use the objective classify."
        )
    if recipe.objective == "distil" and train.several:
        raise ConfigError("--teacher needs one class per image; this data has several labels. Leave it out.")
    if recipe.objective != "classify" or not train.several:
        return recipe
    return dataclasses.replace(recipe, objective="several-labels", loss="sigmoid")
