"""`--shard`: weights, gradients, moments and average divided over the processes (FSDP2), and their state on disk.

Each block is gathered when it is computed, and freed afterwards. A sharded state is a file like that of any other
state, but without tensors, and the folder that it names, to which each process writes its part. The file is renamed
into place once every part is on disk: from then on the state exists. torch.distributed.checkpoint divides the parts
again for any number of processes, one included.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitkit.checkpoints import containers
from vitkit.checkpoints.atomic import reason, staging, sync
from vitkit.errors import CheckpointError, ConfigError, OutputError, TensorMismatch, UnreadableFile
from vitkit.model.backbone import Backbone
from vitkit.model.create import build, need_vit
from vitkit.model.vit import ViT
from vitkit.runtime import Runtime
from vitkit.training.objectives import OBJECTIVES
from vitkit.training.optim import Average
from vitkit.training.recipe import Recipe
from vitkit.training.run_folder import Header, states_in
from vitkit.training.settings import PRECISIONS, Settings

if TYPE_CHECKING:
    from vitkit.training.state import TrainingState

OFF = "With --shard the fused kernels and CUDA graphs are off: plain PyTorch trains the model."
ALONE = "--shard divides the model over processes; there is only one, so the model stays whole."
PARTS = "shards"  # in a state's header: the folder of its parts, and their sizes and checksums


def check(settings: Settings, recipe: Recipe, model: Backbone, ranks: int, passed: bool = False) -> list[str]:
    """Refuse a request that --shard cannot carry out; return what to tell the user.

    Args:
        settings: whether to shard, among others.
        recipe: the recipe.
        model: the model to train.
        ranks: number of processes.
        passed: whether the user passed the model in Python, to be trained in place.

    Raises:
        ConfigError: with what to leave out.
    """
    if not settings.shard:
        return []
    need_vit(model, "--shard")
    for given, what in (
        (settings.precision in ("fp16", "fp8"), f"trains in bf16 or fp32; got --precision {settings.precision}"),
        (settings.compile, "does not work with --compile; leave it out"),
        (not OBJECTIVES[recipe.objective].fused, f"is for classification; leave it out with {recipe.objective}"),
        (recipe.lora, "is for models that are trained whole; leave --lora out"),
        (recipe.optimizer == "muon", "divides the matrices that Muon needs whole; use --optimizer adamw"),
        (passed and ranks > 1, "cannot train a model in place; name a variant or give a configuration"),
    ):
        if given:
            raise ConfigError(f"--shard {what}.")
    return [OFF] if ranks > 1 else [ALONE]


def runtime_for(settings: Settings) -> Runtime:
    """Return the runtime of a run: one that shards if there are several processes and the settings ask for it."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return (Sharded if settings.shard and several else Runtime)(settings.device, PRECISIONS[settings.precision])


class Sharded(Runtime):
    """A runtime whose processes each hold a part of every parameter."""

    sharded = True

    def distribute(self, learner: nn.Module) -> None:
        """See Runtime; in bf16, the blocks are gathered in it, and what is outside of them stays fp32."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.device.type, (self.ranks,))
        # The CPU's LayerNorm refuses bf16 weights for the fp32 stream; autocast alone makes them bf16 there.
        low = torch.bfloat16 if self.precision == "bf16" and self.device.type == "cuda" else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
        assert isinstance(learner, ViT)  # `check` has refused everything else
        for block in learner.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(learner, mesh=mesh)

    def prepare(self, model: nn.Module) -> nn.Module:
        """See Runtime; `distribute` has done it."""
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """See Runtime; every micro-batch is reduced, because whole gradients would not fit into memory."""
        return nullcontext()

    def clip(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], limit: float | None) -> Tensor:
        """See Runtime; the norm is that of all parts together."""
        parameters = list(parameters)
        norm = full(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    @contextmanager
    def gathered(self, learner: nn.Module) -> Iterator[None]:
        """See Runtime; forward passes are collective otherwise, and the last batches are not the same everywhere."""
        from torch.distributed.fsdp import FSDPModule

        parts = [module for module in learner.modules() if isinstance(module, FSDPModule)]
        for part in parts:
            part.unshard()
            part.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for part in parts:
                part.set_reshard_after_forward(part is not learner, recurse=False)
                part.reshard()

    def assembled(self, model: Any) -> Any:
        """See Runtime; the other processes get a model without values."""
        values: dict[str, Tensor] = {}
        for name, value in model.state_dict().items():
            whole = full(value)  # in every process: it is collective
            values[name] = whole.cpu() if self.main else whole.to("meta")
        with torch.device("meta"):
            found = build(model.config, model.input_spec)
        found.load_state_dict(values, assign=True)
        found.licence = model.licence
        return found


def full(value: Tensor) -> Tensor:
    """Return a whole tensor; every process must ask for it if it is sharded."""
    return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]


def is_sharded(value: Tensor) -> bool:
    """Return whether this process holds only a part of a tensor."""
    return hasattr(value, "placements")  # without importing torch.distributed.tensor


def divided(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor as its parameter is: as this process's part of it, or as it is.

    Args:
        value: the same in every process.
        parameter: of the same shape, or else `value` is returned.
    """
    if not is_sharded(parameter) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, places = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(parameter.device), mesh, places, src_data_rank=None)


