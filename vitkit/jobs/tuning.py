"""Choose a classifier by cross-validation on the training images within a time limit; jobs/tune.py makes it a run.

The probe comes first, because it always fits in the time. Each recipe of CANDIDATES then starts from the probe and is
trained once per fold. It replaces the probe only if its paired gain on held-out images exceeds its standard error
as many times as `needed` says.

Legend: n training images, F values per feature, K classes.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from vitkit.data.base import Source, Subset
from vitkit.errors import Diverged, OutOfMemory
from vitkit.evaluation.logits import logits_of
from vitkit.features import logistic
from vitkit.features.filled import Embedded
from vitkit.features.head import Head, Standard, attach
from vitkit.features.probe import FACTORS, Options, fit
from vitkit.jobs.train import Prepared, train_into
from vitkit.model.backbone import Backbone
from vitkit.model.vit import ViT
from vitkit.runtime import Runtime
from vitkit.training.lora import adapt
from vitkit.training.objectives import OBJECTIVES
from vitkit.training.recipe import Recipe
from vitkit.training.recipes import RECIPES
from vitkit.training.run_folder import RunFolder
from vitkit.training.settings import Settings
from vitkit.types import Array

CANDIDATES = ("from-probe", "from-probe-long", "from-probe-lora")  # recipes, in the order in which they are tried
FOLDS = 3
LEAST = 2  # folds that a candidate is judged by, at least
FEW = 50  # mean number of images per class, below which adapters are tried first
UNEQUAL = 3.0  # largest class / smallest class, from which on every class counts the same
TRIAL = 6  # steps after which the time of a candidate is estimated

Say = Callable[[str], None]
Event = dict[str, Any]


class NotEnoughTime(BaseException):
    """Ends a training that would take too long. Not an Exception, because the loop would save the run for later."""


@dataclass(frozen=True)
class Tried:
    """A classifier that was considered.

    Args:
        name: `probe`, `probe-balanced`, or a recipe of CANDIDATES.
        verdict: why it was chosen or not, in words.
        accuracy: its cross-validated accuracy on the training images; None if it was not measured.
        gain: its paired difference to the probe; None for the probe itself.
        error: standard error of `gain`.
        images: held-out images that it was measured on.
        folds: folds that it was measured on.
        seconds: time taken, the final training excepted.
        chosen: whether it was chosen.
    """

    name: str
    verdict: str
    accuracy: float | None = None
    gain: float | None = None
    error: float | None = None
    images: int = 0
    folds: int = 0
    seconds: float = 0.0
    chosen: bool = False


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Args:
        model: the chosen classifier, fitted to all training images, with calibrated confidence.
        name: what was chosen, a name of `tried`.
        tried: everything that was considered, in order.
        judge: what was compared: `accuracy` or `balanced accuracy`.
        flip: whether images were mirrored at random in training.
        strength: C of the probe.
        factor: what the logits were multiplied with to calibrate them.
        nll: mean negative log-likelihood of held-out images before and after that; None without cross-validation.
        metrics: lines of the final training's metrics.
        seconds: time of the final training.
    """

    model: Backbone
    name: str
    tried: tuple[Tried, ...]
    judge: str
    flip: bool
    strength: float
    factor: float
    nll: tuple[float, float] | None
    metrics: tuple[Event, ...]
    seconds: float


