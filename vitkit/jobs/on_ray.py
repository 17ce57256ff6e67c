"""`--on ray`: embed, predict and eval on a cluster. Results are a folder of Parquet shards; starting again resumes."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import PIL
import torch

from vitkit.cluster import on_ray
from vitkit.cluster.columns import read_errors, read_outputs
from vitkit.cluster.plan import Shard, names_hash, shard_images, shards
from vitkit.cluster.results import Folder, Manifest
from vitkit.cluster.work import Settings
from vitkit.data import remote
from vitkit.data.base import Source, Unlabelled
from vitkit.data.batch import SMALL_BATCH, BadImages
from vitkit.data.sources import parse
from vitkit.errors import BadImage, ConfigError, DataError
from vitkit.evaluation.logits import Outputs
from vitkit.evaluation.names import answer_names
from vitkit.evaluation.predict import Images
from vitkit.features.choice import choose
from vitkit.jobs.embed import parts_of
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
    batch_size: int | None = None,
    workers: int | None = None,
    device: str = "auto",
    precision: str = AUTO,
    about: Mapping[str, Any] | None = None,
    progress: Tick | None = None,
    apart: bool | None = None,
    bad_images: BadImages = "skip",
) -> Job:
    """Compute all shards of a job that its folder does not have yet.

    Args:
        task: `embed`, `predict` or `eval`.
        model: the model, on the CPU.
        sources: {part: its images}; every machine of the cluster must be able to read them.
        out: the folder of results: an s3:// address, or a folder that all machines share.
        features: for `embed`, the feature, as `vitkit.features.choose` takes it (default: the model's own pooling).
        batch_size: images per batch (default: SMALL_BATCH, whatever the device).
        workers: actors that decode, at most (default: one per core of the cluster).
        device: `cuda`, `cpu`, or `auto` for CUDA if the cluster has GPUs.
        precision: fp32, bf16, fp16, or `auto` for bf16 on CUDA and fp32 elsewhere.
        about: what `job.json` says besides, for people.
        progress: called with the number of images finished since the last call.
        apart: see `cluster.on_ray.run`.
        bad_images: `skip` gives an unreadable image a row with its error; `fail` stops the job at the first one.

    Raises:
        BadImage: with `fail`; what is finished is kept.
        OutputError: the folder holds the results of another job.
        ConfigError: the cluster cannot do this.
    """
    start, report = time.perf_counter(), progress or (lambda count: None)
    if bad_images not in get_args(BadImages):
        raise ConfigError(f"Expected --bad-images {' or '.join(get_args(BadImages))}; got {bad_images!r}.")
    batch_size = batch_size or SMALL_BATCH
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

    def refuse(done: Sequence[Shard]) -> None:
        if bad_images == "fail" and (bad := read_errors(manifest, done)):
            raise BadImage(f"{bad[0][1]} Finished shards are kept; --bad-images skip continues and lists such images.")

    refuse([shard for shard in todo if shard.name in finished])
    report(sum(len(shard) for shard in todo) - sum(len(shard) for shard in left))
    try:
        for entry in on_ray.run(how, model, sources, left, decoders=workers, apart=apart):
            manifest.add(entry)
            report(entry.rows)
            refuse([shard for shard in left if entry.errors and shard.name == entry.shard])
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


def logits(model: Backbone, source: Source, out: str | Path, **how: Any) -> tuple[Outputs, str]:
    """Compute logits on a cluster, for `jobs.evaluate.evaluate`; also return the precision.

    Args:
        model: the model, on the CPU.
        source: the images.
        out: see `run`.
        how: further arguments of `run`.
    """
    job = run("eval", model, {"eval": source}, out, **how)
    return read_outputs(job.manifest, job.shards, source), f"{job.precision} on Ray"
