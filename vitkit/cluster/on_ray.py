"""Run shards on a Ray cluster with Ray Data: CPU actors decode, GPU actors compute, and any of them may die.

Without GPUs one kind of actor does both, so that pixels stay where they are. Ray Data restarts actors, moves work off
dead machines and adds actors where machines join. If it gives up, the shards that are left start again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from vitkit.cluster.plan import Shard
from vitkit.cluster.results import Entry
from vitkit.cluster.work import Computer, Decoded, Decoder, Settings
from vitkit.data.base import Source
from vitkit.errors import ConfigError, LostWorker, VitkitError
from vitkit.model.backbone import Backbone
from vitkit.model.config import InputSpec
from vitkit.optional import library, need

ATTEMPTS = 3  # starts without a single finished shard before the job gives up

log = logging.getLogger("vitkit")


def connect() -> dict[str, float]:
    """Connect to the cluster that RAY_ADDRESS names, or to a local one, and return its resources.

    Raises:
        MissingDependency: Ray, or what Ray Data needs, is not installed.
        ConfigError: RAY_ADDRESS names a Ray Client, or nothing that answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send usage statistics to its makers
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # or Ray warns of how Ray Data starts its actors
    need("scale,data", "ray", "pyarrow", "pandas")
    ray = library("ray", "scale")
    data = library("ray.data", "scale")
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ConfigError(
            f"Expected RAY_ADDRESS to be host:port or auto; got {address}, a Ray Client. Run the command on the "
            f"cluster: ray job submit -- vitkit ..."
        )
    if not ray.is_initialized():
        try:
            with _hidden_stderr():
                ray.init(logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise ConfigError(
                f"Expected a Ray cluster at {address or 'this machine'}; it does not answer "
                f"({' '.join(str(error).split())[:300]})."
            ) from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    return {name: float(count) for name, count in ray.cluster_resources().items()}


@contextmanager
def _hidden_stderr() -> Iterator[None]:
    """Hide what Ray's C++ part prints while it starts; errors are raised all the same."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def gpus() -> int:
    """Return the number of GPUs of the cluster."""
    return int(connect().get("GPU", 0))


def run(
    settings: Settings,
    model: Backbone,
    sources: Mapping[str, Source],
    shards: Sequence[Shard],
    *,
    decoders: int | None = None,
    apart: bool | None = None,
) -> Iterator[Entry]:
    """Compute shards and yield each one's line of the manifest as soon as its file is written.

    Args:
        settings: what to compute, and how.
        model: the model, on the CPU; it is sent to the actors.
        sources: {part: its images}; every machine must be able to read them.
        shards: the shards to compute.
        decoders: actors that decode, at most (default: one per core of the cluster).
        apart: whether decoding and computing have actors of their own, and the latter a GPU each (default: on CUDA).

    Raises:
        VitkitError: an actor met an error that another attempt would meet again.
        LostWorker: the cluster lost its actors again and again.
    """
    import ray

    resources = connect()
    cpus, cards = max(int(resources.get("CPU", 1)), 1), max(int(resources.get("GPU", 0)), 1)
    apart = settings.device == "cuda" if apart is None else apart
    data, weights = ray.put((os.getcwd(), sources)), ray.put(model)
    left = {shard.name: shard for shard in shards}
    attempts = 0
    while left:
        before = len(left)
        try:
            todo = list(left.values())
            for row in _pipeline(settings, model.input_spec, [data], [weights], todo, decoders or cpus, cards, apart):
                if row["failed"]:
                    raise _errors()[row["kind"]](row["failed"])
                entry = Entry(row["shard"], int(row["rows"]), int(row["errors"]), row["sha256"])
                if left.pop(entry.shard, None) is not None:
                    yield entry
        except ray.exceptions.RayError as error:
            attempts = attempts + 1 if len(left) == before else 0
            reason = " ".join((str(error).strip().splitlines() or [type(error).__name__])[-1].split())[:300]
            if attempts >= ATTEMPTS:
                raise LostWorker(
                    f"The cluster failed {attempts} times without finishing a shard ({reason}). Finished shards are "
                    f"kept: start the same command again to continue."
                ) from error
            log.warning("note: the cluster failed (%s); %d shards are left and start again.", reason, len(left))


def _errors() -> dict[str, type[VitkitError]]:
    """Return our errors by name: an actor cannot raise them through Ray as they are."""
    found: dict[str, type[VitkitError]] = {}
    kinds: list[type[VitkitError]] = [VitkitError]
    for kind in kinds:
        found[kind.__name__] = kind
        kinds += kind.__subclasses__()
    return found


def _pipeline(
    settings: Settings,
    spec: InputSpec,
    data: list[Any],
    weights: list[Any],
    shards: list[Shard],
    decoders: int,
    cards: int,
    apart: bool,
) -> Iterator[dict[str, Any]]:
    """Yield what the last actor says of each shard. `data` and `weights` hold references, which lists keep as such."""
    import ray.data
    from ray.data import ActorPoolStrategy

    tasks = ray.data.from_items([asdict(shard) for shard in shards], override_num_blocks=len(shards))

    def pool(most: int) -> Any:
        return ActorPoolStrategy(min_size=1, max_size=max(min(most, len(shards)), 1))

    if not apart:
        both = tasks.map_batches(
            _Both, batch_size=1, compute=pool(decoders), num_cpus=1, fn_constructor_args=(settings, data, weights)
        )
        return iter(both.iter_rows())
    decoded = tasks.map_batches(
        _Decode, batch_size=1, compute=pool(decoders), num_cpus=1, fn_constructor_args=(spec, data)
    )
    computed = decoded.map_batches(
        _Compute,
        batch_size=1,
        compute=pool(cards),
        num_cpus=0,
        num_gpus=1,
        fn_constructor_args=(settings, data, weights),
    )
    return iter(computed.iter_rows())


Block = dict[str, Any]  # a batch of Ray Data with one shard: {column: one value}


def _shard(block: Block) -> Shard:
    return Shard(str(block["part"][0]), int(block["number"][0]), int(block["start"][0]), int(block["stop"][0]))


def _one(**values: Any) -> Block:
    return {name: [value] for name, value in values.items()}


def _failed(sentence: str, kind: str) -> Block:
    return _one(shard="", rows=0, errors=0, sha256="", failed=sentence, kind=kind)


def _sources(data: list[Any]) -> dict[str, Source]:
    """Return the images. Relative paths start at the driver's folder, if this machine has it."""
    import ray

    folder, sources = ray.get(data[0])
    with suppress(OSError):
        os.chdir(folder)
    return sources


class _Decode:
    def __init__(self, spec: InputSpec, data: list[Any]) -> None:
        self.decoder = Decoder(_sources(data), spec)

    def __call__(self, block: Block) -> Block:
        shard = _shard(block)
        try:
            images = self.decoder(shard)
        except VitkitError as error:
            return _one(**asdict(shard), failed=str(error), kind=type(error).__name__)
        return _one(**asdict(shard), **vars(images), failed="", kind="")


class _Compute:
    def __init__(self, settings: Settings, data: list[Any], weights: list[Any]) -> None:
        import ray

        self.problem: VitkitError | None = None
        try:
            self.computer = Computer(settings, ray.get(weights[0]), _sources(data))
        except VitkitError as error:  # Ray would only start the actor again
            self.problem = error

    def compute(self, shard: Shard, images: Decoded) -> Block:
        try:
            if self.problem is not None:
                raise self.problem
            return _one(**asdict(self.computer(shard, images)), failed="", kind="")
        except VitkitError as error:
            return _failed(str(error), type(error).__name__)

    def __call__(self, block: Block) -> Block:
        if block["failed"][0]:
            return _failed(str(block["failed"][0]), str(block["kind"][0]))
        images = Decoded(block["pixels"][0], list(block["sha256"][0]), list(block["errors"][0]))
        return self.compute(_shard(block), images)


class _Both(_Compute):
    def __init__(self, settings: Settings, data: list[Any], weights: list[Any]) -> None:
        import ray

        super().__init__(settings, data, weights)
        self.decoder = Decoder(_sources(data), ray.get(weights[0]).input_spec)

    def __call__(self, block: Block) -> Block:
        shard = _shard(block)
        try:
            images = self.decoder(shard)
        except VitkitError as error:
            return _failed(str(error), type(error).__name__)
        return self.compute(shard, images)