class Mirrored(Source):
    """The images of a source, mirrored left to right.

    Args:
        source: the images.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source.labels, source.class_names, source.names)
        self.source, self.in_memory = source, source.in_memory

    def raw(self, i: int) -> Image.Image:
        """See Source."""
        return ImageOps.mirror(self.source.read(i)[0])


@dataclass
class Search:
    """A search for the best classifier of some images.

    Args:
        model: the backbone, on its device.
        source: the n training images; all of them can be read.
        features: their features, in the same order.
        mirrored: the features of the mirrored images, [n, F].
        deadline: when everything should be done, on the clock of time.perf_counter.
        runtime: device and precision.
        settings: seed, workers and so on of the trainings.
        candidates: recipes to try (default: CANDIDATES).
        folds: folds of the cross-validation (default: FOLDS).
        say: called with a sentence at every stage.
    """

    model: Backbone
    source: Source
    features: Embedded
    mirrored: Array
    deadline: float
    runtime: Runtime
    settings: Settings
    candidates: Sequence[str] = CANDIDATES
    folds: int = FOLDS
    say: Say = print

    def __post_init__(self) -> None:
        self.X, self.y, self.names = self.features.features, self.features.labels, self.source.class_names
        counts = np.bincount(self.y, minlength=len(self.names))
        self.least, self.few = int(counts.min()), counts.mean() < FEW
        self.unequal = counts.max() >= UNEQUAL * counts.min()
        share = len(self.y) / (len(counts) * counts[self.y])  # makes every class count the same
        self.weight: Array = share if self.unequal else np.ones(len(self.y))
        self.tried: list[Tried] = []
        self.needed = 1.0  # standard errors by which the best candidate must beat the probe
        self.final = 0.0  # seconds that the final training of the best candidate so far would take

    def __call__(self) -> Found:
        """Search, and fit the best classifier to all training images."""
        began = time.perf_counter()
        options = Options(seed=self.settings.seed, strength=None if self.least > 1 else 1.0)
        fitted = fit("logistic", self.X, self.y, self.names, options)
        strength, head = fitted.chosen["C"], fitted.head
        if self.least < 2:
            self.tried.append(Tried("probe", "The only choice: a class has one image, so nothing can be compared."))
            return self._done("probe", head, strength, flip=True, held=None)
        self.parts = list(logistic.folds(self.y, min(self.folds, self.least), self.settings.seed))
        held = {"probe": self._probe(strength, "probe", began)}
        best, flip = "probe", self._mirrors()
        if self.unequal:
            began = time.perf_counter()
            held["probe-balanced"] = self._probe(strength, "probe-balanced", began, held["probe"])
        for name in sorted(self.candidates, key=lambda name: self.few and RECIPES[name].lora is None):
            found = self._candidate(name, RECIPES[name], held["probe"], flip)
            if found is not None:
                held[name] = found
        self.needed = needed(sum(row.gain is not None for row in self.tried))
        if better := [row for row in self.tried if self._better(row)]:
            best = max(better, key=lambda row: row.gain or 0.0).name
        self.tried = [self._judged(row, best) for row in self.tried]
        if self.unequal and best != "probe":
            head = self._head(np.arange(len(self.y)), strength, balanced=True)
        return self._done(best, head, strength, flip, held[best])

    def _head(self, inside: Array, strength: float, balanced: bool = False) -> Head:
        scale = Standard.of(self.X[inside])
        with logistic.few_threads(self.X):
            found, _ = logistic.logistic(scale(self.X[inside]), self.y[inside], strength, balanced=balanced)
        return found.over(scale)

    def _probe(self, strength: float, name: str, began: float, probe: Array | None = None) -> Array:
        """Cross-validate a probe; return its held-out logits [n, K]."""
        heads = [self._head(inside, strength, balanced=name != "probe") for inside, _ in self.parts]
        logits = np.empty((len(self.y), len(self.names)), np.float64)
        for head, (_, outside) in zip(heads, self.parts, strict=True):
            logits[outside] = head.logits(self.X[outside])
        self.heads = heads  # candidates start from the last probe: the balanced one if classes are unequal
        self._measured(name, logits, probe, len(self.parts), time.perf_counter() - began)
        return logits

    def _mirrors(self) -> bool:
        """Return whether mirrored images keep their class, as far as the probe can tell."""
        right, other = np.empty(len(self.y)), np.empty(len(self.y))
        for head, (_, outside) in zip(self.heads, self.parts, strict=True):
            right[outside] = head.logits(self.X[outside]).argmax(1) == self.y[outside]
            other[outside] = head.logits(self.mirrored[outside]).argmax(1) == self.y[outside]
        loss, error = paired(right - other, self.weight)
        return loss <= 2 * error

    def _candidate(self, name: str, recipe: Recipe, probe: Array, flip: bool) -> Array | None:
        """Cross-validate a recipe as far as the time allows; return its held-out logits, NaN where it has none."""
        began = time.perf_counter()
        if recipe.lora and not isinstance(self.model, ViT):
            self.tried.append(Tried(name, "Not tried: adapters need a ViT."))
            return None
        recipe = self._adjusted(recipe, flip)
        logits, done = np.full(probe.shape, np.nan), 0
        last = final = 0.0  # seconds of the last fold, and of the final training
        try:
            for k, (inside, outside) in enumerate(self.parts):
                start_of_fold, steps = time.perf_counter(), recipe.total(len(inside))
                if k >= LEAST and start_of_fold + last + max(final, self.final) > self.deadline:
                    break
                self.say(f"{name}: fold {k + 1} of {len(self.parts)}, {steps} steps")
                watch = self._timer(recipe, steps) if k == 0 else None
                model, _ = self._trained(recipe, self.heads[k], Subset(self.source, inside), watch)
                out = logits_of(
                    model, Subset(self.source, outside), runtime=self.runtime, workers=self.settings.workers
                )
                logits[outside[out.index]] = out.logits
                last = time.perf_counter() - start_of_fold
                final, done = last * recipe.total(len(self.y)) / steps, k + 1
        except NotEnoughTime as error:
            self.tried.append(Tried(name, str(error), seconds=time.perf_counter() - began))
        except OutOfMemory:
            self.tried.append(Tried(name, "Needs more memory than there is.", seconds=time.perf_counter() - began))
        except Diverged:
            self.tried.append(Tried(name, "The loss became NaN or infinite.", seconds=time.perf_counter() - began))
        else:
            row = self._measured(name, logits, probe, done, time.perf_counter() - began)
            if row.gain is not None and row.error is not None and row.gain > row.error:
                self.final = max(self.final, final)
            return logits
        return None

    def _adjusted(self, recipe: Recipe, flip: bool) -> Recipe:
        """Return a recipe as the data asks for it."""
        augment = recipe.augment if flip else dataclasses.replace(recipe.augment, flip=0.0)
        batch = max(min(recipe.batch_size, len(self.y) // 2), 1)
        fitting = dataclasses.replace(recipe, augment=augment, batch_size=batch)
        return dataclasses.replace(fitting, class_weights="balanced") if self.unequal else fitting

    def _timer(self, recipe: Recipe, steps: int) -> Callable[[Event], None]:
        """Return a watch that ends a candidate's first training if LEAST folds and the final training cannot fit."""
        began = 0.0

        def watch(event: Event) -> None:
            nonlocal began
            if event["event"] == "step" and event["step"] == 1:  # the first step also starts workers and kernels
                began = time.perf_counter()
            elif event["event"] == "step" and event["step"] == min(TRIAL, steps) and steps > 1:
                now = time.perf_counter()
                each = (now - began) / (event["step"] - 1)
                needed = each * (LEAST * steps - event["step"] + recipe.total(len(self.y)))
                if now + needed + self.final > self.deadline:
                    left = max(self.deadline - now, 0.0)
                    raise NotEnoughTime(
                        f"Did not fit in the time: it would take about {needed / 60:.1f} min, and {left / 60:.1f} min "
                        f"were left."
                    )

        return watch

    def _trained(
        self, recipe: Recipe, head: Head, source: Source, watch: Callable[[Event], None] | None = None
    ) -> tuple[Backbone, tuple[Event, ...]]:
        """Train a copy of the backbone from a head; return it, and the lines of its metrics."""
        attached = attach(self.model, head, self.names, self.features.choice)
        model = copy.deepcopy(attached).requires_grad_(True)
        if recipe.lora is not None:
            adapt(model, recipe.lora, self.settings.seed)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            info = {"kind": "train", "same": {}}
            objective = OBJECTIVES[recipe.objective](recipe, self.settings.seed, source)
            how = (recipe, objective, self.settings, self.runtime)
            ready = Prepared(model, source, None, *how, info, (), out, False)
            run = RunFolder.create(out, info)
            if train_into(ready, run, watch).stopped:
                raise KeyboardInterrupt
            return ready.model.eval(), tuple(run.metrics())

    def _measured(self, name: str, logits: Array, probe: Array | None, folds: int, seconds: float) -> Tried:
        """Compare held-out logits with those of the probe, on the images that both have."""
        seen = np.isfinite(logits).all(1)
        right = (logits[seen].argmax(1) == self.y[seen]).astype(np.float64)
        weight = self.weight[seen]
        accuracy = float((weight * right).sum() / weight.sum())
        row = Tried(name, "", accuracy, None, None, int(seen.sum()), folds, seconds)
        if probe is not None:
            gain, error = paired(right - (probe[seen].argmax(1) == self.y[seen]), weight)
            row = dataclasses.replace(row, gain=gain, error=error)
        self.tried.append(row)
        self.say(f"{name}: {self.judge} {accuracy:.1%}" + ("" if row.gain is None else f", {_points(row)}"))
        return row

    @property
    def judge(self) -> str:
        """What classifiers are compared by."""
        return "balanced accuracy" if self.unequal else "accuracy"

    def _judged(self, row: Tried, best: str) -> Tried:
        """Say why a classifier was chosen or not."""
        if row.name == best:
            compared = any(other.gain is not None for other in self.tried)
            alone = f"Nothing else gained more than {self.bar}." if compared else "Nothing else was compared."
            words = alone if row.gain is None else f"{_points(row)}."
            return dataclasses.replace(row, verdict=f"Chosen. {words}", chosen=True)
        if row.verdict or row.accuracy is None:
            return row
        if row.gain is None:
            return dataclasses.replace(row, verdict="What everything else is compared with.")
        words = f"more than {self.bar}, but another gained more" if self._better(row) else f"not more than {self.bar}"
        return dataclasses.replace(row, verdict=f"{_points(row)}: {words}.")

    def _better(self, row: Tried) -> bool:
        return row.gain is not None and row.gain > self.needed * (row.error or 0.0)

    @property
    def bar(self) -> str:
        """The gain that replaces the probe, in words."""
        return "one standard error" if self.needed == 1.0 else f"{self.needed:.1f} standard errors"

    def _done(self, best: str, head: Head, strength: float, flip: bool, held: Array | None) -> Found:
        """Fit the chosen classifier to all images, and calibrate it by held-out logits."""
        began, metrics = time.perf_counter(), tuple[Event, ...]()
        factor, nll = calibration(held, self.y) if held is not None else (1.0, None)
        if best in RECIPES:
            recipe = self._adjusted(RECIPES[best], flip)
            self.say(f"{best}: all {len(self.y)} images, {recipe.total(len(self.y))} steps")
            model, metrics = self._trained(recipe, head, self.source)
        else:
            model = copy.deepcopy(attach(self.model, head, self.names, self.features.choice))
        with torch.no_grad():
            for parameter in model.head.parameters():
                parameter.mul_(factor)
        seconds = time.perf_counter() - began
        return Found(model, best, tuple(self.tried), self.judge, flip, strength, factor, nll, metrics, seconds)


