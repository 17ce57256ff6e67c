"""The gradients of one update, computed a micro-batch at a time; with `auto`, as many images as memory allows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.data.batch import Batch
from vitkit.data.order import share
from vitkit.model.config import InputSpec
from vitkit.runtime import Runtime, out_of_memory
from vitkit.training.memory import images_that_fit
from vitkit.training.objectives import Objective
from vitkit.training.settings import AUTO, BatchSplit, Settings


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of the generator of dropout and stochastic depth for one step.

    Args:
        seed: the run's seed.
        step: the step, from 0.
        rank: the process's rank.
    """
    return int(np.random.SeedSequence([seed, 5, step, rank, 4]).generate_state(1, np.uint64)[0] >> np.uint64(1))


class Gradients:
    """Computes the gradients of a batch into the parameters.

    Args:
        model: the module to train, as the runtime prepared it.
        objective: what is learnt.
        optimizer: clears the gradients.
        split: how a batch is divided; `auto` starts with it.
        settings: seed and micro-batch.
        runtime: device, precision and processes.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        split: BatchSplit,
        settings: Settings,
        runtime: Runtime,
    ) -> None:
        self.model, self.objective, self.optimizer = model, objective, optimizer
        self.split, self.settings, self.runtime = split, settings, runtime
        # Processes average their gradients, so a loss divided by this becomes the mean over all images of the batch,
        # however many of them each process has.
        self.mean_share = objective.recipe.batch_size / runtime.ranks
        self.ordered = runtime.ranks == 1  # whether the order in which processes add up their gradients is final
        self.auto = settings.micro_batch == AUTO
        self.found = 0  # the micro-batch that `auto` had to find; 0 while the whole batch fits
        self.note: Callable[[str], None] = lambda text: None

    def begin(self, learner: nn.Module, spec: InputSpec, found: int) -> None:
        """With `auto`, start with what was found before the run was resumed or, on the CPU, with what memory allows.

        Args:
            learner: the module whose parameters are trained.
            spec: the input that the model expects.
            found: `found` when the run was saved.
        """
        if not self.auto:
            return
        if found:
            self.split, self.found = self.split.at_most(found), found
        elif self.runtime.device.type == "cpu":
            fits = images_that_fit(self.objective, learner.train(), spec, self.runtime)
            if fits is not None and fits < self.split.micro:
                self._take(fits, f"There is memory for about {fits:,} images at once")

    def __call__(self, step: int, batch: Batch) -> Tensor:
        """Compute the gradients of one step; return the sums of losses and of correct answers, [2].

        With `auto`, a step for which no memory is left is computed again with half as many images at a time.

        Args:
            step: the step, from 0.
            batch: the images of this process.
        """
        if not self.ordered:
            # DDP chooses the order in its first backward pass and uses it from the second on. A resumed run must not
            # round otherwise than an uninterrupted one, so the first pass is for nothing.
            self._accumulate(step, batch)
            self.ordered = True
        while True:
            try:
                return self._accumulate(step, batch)
            except Exception as error:
                if not self.auto or self.split.micro == 1 or not out_of_memory(error):
                    raise
            # Here the error is gone, and with it the memory that its traceback held.
            self.optimizer.zero_grad(set_to_none=True)
            self._take(self.split.micro // 2, f"No memory was left at step {step:,}")

    def seed(self, step: int) -> None:
        """Seed the generator of dropout and stochastic depth for one step."""
        torch.manual_seed(step_seed(self.settings.seed, step, self.runtime.rank))

    def _accumulate(self, step: int, batch: Batch) -> Tensor:
        self.seed(step)
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(2, device=self.runtime.device)
        for i in range(self.split.count):
            rows = share(len(batch), i, self.split.count)
            # Every process computes as many micro-batches: one without an image for this one repeats one, uncounted.
            counted = rows.stop > rows.start
            part = _part(batch, rows if counted else slice(0, 1))
            last = i == self.split.count - 1
            with nullcontext() if last else self.runtime.no_sync(self.model):
                loss, correct = self.objective.loss(self.model, part, step, self.runtime)
                self.runtime.backward(loss * counted / self.mean_share)
            sums += torch.stack([loss.detach(), correct]) * counted
        return sums

    def _take(self, images: int, why: str) -> None:
        """Compute at most so many images at a time from now on, and say so."""
        self.split = self.split.at_most(images)
        self.found = self.split.micro
        self.runtime.free_memory()
        recipe = self.objective.recipe
        self.note(
            f"{why}: the {self.split.process} images of an update are now computed {self.split.micro} at a time. "
            + (
                "The random numbers of dropout change with that."
                if recipe.dropout or recipe.drop_path
                else "The result is the same, up to rounding."
            )
        )


def _part(batch: Batch, rows: slice) -> Batch:
    if rows == slice(0, len(batch)):
        return batch
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    return replace(batch, **{name: value[rows] for name, value in fields.items() if value is not None})
