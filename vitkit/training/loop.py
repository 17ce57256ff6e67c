"""The training loop: batch -> loss -> gradients -> update; and at set steps a line of metrics, a validation, a save.

Every step is a function of (seed, step, rank) and the weights before it: the loader derives order, augmentation and
mixing from them, and the generator of dropout and stochastic depth is seeded before each step. So a resumed run is
bit-identical to an uninterrupted one.
"""

from __future__ import annotations

import errno
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.data.base import Source
from vitkit.data.batch import Batch
from vitkit.data.train_loader import TrainLoader
from vitkit.errors import Diverged, LostWorker
from vitkit.model.backbone import Backbone
from vitkit.runtime import Fetched, Runtime, stop_requests
from vitkit.training.calendar import Calendar
from vitkit.training.failures import Stopped, advice, explain, rescuable
from vitkit.training.gradients import Gradients
from vitkit.training.metrics import Clock, Trackers
from vitkit.training.objectives import Objective
from vitkit.training.optim import Average, Update, clipping, optimizer_for, set_lr
from vitkit.training.recipe import Recipe
from vitkit.training.run_folder import RunFolder
from vitkit.training.saving import Saver
from vitkit.training.settings import BatchSplit, Settings
from vitkit.training.state import TrainingState
from vitkit.training.stopping import consider, reason_to_stop
from vitkit.training.whole_step import Capture, WholeStep

Watch = Callable[[dict[str, Any]], None]  # called with every line of metrics, and after each step ("event": "step")