def write(
    runtime: Runtime,
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    progress: TrainingState,
    info: Mapping[str, Any],
) -> Path:
    """Write a sharded state, then remove old ones; every process must call this. Returns the path of its file.

    Args:
        runtime: the processes.
        folder: the run's `state` folder.
        model: the module whose parameters are trained.
        optimizer: the optimizer of its parameters.
        average: the running average of its weights, if any.
        progress: how far the run has come.
        info: the contents of run.json, which can be rebuilt from this copy.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from vitkit.training.state import KEPT

    step = f"step-{progress.step:012d}"
    parts = runtime.on_main(lambda: _new_folder(folder, f"{step}-"))
    tensors = {key: value for key, value, _ in _tensors(model, optimizer, average)}
    writer = HuggingFaceStorageWriter(str(parts), save_distributed=True)  # safetensors: no pickles
    try:
        save(tensors, storage_writer=writer)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        why = reason(first) if isinstance(first, OSError) else str(first)
        raise OutputError(f"Could not write to {folder}: {why}. Nothing there was changed.") from error
    own = [_sum(file) for file in parts.glob(f"shard-{runtime.rank + 1:05d}-*")]
    sums = dict(item for part in runtime.gather(own) for item in part)

    def commit() -> None:
        sync(parts)
        values = {"progress": asdict(progress), "run": dict(info), PARTS: {"folder": parts.name, "files": sums}}
        with staging(folder) as private:
            containers.write({}, private / f"{step}.safetensors", Header(values, PARTS).metadata())
        prune(folder, KEPT)

    runtime.on_main(commit)
    return folder / f"{step}.safetensors"


def prune(folder: Path, kept: int) -> None:
    """Remove all but the newest states, then the parts of states that no longer exist or were never finished.

    Args:
        folder: the run's `state` folder.
        kept: the number of states to keep.
    """
    for old in states_in(folder)[kept:]:
        old.unlink(missing_ok=True)
    for parts in folder.glob("step-*-*/"):
        file = folder / f"{parts.name.rpartition('-')[0]}.safetensors"
        if file.with_name(f"{file.name}.damaged").exists():  # set aside for the user to look at
            continue
        try:
            used = file.exists() and Header.of(file).values.get(PARTS, {}).get("folder") == parts.name
        except CheckpointError:
            used = True
        if not used:
            shutil.rmtree(parts, ignore_errors=True)


def read(
    path: Path, header: Header, model: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None
) -> None:
    """Restore model, optimizer and average in place from a sharded state; no process waits for another.

    Args:
        path: the state's file.
        header: its header.
        model: the module whose parameters are trained, sharded or not.
        optimizer: its optimizer.
        average: its running average, if any.

    Raises:
        UnreadableFile: a part is missing or damaged; nothing has been restored in this process.
        TensorMismatch: the state belongs to another model.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = _reader(path, header.values[PARTS])
    try:
        shapes = {key: entry.size for key, entry in reader.read_metadata().state_dict_metadata.items()}
    except Exception as error:
        raise UnreadableFile(f"{path} is damaged: a part of it is not a complete safetensors file.") from error
    moments: dict[Tensor, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        for key in (key for key in shapes if key.startswith(f"optimizer/{name}/")):
            entry = key.rpartition("/")[2]
            alike = shapes[key] == parameter.shape
            place = step_device(optimizer, parameter)
            empty = torch.zeros_like(parameter) if alike else torch.zeros(shapes[key], device=place)
            moments.setdefault(parameter, {})[entry] = empty.detach()
    tensors = {}
    for key, value, name in _tensors(model, optimizer, average, moments):
        if shapes.get(key) != value.shape:
            raise TensorMismatch(
                f"{path} belongs to another model: {name} is missing or has another shape; start a new run."
            )
        tensors[key] = value
    try:
        load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, UnreadableFile):
            raise first from error
        raise UnreadableFile(f"{path} is damaged: {str(first) or type(first).__name__}.") from error
    for of, found in moments.items():
        optimizer.state[of] = {
            entry: value if value.shape == of.shape else value.reshape(()) for entry, value in found.items()
        }


def step_device(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    """Return where an optimizer counts the steps of a parameter: next to it if a kernel reads them, else on the CPU."""
    there = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return parameter.device if there else torch.device("cpu")


def _tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Average | None,
    moments: Mapping[Tensor, Mapping[str, Tensor]] | None = None,
) -> Iterator[tuple[str, Tensor, str]]:
    """Yield (key, tensor, parameter) of a state; single numbers have one dimension, which the format needs."""
    for name, parameter in model.named_parameters():
        yield f"model/{name}", parameter.detach(), name
        if average is not None:
            yield f"ema/{name}", average.weights[name], name
        for entry, value in (optimizer.state if moments is None else moments).get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"optimizer/{name}/{entry}", value if value.ndim else value.reshape(1), name


def _reader(path: Path, parts: Mapping[str, Any]) -> Any:
    """Return a reader that compares the checksum of each file before the first tensor is read."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    place, sums = path.parent / Path(parts["folder"]).name, parts["files"]
    if missing := [name for name in sums if not (place / name).is_file()]:
        raise UnreadableFile(f"{path} is damaged: its part {missing[0]} is missing.")

    class Checked(HuggingFaceStorageReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            for file in sorted({Path(self.storage_data[item.storage_index].relative_path) for item in plan.items}):
                if list(_sum(file)[1]) != list(sums.get(file.name, ())):
                    raise UnreadableFile(f"{path} is damaged: the checksum of its part {file.name} does not match.")
            return super().read_data(plan, planner)

    return Checked(str(place))


def _sum(file: Path) -> tuple[str, tuple[int, str]]:
    """Return a file's name, its size and its CRC-32."""
    size = crc = 0
    with open(file, "rb") as opened:
        while block := opened.read(2**22):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return file.name, (size, f"{crc:08x}")


def _new_folder(folder: Path, prefix: str) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        os.chmod(made, 0o755)
        return made
    except OSError as error:
        raise OutputError(f"Could not write to {folder}: {reason(error)}. Nothing there was changed.") from error
