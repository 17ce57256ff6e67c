"""What a run keeps on disk: its state, which it resumes from, and the checkpoints best, last and ema."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from vitkit.errors import UnreadableFile
from vitkit.model.backbone import Backbone
from vitkit.runtime import Runtime
from vitkit.training import shard, state
from vitkit.training.objectives import Objective
from vitkit.training.optim import Average
from vitkit.training.run_folder import RunFolder
from vitkit.training.state import TrainingState


class Saver:
    """Reads and writes what a run keeps.

    Args:
        run: the run folder.
        runtime: which processes write.
        model: the model that checkpoints hold.
        learner: the module that is trained: the model, or one around it.
        optimizer: its moments are part of the state.
        average: the running average of the weights, if any.
        objective: what is learnt.
    """

    def __init__(
        self,
        run: RunFolder,
        runtime: Runtime,
        model: Backbone,
        learner: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: Average | None,
        objective: Objective,
    ) -> None:
        self.run, self.runtime, self.model, self.learner = run, runtime, model, learner
        self.optimizer, self.average, self.objective = optimizer, average, objective

    def restore(self, note: Callable[[str], None]) -> TrainingState:
        """Restore the newest intact state, if any, and return how far the run has come.

        Damaged states are set aside. The checkpoints of that step are written again, because a kill may have come
        between the state and them.

        Args:
            note: tells the user.

        Raises:
            UnreadableFile: there are states, but all of them are damaged.
        """
        paths = self.runtime.on_main(self.run.states)
        damaged: list[tuple[Path, UnreadableFile]] = []
        progress = TrainingState()
        for path in paths:
            error = None
            try:
                progress = state.read(path, self.learner, self.optimizer, self.average)
            except UnreadableFile as found:
                error = found
            if (error := next(filter(None, self.runtime.gather(error)), None)) is None:
                break
            damaged.append((path, error))
        if paths and len(damaged) == len(paths):
            raise UnreadableFile(
                f"No state of {self.run.path} can be resumed from. {damaged[0][1]} Start another run with a new --out; "
                f"--from {self.run.path}@last uses the latest weights, if they can be read."
            )
        if progress.scaler:
            self.runtime.scaler.load_state_dict(progress.scaler)
        self.runtime.wait()
        if self.runtime.main:
            for path, error in damaged:
                with self.run.writing():
                    os.replace(path, path.with_name(path.name + ".damaged"))
                note(f"{error} It has been renamed to {path.name}.damaged; the state before it is used.")
            if lost := self.run.forget_after(progress.logged):
                note(f"metrics.jsonl lacks at least {lost:,} bytes of what was logged before the last save.")
        if paths:
            self._in_turn(partial(self._checkpoints, progress))
        return progress

    def save(self, progress: TrainingState) -> None:
        """Write the state, then the checkpoints, which `restore` can write again from it; called in all processes."""
        self._in_turn(partial(self.save_here, progress))

    def save_here(self, progress: TrainingState) -> None:
        """Do the same in this process alone, except where each holds a part of the model."""
        progress.scaler = self.runtime.scaler.state_dict()
        write = partial(shard.write, self.runtime) if self.runtime.sharded else state.write
        with self.run.writing():
            folder = self.run.path / "state"
            write(folder, self.learner, self.optimizer, self.average, progress, self.run.info)
        self._checkpoints(progress)

    def _in_turn(self, work: Callable[[], None]) -> None:
        """Write in the main process only, or in all of them where each holds a part of the model."""
        if self.runtime.sharded:
            work()
        else:
            self.runtime.on_main(work)

    def _checkpoints(self, p: TrainingState) -> None:
        extra, judge = {"step": str(p.step)}, self.objective.judge
        best = p.best is not None and p.best_step == p.step
        score = {judge: repr(p.best_loss if judge == "loss" else p.best)}

        def write(which: str) -> None:
            if found := p.thresholds.get(which):  # those that were chosen for these weights, if labels have any
                self.model.input_spec = replace(self.model.input_spec, thresholds=tuple(found))
            self._weights({which: extra, **({"best": extra | score} if best and p.best_weights == which else {})})

        write("last")
        if self.average is not None:
            with self.average.in_place():
                write("ema")

    def _weights(self, files: dict[str, dict[str, str]]) -> None:
        """Write the model's present weights to these checkpoints: best, last or ema -> what their metadata holds."""
        model = self.runtime.assembled(self.model)
        beside = self.objective.beside(self.learner)

        def write() -> None:
            for which, extra in files.items():
                self.run.save(model, which, extra, beside)

        if self.runtime.sharded:
            self.runtime.on_main(write)
        else:
            write()