GONE = (errno.EIO, errno.ENOSPC)  # a closed terminal, a log on a full disk
SILENCE = 60.0  # seconds without images after which the user is told
LEAST_SCALE = 2.0**-8  # of fp16's loss: an overflow at a lower scale means that training has diverged


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
        step: updates done.
        total: updates of the whole run.
        best: highest validation accuracy or mAP, or lowest loss, whichever the objective judges by; None without a
            validation part.
        signal: number of the signal that asked the run to stop, be it during the last update; 0 if none did.
        seconds: duration of this process's part of the run.
        why: why the run stopped before its last update, if it stopped early by itself.
    """

    step: int
    total: int
    best: float | None
    signal: int
    seconds: float
    why: str = ""

    @property
    def interrupted(self) -> bool:
        """Whether a signal asked the run to stop, be it during the last update."""
        return bool(self.signal)

    @property
    def stopped(self) -> bool:
        """Whether the run was interrupted before its end."""
        return self.interrupted and self.step < self.total


@dataclass(frozen=True)
class _Launched:
    """A step that the device has been given.

    Args:
        step: from 0.
        lr: its learning rate.
        stop: whether this process had been asked to stop.
        index: [B] int64, its images.
        arriving: waits for its numbers: the sums of losses and of correct answers, how many processes have been asked
            to stop, and the gradient's norm.
    """

    step: int
    lr: float
    stop: bool
    index: Tensor
    arriving: Fetched


class Loop:
    """Trains a model from its run's latest state to the end.

    Args:
        model: a ViT with the same weights in every process; it is trained in place.
        train: the training part.
        val: the validation part, if any.
        recipe: the numbers of the training.
        objective: what is learnt.
        settings: the machine, logging and saving.
        run: the run folder.
        runtime: device, precision and processes.
        watch: called with every event, in the main process.
        wrap_forward: turns the model into a module that computes the same logits from the same parameters, but is
            faster to train (default: the model itself). An objective with parameters of its own does without it.
        capture: captures work on the device, so that a step becomes a CUDA graph (default: it does not).
    """

    def __init__(
        self,
        model: Backbone,
        train: Source,
        val: Source | None,
        recipe: Recipe,
        objective: Objective,
        settings: Settings,
        run: RunFolder,
        runtime: Runtime,
        watch: Watch | None = None,
        wrap_forward: Callable[[Backbone], nn.Module] = lambda model: model,
        capture: Capture | None = None,
    ) -> None:
        self.train, self.val, self.recipe, self.settings = train, val, recipe, settings
        self.run, self.runtime, self._watch = run, runtime, watch
        self.calendar = Calendar(recipe, settings, len(train))
        self.total = self.calendar.total
        recipe.warmup_steps(self.total)
        model.gradient_checkpointing = runtime.recomputes = bool(settings.checkpointing)
        self.bare = model.to(runtime.device)
        self.objective = objective
        self.learner = self.objective.learner(self.bare)
        runtime.distribute(self.learner)
        self.average = Average(self.learner, recipe.ema) if recipe.ema is not None else None
        self.optimizer = optimizer_for(self.learner, recipe, graph=capture is not None)
        trained_parameters = [p for p in self.learner.parameters() if p.requires_grad]
        clip = clipping(self.optimizer, trained_parameters, recipe.clip, runtime)
        self.update = Update(self.optimizer, trained_parameters, self.average, clip, runtime.scaler)
        trained = wrap_forward(self.bare) if self.learner is self.bare else self.learner
        if settings.compile:
            for module in {self.bare, trained}:
                module.compile()  # in place, so that parameters keep their names
        self.model = runtime.prepare(trained)
        self.gradients = Gradients(
            self.model, self.objective, self.optimizer, BatchSplit.of(recipe, settings, runtime), settings, runtime
        )
        self.gradients.note = self._note
        self.whole: WholeStep | None = None
        if capture is not None and not settings.compile and WholeStep.possible(self.model, objective, self.update):
            images = self.gradients.mean_share
            self.whole = WholeStep(self.model, objective, self.update, images, runtime, capture)
        self.saver = Saver(run, runtime, self.bare, self.learner, self.optimizer, self.average, objective)
        self.progress = TrainingState()
        self._consistent: TrainingState | None = None  # what can be saved now; None in the middle of an update
        # A GPU gets a step before the numbers of the one before it have arrived, so that it never waits for Python.
        self.ahead = self.update.guarded and runtime.device.type == "cuda" and runtime.ranks == 1
        self._launched: deque[_Launched] = deque()  # steps whose numbers have not arrived
        self._updating = False
        self._waited = -1.0  # seconds, when `_on_wait` was last called
        self.trackers: Trackers | None = None

    def resume(self) -> int:
        """Restore the run's newest intact state, if any; return its step.

        Raises:
            UnreadableFile: there are states, but all of them are damaged.
        """
        self.progress = self.saver.restore(self._note)
        return self.progress.step

    def watch(self, event: dict[str, Any]) -> None:
        """Show an event to whoever watches."""
        try:
            if self._watch is not None:
                self._watch(event)
        except OSError as error:
            if error.errno not in GONE:  # nobody can read the output any more: the run goes on without it
                raise
            self._watch = None

    def _note(self, text: str) -> None:
        self.watch({"event": "note", "text": text})

    def __call__(self) -> Outcome:
        """Train to the end, or until interrupted.

        Raises:
            Diverged: the loss or its gradient became NaN or infinite. Everything saved before is kept.
            SaveFailed: the run could not be saved. Everything saved before is kept.
            LostWorker: a worker or another process died or no longer answers. The run is saved first.
            OutOfMemory: no memory was left. The run is saved first, except in the middle of an update.
        """
        began = self.epoch_began = time.perf_counter()
        start, settings = self.progress.step, self.settings
        if self.runtime.main:
            self.trackers = Trackers(settings.trackers, self.run, start)
        loader = TrainLoader(
            self.train,
            self.bare.input_spec,
            self.recipe.augment,
            batch_size=self.recipe.batch_size,
            seed=settings.seed,
            mix=self.recipe.mix,
            sampling=self.recipe.sampling,
            augment_on=self.recipe.augment_on,
            rank=self.runtime.rank,
            ranks=self.runtime.ranks,
            workers=settings.workers,
            device=self.runtime.device,
            bad_images=settings.bad_images,
            on_bad=self._on_bad,
        )
        self.gradients.begin(self.learner, self.bare.input_spec, self.progress.micro)
        interrupted, clock = False, Clock(self.recipe.batch_size)
        with stop_requests() as requests, _deterministic(settings.deterministic):
            if self.runtime.main:
                images = self.recipe.batch_size
                epochs = self.calendar.finished(self.total)
                self.watch({"event": "start", "step": start, "total": self.total, "images": images, "epochs": epochs})
            if self.trackers is not None and self.trackers.missing:
                self._note("TensorBoard is not installed, so no events are written: pip install tensorboard")
            batches = loader.batches(start, self.total, partial(self._on_wait, requests))
            try:
                if self.progress.pending:
                    self._after(start, clock, False)
                self._consistent = self._snapshot()
                for step in range(start, self.total):
                    if self.progress.ended:
                        break
                    try:
                        with clock.waiting(self._idle):
                            batch = next(batches)
                    except Stopped:
                        interrupted = True
                        while self._launched:
                            self._finish(clock)
                        self._save()
                        break
                    stop = bool(requests)
                    self._launch(step, batch, stop)
                    ahead = int(self.ahead and not stop and not self.calendar.is_due(step + 1))
                    while len(self._launched) > ahead:
                        interrupted = self._finish(clock)
                    if interrupted:
                        break
            except Exception as error:
                kept = self._rescue(error)
                raise explain(error, self.progress.step, kept, self.runtime.ranks) from error
            finally:
                batches.close()  # type: ignore[attr-defined]
                if self.trackers is not None:
                    self.trackers.close()
        best = self.progress.best
        if best is not None and self.objective.judge == "loss":
            best = -best
        number = (requests or [signal.SIGTERM])[0] if interrupted else 0  # another process may have got the signal
        seconds = time.perf_counter() - began
        return Outcome(self.progress.step, self.total, best, number, seconds, self.progress.ended)

    def _on_wait(self, requests: list[int], seconds: float) -> None:
        """Called every second of waiting for images."""
        if requests and self.runtime.ranks == 1:
            raise Stopped
        if requests:  # the other processes wait for this one, which cannot tell them to stop
            raise LostWorker("The run was asked to stop while a worker process did not answer.")
        before, self._waited = self._waited, seconds
        if seconds >= SILENCE and not SILENCE <= before <= seconds:  # once per wait, however late this is called
            self._note(f"Waiting for images: no worker process has sent any for {seconds:.0f} s.")

    def _snapshot(self, pending: bool = False) -> TrainingState:
        """Return a copy of the progress; `pending` before the work that is due after an update."""
        p = self.progress
        logged = self.run.log_size() if pending and self.runtime.main else p.logged
        return replace(
            p,
            pending=pending,
            logged=logged,
            window=dict(p.window),
            epoch=dict(p.epoch),
            skipped=dict(p.skipped),
            thresholds=dict(p.thresholds),
        )

    def _rescue(self, error: Exception) -> str:
        """Save what can be saved after an error, without the other processes; say what is kept."""
        if rescuable(error) and not self._updating:
            try:
                while self._launched:
                    self._arrive()
            except Exception as failed:  # such as the error of the GPU that was the first
                self._consistent = None
                self._note(f"The latest step cannot be saved: {failed}")
        if not self.runtime.main or not self.run.path.is_dir():  # what a folder holds that has moved is not known
            return ""
        resume = advice(error, self.run.path)
        if self._consistent is not None and rescuable(error) and not self.runtime.sharded:
            self.progress = self._consistent
            self.optimizer.zero_grad(set_to_none=True)  # memory
            try:
                if not self.progress.pending:
                    self.progress.logged = self.run.logged()
                self.saver.save_here(self.progress)
                return f"Everything up to step {self.progress.step:,} is saved. {resume}"
            except Exception as failed:
                self._note(f"The run could not be saved: {failed}")
        if (saved := self.run.latest()) is None:
            return "Nothing was saved yet."
        return f"The state of step {int(saved.stem.rpartition('-')[2]):,} is kept. {resume}"

    def _launch(self, step: int, batch: Batch, stop: bool) -> None:
        """Do one update, without waiting for its numbers.

        Args:
            step: the step, from 0.
            batch: the images of this process.
            stop: whether this process has been asked to stop.
        """
        lr = self.recipe.lr_at(step, self.total)
        set_lr(self.optimizer, lr)
        if not (self.model.training and self.learner.training):
            self.model.train()
        if self.whole is not None and self.whole.takes(batch):
            self._consistent, self._updating = None, True
            self.gradients.seed(step)
            self._launched.append(_Launched(step, lr, stop, batch.index, Fetched(self.whole(batch))))
            self._updating = False
            return
        # Not torch.tensor: a copy to a GPU would wait here, before the rest of the update is launched.
        sums = torch.cat([self.gradients(step, batch), torch.full((1,), float(stop), device=self.runtime.device)])
        self.progress.micro = self.gradients.found
        # One transfer per step: all processes see the same sums. Broken numbers change no weights: the update sees to
        # that while the sums are on their way, or else `_guard` does before it.
        launched = _Launched(step, lr, stop, batch.index, Fetched(self.update.measure(self.runtime.sum(sums))))
        if not self.update.guarded:
            self._guard(launched, launched.arriving())
        self._consistent, self._updating = None, True
        self.update.apply()
        self._launched.append(launched)
        self._updating = False

    def _idle(self) -> bool:
        """Whether the device has done all that it was given."""
        return not self._launched or self._launched[-1].arriving.done()

    def _arrive(self) -> bool:
        """Wait for the numbers of the oldest launched step; return whether any process has been asked to stop."""
        launched = self._launched.popleft()
        total = launched.arriving()
        if self.update.guarded:
            self._guard(launched, total)
        for name, value in (
            ("loss", total[0]),
            ("correct", total[1]),
            ("images", float(self.recipe.batch_size)),
            ("norm", total[3] if math.isfinite(total[3]) else 0.0),
            ("steps", 1.0),
        ):
            for sums_of in (self.progress.window, self.progress.epoch):
                sums_of[name] = sums_of.get(name, 0.0) + value
        self.progress.step = launched.step + 1
        if not self._launched:
            self._consistent = self._snapshot(pending=True)
        return launched.stop or bool(total[2])

    def _finish(self, clock: Clock) -> bool:
        """Wait for the oldest launched step and do what is due after it; return whether to stop."""
        interrupted = self._arrive()
        self._after(self.progress.step, clock, interrupted)
        if not self._launched:
            self._consistent = self._snapshot()
        return interrupted

    def _guard(self, launched: _Launched, total: list[float]) -> None:
        """Raise Diverged if the sums of a step are not finite."""
        loss, norm, index = total[0], total[3], launched.index
        if math.isfinite(loss) and math.isfinite(norm):
            return
        scaler = self.runtime.scaler
        if math.isfinite(loss) and scaler.is_enabled() and scaler.get_scale() > LEAST_SCALE:
            return  # fp16 overflowed: the scaler skips this update and lowers the scale
        what = "loss" if not math.isfinite(loss) else "gradient"
        names = [self.train.names[int(i)] for i in index[:3]]
        saved = self.run.latest()
        kept = f"the state of step {int(saved.stem.rpartition('-')[2])} is kept" if saved else "nothing was saved yet"
        other = {"fp16": "--precision bf16", "bf16": "--precision fp32"}.get(self.runtime.precision, "more --warmup")
        raise Diverged(
            f"The {what} became {loss if what == 'loss' else norm} at step {launched.step}, at a learning rate of "
            f"{launched.lr:.3g} and a batch of {', '.join(names)}{', ...' if len(index) > 3 else ''}; {kept} in "
            f"{self.run.path}. Start another run with a lower --lr or {other}."
        )

    def _after(self, step: int, clock: Clock, interrupted: bool) -> None:
        """Log, validate and save as is due once `step` updates are done; if interrupted, save and leave the rest."""
        end, new_best = step == self.total, False
        self.progress.pending = interrupted and not end
        sums, lr = self.progress.epoch, self.recipe.lr_at(step - 1, self.total)
        so_far = self._means(sums)
        if self.runtime.main:
            self.watch({"event": "step", "step": step, "total": self.total, **so_far, "lr": lr})
        if self.progress.pending:
            self._save()
            return
        if self.calendar.logs(step):
            self._log_training(step, clock)
        if self.calendar.validates(step):
            with clock.excluded():
                new_best = self.val is not None and self._validate(step)
            now, epoch = time.perf_counter(), self.calendar.finished(step)
            seconds = {"seconds": now - self.epoch_began}
            self._log({"event": "epoch", "step": step, "epoch": epoch, **so_far, "time": seconds})
            self.progress.epoch, self.epoch_began = {}, now
            if not end:
                self.progress.ended = reason_to_stop(self.progress, self.recipe.early_stop)
        if self.progress.ended:
            self._end_early(step, clock)
            return
        if self.calendar.saves(step) or new_best:
            with clock.excluded():
                self._save()

    def _end_early(self, step: int, clock: Clock) -> None:
        """Log what is left to log, save, and say in run.json that the run stopped early."""
        if self.progress.window:
            self._log_training(step, clock)
        self._log({"event": "stop", "step": step, "why": self.progress.ended})
        self.run.info["stopped_early"] = {"step": step, "why": self.progress.ended}
        self._save()
        self.runtime.on_main(self.run.write_info)

    def _means(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the mean loss, and the accuracy if the objective has one, of sums over images."""
        accuracy = {"accuracy": sums["correct"] / sums["images"]} if self.objective.counts else {}
        return {"loss": sums["loss"] / sums["images"], **accuracy}

    def _log_training(self, step: int, clock: Clock) -> None:
        window, self.progress.window = self.progress.window, {}
        steps = window["steps"]
        self._log(
            {
                "event": "train",
                "step": step,
                "epoch": self.calendar.epochs(step),
                **self._means(window),
                "gradient": window["norm"] / steps,
                "lr": self.recipe.lr_at(step - 1, self.total),
                "time": clock.read(int(steps)),
            }
        )

    def _validate(self, step: int) -> bool:
        """Validate the weights, and their average if there is one; return whether one of them is a new best.

        Where the objective judges by the loss, the accuracy plays no part. A new best has to be saved, state and all,
        at this step, so that a run resumed from the latest state agrees with its best weights.
        """
        assert self.val is not None
        results: dict[str, tuple[float, float]] = {}
        if self.runtime.main:
            self.watch({"event": "validating", "step": step})
        for which in ("last", "ema") if self.average is not None else ("last",):
            began = time.perf_counter()
            averaged = self.average.in_place() if which == "ema" and self.average is not None else nullcontext()
            with averaged, self.runtime.gathered(self.learner):
                found = self.objective.validate(
                    self.learner,
                    self.val,
                    self.runtime,
                    batch_size=self.gradients.found or max(self.gradients.split.micro, 64),
                    workers=0 if self.val.in_memory else self.settings.workers,
                    bad_images=self.settings.bad_images,
                )
            found = self.runtime.gather(found)[0]  # the main process's, so that all of them agree on whether to save
            seconds = {"seconds": time.perf_counter() - began}
            self._log({"event": "val", "step": step, "weights": which, **found, "time": seconds})
            if "thresholds" in found:
                self.progress.thresholds[which] = found["thresholds"]
            loss = found["loss"]
            results[which] = (-loss if self.objective.judge == "loss" else found[self.objective.judge], loss)
        return consider(self.progress, results, step)

    def _log(self, row: dict[str, Any]) -> None:
        if self.runtime.main:
            self.run.log(row)
            if self.trackers is not None:
                self.trackers.log(row)
                if self.trackers.failed:
                    self._note(self.trackers.failed)
                    self.trackers.failed = None
            self.watch(row)

    def _on_bad(self, name: str, why: str) -> None:
        if name not in self.progress.skipped:
            self.progress.skipped[name] = why
            self._log({"event": "skipped", "step": self.progress.step, "name": name, "why": why})

    def _save(self) -> None:
        for name, why in sorted(item for part in self.runtime.gather(self.progress.skipped) for item in part.items()):
            self._on_bad(name, why)  # including those that other processes skipped
        self.progress.logged = self.runtime.on_main(self.run.logged)
        self.saver.save(self.progress)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    if not wanted or torch.are_deterministic_algorithms_enabled():  # the call would import torch's compiler: seconds
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
