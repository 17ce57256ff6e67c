"""`--on ray`: embed, predict and eval on a cluster. Results are a folder of Parquet shards; starting again resumes."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL
import torch

from vitkit.cluster import on_ray
from vitkit.cluster.columns import read_errors, read_outputs
from vitkit.cluster.plan import Shard, names_hash, shard_images, shards
from vitkit.cluster.results import Folder, Manifest
from vitkit.cluster.work import Settings
from vitkit.data import remote
from vitkit.data.base import Source, Unlabelled
from vitkit.data.sources import parse
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.names import answer_names
from vitkit.evaluation.predict import Images
from vitkit.features.choice import choose
from vitkit.jobs.embed import parts_of
from vitkit.jobs.evaluate import Evaluation, conclude, matched
from vitkit.model.backbone import Backbone
from vitkit.runtime import AUTO, PRECISIONS
from vitkit.types import Tick

FORMAT = 1  # of the folder of results
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Job:
    """A job whose shards are all finished.

    Args:
        manifest: its shards and their hashes.
        shards: its shards, in order.
        images: number of images.
        computed: how many of them were computed now; the others were finished before.
        skipped: (name, reason) of every image that could not be read.
        seconds: time taken.
        precision: the precision.
    """

    manifest: Manifest
    shards: list[Shard]
    images: int
    computed: int
    skipped: list[tuple[str, str]]
    seconds: float
    precision: str


def images_of(given: Sequence[str]) -> dict[str, Source]:
    """Return the images to predict: a data set that is not a folder by its parts, or files, folders and patterns.

    Args:
        given: one s3:// address, .tar, .csv or .parquet file or folder of tar files; or anything that `predict` takes.
    """
    if "-" in given:
        raise ConfigError("--on ray does not read standard input; name files, folders or an address.")
    if len(given) == 1 and remote.is_remote(given[0]):
        place = given[0].partition("?")[0].lower()
        if not place.endswith((".tar", ".csv", ".parquet")):
            found = remote.read_images(given[0])
            if len(found):
                return {"all": found}
        return parts_of(given[0])
    if len(given) == 1:
        try:
            kind, _ = parse(given[0])
        except DataError:
            kind = "folder"
        if kind != "folder":
            return parts_of(given[0])
    source = Images(given)
    return {"all": Unlabelled(source)}


def run(
    task: str,
    model: Backbone,
    sources: Mapping[str, Source],
    out: str | Path,
    *,
    features: str | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    device: str = "auto",
    precision: str = AUTO,
    about: Mapping[str, Any] | None = None,
    progress: Tick | None = None,
    apart: bool | None = None,
) -> Job:
    """Compute all shards of a job that its folder does not have yet.

    Args:
        task: `embed`, `predict` or `eval`.
        model: the model, on the CPU.
        sources: {part: its images}; every machine of the cluster must be able to read them.
        out: the folder of results: an s3:// address, or a folder that all machines share.
        features: for `embed`, the feature, as `vitkit.features.choose` takes it (default: the model's own pooling).
        batch_size: images per batch.
        workers: actors that decode, at most (default: one per core of the cluster).
        device: `cuda`, `cpu`, or `auto` for CUDA if the cluster has GPUs.
        precision: fp32, bf16, fp16, or `auto` for bf16 on CUDA and fp32 elsewhere.
        about: what `job.json` says besides, for people.
        progress: called with the number of images finished since the last call.
        apart: see `cluster.on_ray.run`.

    Raises:
        OutputError: the folder holds the results of another job.
        ConfigError: the cluster cannot do this.
    """
    start, report = time.perf_counter(), progress or (lambda count: None)
    if task != "embed":
        answer_names(model)  # refuses weights without a head before any work is done
    how = _settings(task, model, out, features, batch_size, device, precision)
    counts = {part: len(source) for part, source in sources.items()}
    image_bytes = len(model.input_spec.mean) * math.prod(model.input_spec.size)
    per_shard = shard_images(sum(counts.values()), batch_size, image_bytes)
    todo = shards(counts, per_shard)
    job = {
        "format": FORMAT,
        "task": task,
        "images": counts,
        "names": {
            part: names_hash(source.names, source.labels.tobytes(), source.class_names)
            for part, source in sources.items()
        },
        "weights": weights_hash(model),
        "preprocessing": model.input_spec.preprocessing,
        "decoder": PIL.__version__,
        "batch_size": batch_size,
        "shard_images": per_shard,
        "features": how.features,
        "precision": how.precision,
    }
    more = {"class_names": list(model.input_spec.class_names), **(about or {})}
    manifest = Manifest(Folder(how.out), job, more)
    finished = set(manifest.keep(shard.name for shard in todo))
    left = [shard for shard in todo if shard.name not in finished]
    report(sum(len(shard) for shard in todo) - sum(len(shard) for shard in left))
    try:
        for entry in on_ray.run(how, model, sources, left, decoders=workers, apart=apart):
            manifest.add(entry)
            report(entry.rows)
    finally:
        manifest.close()
    manifest.folder.tidy()
    return Job(
        manifest,
        todo,
        sum(map(len, todo)),
        sum(map(len, left)),
        read_errors(manifest, todo),
        time.perf_counter() - start,
        how.precision,
    )


def _settings(
    task: str, model: Backbone, out: str | Path, features: str | None, batch_size: int, device: str, precision: str
) -> Settings:
    if device not in DEVICES:
        raise ConfigError(f"With --on ray, --device is one of {', '.join(DEVICES)}; got {device!r}.")
    if precision not in (AUTO, *PRECISIONS):
        raise ConfigError(f"Expected --precision {', '.join(PRECISIONS)} or {AUTO}; got {precision!r}.")
    cards = on_ray.gpus()
    if device == "cuda" and not cards:
        raise ConfigError("Expected a cluster with GPUs for --device cuda; it has none. Use --device auto.")
    kind = "cuda" if cards and device != "cpu" else "cpu"
    if precision == AUTO:
        precision = "bf16" if kind == "cuda" and task != "predict" else "fp32"
    if precision == "fp16" and kind == "cpu":
        raise ConfigError("fp16 runs on GPUs only; use --precision bf16 or fp32.")
    name = choose(features, model.config).name if task == "embed" else None
    return Settings(task, name, batch_size, kind, precision, Folder(out).place)


def weights_hash(model: Backbone) -> str:
    """Hash everything that a model computes with: its configuration, its weights, and the classes that it knows.

    Args:
        model: the model, on the CPU.
    """
    h = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        h.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        h.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    h.update((model.known.to_text() if model.known is not None else "").encode())
    h.update(repr((model.input_spec.class_names, model.input_spec.thresholds)).encode())
    return h.hexdigest()


def evaluate(
    model: Backbone,
    source: Source,
    out: str | Path,
    *,
    weights: str = "",
    data: str = "",
    part: str = "",
    same_order: bool = False,
    worst: int = 20,
    **how: Any,
) -> Evaluation:
    """Evaluate a model on a cluster, with the same result as `jobs.evaluate.evaluate`.

    Args:
        model: the model, on the CPU.
        source: the images.
        out: see `run`.
        weights: see `jobs.evaluate.evaluate`.
        data: see there.
        part: see there.
        same_order: see there.
        worst: see there.
        how: further arguments of `run`.
    """
    names, to_output = matched(model, source, data, same_order)
    about = {"weights": weights, "data": data, "part": part}
    job = run("eval", model, {"eval": source}, out, about=about, **how)
    found = read_outputs(job.manifest, job.shards, source)
    return conclude(
        found,
        names,
        to_output,
        model.input_spec.thresholds,
        worst,
        weights=weights,
        data=data,
        part=part,
        seconds=job.seconds,
        precision=f"{job.precision} on Ray",
    )
