"""Processes, devices, precision: the one door to accelerate and torch.distributed.

One process needs nothing but torch. Several (`torchrun`, `accelerate launch`) are joined by accelerate: gloo on the
CPU, NCCL on CUDA. MPS is written and untested: no such machine was at hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from vitkit.cpu_features import check_type
from vitkit.errors import ConfigError, MissingDependency, VitkitError, pick

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

T = TypeVar("T")

PRECISIONS: dict[str, str | None] = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}  # -> torch's name
TRACKERS = {"wandb": "WandBTracker", "mlflow": "MLflowTracker"}  # -> accelerate's class


class Runtime:
    """Where the work runs, with how many processes, and in which precision.

    Args:
        device: `auto` (CUDA, else MPS, else CPU), or torch's name of one.
        precision: a row of PRECISIONS; bf16 and fp16 are mixed: weights, their update and the loss stay fp32.

    Raises:
        ConfigError: no such device or precision here.
    """

    def __init__(self, device: str = "auto", precision: str = "fp32") -> None:
        import torch

        pick(PRECISIONS, precision, "precision")
        self.precision = precision
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.ranks > 1 else 0
        kind = _kind(device)
        self._accelerator: Any = None
        if self.ranks > 1:
            self._accelerator = _accelerator(cpu=kind == "cpu")
            self.rank, self.ranks = self._accelerator.process_index, self._accelerator.num_processes
            self.device: torch.device = self._accelerator.device
        else:
            self.device = torch.device(kind)
        if precision == "fp16" and self.device.type == "cpu":
            raise ConfigError("fp16 is for accelerators; on the CPU use --precision bf16 or fp32.")
        check_type(self.device.type, PRECISIONS[precision])
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and talks."""
        return self.rank == 0

    def autocast(self) -> AbstractContextManager[Any]:
        """Computes in the runtime's precision inside."""
        import torch

        name = PRECISIONS[self.precision]
        return nullcontext() if name is None else torch.autocast(self.device.type, dtype=getattr(torch, name))

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model on its device; with several processes, wrapped so that gradients are averaged over them.

        Args:
            model: the same weights in every process.
        """
        model = model.to(self.device)
        return model if self._accelerator is None else self._accelerator.prepare_model(model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model that `prepare` was given, compiled or not."""
        model = getattr(model, "_orig_mod", model)
        model = getattr(model, "module", model) if self._accelerator is not None else model
        return getattr(model, "_orig_mod", model)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Gradients stay in this process inside: for all micro-batches of a step but the last."""
        return nullcontext() if self._accelerator is None else self._accelerator.no_sync(model)

    def backward(self, loss: Tensor) -> None:
        """Gradients of a loss, scaled when the precision is fp16."""
        self.scaler.scale(loss).backward()

    def clip(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], limit: float | None) -> Tensor:
        """Scale gradients down to a global norm of at most `limit`; returns the norm they had.

        Args:
            optimizer: whose gradients they are.
            parameters: all that are trained.
            limit: None only measures.
        """
        import torch

        self.scaler.unscale_(optimizer)
        parameters = list(parameters)
        if limit is not None:
            return torch.nn.utils.clip_grad_norm_(parameters, limit)
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the weights; with fp16, leave the step out when a gradient overflowed."""
        self.scaler.step(optimizer)
        self.scaler.update()

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a tensor over all processes, known to all."""
        return values if self._accelerator is None else self._accelerator.reduce(values, "sum")

    def gather(self, value: T) -> list[T]:
        """What each process has, in the order of their ranks, known to all.

        Args:
            value: any Python value; arrays may differ in length from process to process.
        """
        if self._accelerator is None:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found

    def on_main(self, work: Callable[[], T]) -> T:
        """Do something once, and give its result to all; a mistake of the user's is raised in all of them.

        Args:
            work: called in the main process.
        """
        if self._accelerator is None:
            return work()
        result: Any = None
        if self.main:
            try:
                result = work()
            except VitkitError as error:
                result = error
        result = self.gather(result)[0]
        if isinstance(result, VitkitError):
            raise result
        return result

    def wait(self) -> None:
        """Go on when all processes have come here."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

    def close(self) -> None:
        """Leave the group of processes."""
        if self._accelerator is not None:
            import torch.distributed as dist

            self.wait()
            if dist.is_initialized():
                dist.destroy_process_group()


def tracker(name: str, project: str, folder: str, run: str) -> Any:
    """A tracker of accelerate's: has `store_init_configuration(values)`, `log(values, step=)` and `finish()`.

    Args:
        name: a row of TRACKERS.
        project: what runs are filed under.
        folder: where offline files go.
        run: the run's name.
    """
    kind = pick(TRACKERS, name, "tracker")
    try:
        __import__(name)
        from accelerate import PartialState, tracking  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependency(f"--tracker {name} needs {error.name or name}: pip install 'vitkit[track]'") from error
    PartialState()  # the trackers ask it which process they are in
    if name == "wandb":
        found = getattr(tracking, kind)(project, name=run, dir=folder)
    else:
        found = getattr(tracking, kind)(project, logging_dir=folder, run_name=run)
    if hasattr(found, "start"):
        found.start()
    return found


def _kind(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(f"Expected a device such as auto, cpu, cuda or mps; got {device!r}.") from error
    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not here.get(kind):
        raise ConfigError(f"There is no device {device!r} here; use --device auto (now: {_kind('auto')}).")
    return device


def _accelerator(cpu: bool) -> Any:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise MissingDependency("Several processes need accelerate: pip install accelerate") from error
    return Accelerator(cpu=cpu, mixed_precision="no")  # precision is ours: the same code for one process and many
