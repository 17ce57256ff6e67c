"""Processes, devices, precision and requests to stop: the only module that uses accelerate.

A single process needs only torch. Several processes (`torchrun`, `accelerate launch`, Ray Train) communicate through
accelerate: gloo on the CPU, NCCL on CUDA. MPS is implemented but untested, for want of a machine.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from vitkit.cpu_features import check_type
from vitkit.devices import find_device
from vitkit.errors import ConfigError, MissingDependency, VitkitError, pick
from vitkit.process_group import end_with_launcher, join

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

T = TypeVar("T")

PRECISIONS: dict[str, str | None] = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}  # -> torch's name
AUTO = "auto"  # the precision that suits the device, for work that is not training
AHEAD = 2  # batches that a GPU computes before the first one's results are read
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # how processes communicate
TRACKERS = {"wandb": "WandBTracker", "mlflow": "MLflowTracker"}  # -> accelerate's class


class Runtime:
    """The device, the precision and the processes that a job uses.

    Every process holds the whole model; `training.shard.Sharded` divides it.

    Args:
        device: `auto` (CUDA if available, then MPS, then CPU), or a torch device name, such as `cuda:1`.
        precision: a key of PRECISIONS, or `auto` for bf16 on CUDA and fp32 elsewhere. bf16 and fp16 are mixed
            precision: the weights, their updates and the loss stay in fp32.

    Raises:
        ConfigError: the device or the precision is not available on this machine.
    """

    sharded = False  # whether each process holds only a part of the model
    recomputes = False  # whether backward passes compute forward passes again, which `autocast` does not reach

    def __init__(self, device: str = "auto", precision: str = "fp32") -> None:
        import torch

        if precision != AUTO:
            pick(PRECISIONS | {AUTO: None}, precision, "precision")
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.ranks > 1 else 0
        found = find_device(device)
        self._accelerator: Any = None
        end_with_launcher()
        if self.ranks > 1:
            if found.index is not None:
                raise ConfigError(
                    f"Each of the {self.ranks} processes has a device of its own; got --device {device}. Use --device "
                    f"{found.type}."
                )
            self._accelerator = _accelerator(found.type, self.rank, self.ranks)
            self.rank, self.ranks = self._accelerator.process_index, self._accelerator.num_processes
            self.device: torch.device = self._accelerator.device
        else:
            self.device = found
            if found.type == "cuda" and found.index is not None:
                torch.cuda.set_device(found)  # where kernels of our own run
        if precision == AUTO:
            native = self.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            precision = "bf16" if native else "fp32"
        self.precision = precision
        if precision == "fp16" and self.device.type == "cpu":
            raise ConfigError("fp16 runs on accelerators only; use --precision bf16 or fp32 on the CPU.")
        check_type(self.device.type, PRECISIONS[precision])
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def autocast(self) -> AbstractContextManager[Any]:
        """A context that computes in the runtime's precision."""
        import torch

        from vitkit.cpu_products import fp32_products

        if (name := PRECISIONS[self.precision]) is None:
            return nullcontext() if self.recomputes else fp32_products(self.device.type)
        return torch.autocast(self.device.type, dtype=getattr(torch, name))

    def distribute(self, learner: nn.Module) -> None:
        """Divide the parameters of a module over the processes, in place, before its optimizer is created: none here.

        Args:
            learner: the module whose parameters are trained, with the same weights in every process.
        """

    def gathered(self, learner: nn.Module) -> AbstractContextManager[None]:
        """A context in which a process can compute without waiting for the others.

        Args:
            learner: the module that was passed to `distribute`.
        """
        return nullcontext()

    def assembled(self, model: Any) -> Any:
        """Return a model with whole weights, for writing it; if it is sharded, every process must call this.

        Args:
            model: the module that was passed to `distribute`, or the model in it.
        """
        return model

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move a model to the device; with several processes, also wrap it so that they average their gradients.

        Args:
            model: the model, with the same weights in every process.
        """
        model = model.to(self.device)
        return model if self._accelerator is None else self._accelerator.prepare_model(model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model that was passed to `prepare`, compiled or not."""
        model = getattr(model, "_orig_mod", model)
        model = getattr(model, "module", model) if self._accelerator is not None else model
        return getattr(model, "_orig_mod", model)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context that keeps gradients in this process: for every micro-batch of a step except the last."""
        return nullcontext() if self._accelerator is None else self._accelerator.no_sync(model)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss, which fp16 scales first."""
        self.scaler.scale(loss).backward()

    def clip(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], limit: float | None) -> Tensor:
        """Scale gradients down to a global norm of at most `limit`; return the norm before scaling.

        Args:
            optimizer: the optimizer of these parameters.
            parameters: all trained parameters.
            limit: the largest norm allowed; None measures the norm and changes nothing.
        """
        import torch

        self.scaler.unscale_(optimizer)
        parameters = list(parameters)
        if limit is not None:
            return torch.nn.utils.clip_grad_norm_(parameters, limit)
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def free_memory(self) -> None:
        """Give memory that nothing uses any more back to the device."""
        import gc

        import torch

        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all processes; every process gets the result."""
        return values if self._accelerator is None else self._accelerator.reduce(values, "sum")

    def gather(self, value: T) -> list[T]:
        """Collect one value from each process, in rank order; every process gets the list.

        Args:
            value: any Python value; arrays may have a different length in each process.
        """
        if self._accelerator is None:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found

    def on_main(self, work: Callable[[], T]) -> T:
        """Call a function in the main process only; every process gets its result, or raises its VitkitError.

        Args:
            work: the function.
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
        """Wait until all processes have reached this point."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

    def close(self) -> None:
        """Leave the process group."""
        if self._accelerator is not None:
            import torch.distributed as dist

            self.wait()
            if dist.is_initialized():
                dist.destroy_process_group()


class Fetched:
    """A copy of a tensor to the CPU, begun at once; a call waits for it and returns its numbers.

    Args:
        values: [n]. What the device computes afterwards is not waited for.
    """

    def __init__(self, values: Tensor) -> None:
        import torch

        self._there, self._copied = values, None
        if values.is_cuda:
            self._there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._there.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def __call__(self) -> list[float]:
        """Return the numbers."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._there.tolist()

    def done(self) -> bool:
        """Return whether a call would not wait."""
        return self._copied is None or self._copied.query()


