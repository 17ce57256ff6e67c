"""When a run logs, validates and saves: functions of the number of updates that are done."""

from __future__ import annotations

import math

from vitkit.training.recipe import Recipe
from vitkit.training.settings import Settings

MOST_VALIDATIONS = 50  # per run, unless the user says how often; a longer run skips whole epochs


class Calendar:
    """The dates of a run.

    Args:
        recipe: sets the length of the run and the batch size.
        settings: set how often to log, to validate and to save.
        images: images of the training part.
    """

    def __init__(self, recipe: Recipe, settings: Settings, images: int) -> None:
        self.recipe, self.settings, self.images = recipe, settings, images
        self.total = recipe.total(images)
        self.epochs_between = math.ceil(self.epochs(self.total) / MOST_VALIDATIONS)  # of validations

    def logs(self, step: int) -> bool:
        """Whether a line of training metrics is written after so many updates."""
        return step % self.settings.log_every == 0 or step == self.total

    def validates(self, step: int) -> bool:
        """Whether an epoch ends with this update (in a long run, a group of epochs), or the user asked for it."""
        if every := self.settings.evaluate_every:
            return step == self.total or step % every == 0
        batch, group = self.recipe.batch_size, self.images * self.epochs_between
        return step == self.total or step * batch // group > (step - 1) * batch // group

    def saves(self, step: int) -> bool:
        """Whether the run is saved after so many updates, even without a new best."""
        every = self.settings.save_every
        return step == self.total or (step % every == 0 if every else self.validates(step))

    def is_due(self, step: int) -> bool:
        """Whether the weights or the sums after so many updates are needed, to log, to validate or to save."""
        return self.logs(step) or self.validates(step) or self.saves(step)

    def epochs(self, step: int) -> float:
        """Passes over the training data after so many updates."""
        return round(step * self.recipe.batch_size / self.images, 3)

    def finished(self, step: int) -> float:
        """Epochs that are finished after so many updates, for people: the last one may reach into the next epoch."""
        exact = self.epochs(step)
        if step == self.total:
            return self.recipe.epochs or float(f"{exact:.{1 if exact < 1 else 4}g}")
        return math.floor(10 * exact) / 10 if self.settings.evaluate_every else math.floor(exact)