def needed(candidates: int) -> float:
    """Return how many standard errors a gain over the probe must exceed, if this many candidates are compared with it.

    A candidate that is no better than the probe gains more than one standard error by luck in 16% of cases; one of
    three such candidates does in 40%. The number returned (1.0, 1.4, 1.6, ...) keeps that chance at 16%.

    Args:
        candidates: how many are compared with the probe.
    """
    normal = NormalDist()
    return normal.inv_cdf(normal.cdf(1.0) ** (1 / candidates)) if candidates > 1 else 1.0


def paired(difference: Array, weight: Array) -> tuple[float, float]:
    """Return the weighted mean of paired differences, and its standard error.

    Args:
        difference: [n], such as 1 where only the first answer is right and -1 where only the second is.
        weight: [n], what each image counts.
    """
    mean = float((weight * difference).sum() / weight.sum())
    return mean, float(np.sqrt(((weight * (difference - mean)) ** 2).sum()) / weight.sum())


def calibration(logits: Array, y: Array) -> tuple[float, tuple[float, float]]:
    """Return the factor of the logits that is best for held-out images, and their loss before and after it.

    Args:
        logits: [n, K] held-out logits; rows of NaN are left out.
        y: [n] classes.
    """
    seen = np.isfinite(logits).all(1)
    losses = {float(factor): logistic.nll(logits[seen] * factor, y[seen]) for factor in FACTORS}
    best = min(losses, key=lambda factor: losses[factor])
    return best, (logistic.nll(logits[seen], y[seen]), losses[best])


def _points(row: Tried) -> str:
    return f"{100 * (row.gain or 0.0):+.1f} points over the probe, standard error {100 * (row.error or 0.0):.1f}"