def on_host(results: Iterable[tuple[T, Tensor]]) -> Iterator[tuple[T, Tensor]]:
    """Yield each result's tensor on the CPU, in order; what is on a GPU is copied while the next batches are computed.

    Args:
        results: (anything, tensor) of each batch; taking the next one starts its computation. If it raises, the
            results before it are still yielded, and then it raises.
    """
    import torch

    waiting: deque[tuple[T, Tensor, Any]] = deque()
    error: Exception | None = None
    source = iter(results)
    while True:
        try:
            about, found = next(source)
        except StopIteration:
            break
        except Exception as stopped:
            error = stopped
            break
        if not found.is_cuda:
            yield about, found.cpu()
            continue
        there = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        there.copy_(found, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # waiting leaves the core to others
        copied.record()
        waiting.append((about, there, copied))
        if len(waiting) > AHEAD:
            yield _arrived(*waiting.popleft())
    while waiting:
        yield _arrived(*waiting.popleft())
    if error is not None:
        raise error


def _arrived(about: T, there: Tensor, copied: Any) -> tuple[T, Tensor]:
    copied.synchronize()
    return about, there


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collect the numbers of the SIGINT (Ctrl-C), SIGTERM and SIGHUP signals that arrive inside this context.

    Only the first signal is collected: a second one has its usual effect, except SIGHUP, which then has none: a closing
    terminal sends it twice, by the shell and by the system. SIGHUP stays ignored under `nohup`. Outside the main
    thread, where Python cannot handle signals, the list stays empty.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def receive(number: int, frame: Any) -> None:
        received.append(number)
        restore()
        if hangup in previous:
            signal.signal(hangup, signal.SIG_IGN)

    numbers = [signal.SIGINT, signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        numbers.append(hangup)
    previous = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        restore()


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that no memory was left: Python's, torch's on any device, or the system's."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def tracker(name: str, project: str, folder: str, run: str) -> Any:
    """Return one of accelerate's trackers: `store_init_configuration(values)`, `log(values, step=)`, `finish()`.

    Args:
        name: a key of TRACKERS.
        project: the project that the run is filed under.
        folder: the folder for offline files.
        run: the run's name.
    """
    kind = pick(TRACKERS, name, "tracker")
    try:
        __import__(name)
        from accelerate import PartialState, tracking  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependency(f"--tracker {name} needs {error.name or name}: pip install 'vitkit[track]'") from error
    PartialState()  # the trackers read the process index from it
    if name == "wandb":
        found = getattr(tracking, kind)(project, name=run, dir=folder)
    else:
        found = getattr(tracking, kind)(project, logging_dir=folder, run_name=run)
    if hasattr(found, "start"):
        found.start()
    return found


def _accelerator(device: str, rank: int, ranks: int) -> Any:
    import torch.distributed as dist

    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise MissingDependency("Training with several processes needs accelerate: pip install accelerate") from error
    known = {"MASTER_ADDR", "RANK"} <= os.environ.keys()  # mpirun has names of its own, which accelerate reads
    if known and device in BACKENDS and not dist.is_initialized():  # Ray Train has done so
        join(BACKENDS[device], rank, ranks)
    return Accelerator(cpu=device == "cpu", mixed_precision="no")  # `autocast` sets it, with one process or many
