"""What an actor does with one shard: decode it, run the model on it, write it. Nothing here needs Ray.

The numbers are those of one machine: images are decoded by the loader's own worker, and batches hold the same images as
there. Shards start at multiples of the batch size, and an unreadable image leaves a gap in its batch.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vitkit.cluster.columns import Columns, about, answers, parquet, vectors
from vitkit.cluster.plan import Shard
from vitkit.cluster.results import Entry, Folder
from vitkit.data.base import Source
from vitkit.data.batch import Batch
from vitkit.data.decode import Raw, digest
from vitkit.data.eval_loader import EvalLoader, Made
from vitkit.data.sample_worker import EvalWorker, Piece
from vitkit.errors import BadImage, DataError, Unreachable
from vitkit.evaluation.logits import stream
from vitkit.evaluation.names import answer_names
from vitkit.features.choice import choose
from vitkit.features.embed import forward, need_finite
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import Classifier, Running
from vitkit.model.config import InputSpec
from vitkit.model.known import Judged
from vitkit.runtime import Runtime
from vitkit.speed.frozen import way
from vitkit.types import Array


@dataclass(frozen=True)
class Settings:
    """How shards are computed.

    Args:
        task: a row of TASKS.
        features: the feature, for `embed`.
        batch_size: images per batch.
        device: `cpu` or `cuda`.
        precision: fp32, bf16 or fp16.
        out: the folder of results, an absolute path or an address.
    """

    task: str
    features: str | None
    batch_size: int
    device: str
    precision: str
    out: str


@dataclass(frozen=True)
class Decoded:
    """The images of one shard, n of which could be read.

    Args:
        pixels: [n, H, W, C] uint8.
        sha256: hash of each image's bytes; empty if there were none.
        errors: why each image could not be read; empty if it could.
    """

    pixels: Array
    sha256: list[str]
    errors: list[str]


class Decoder:
    """Decodes shards.

    Args:
        sources: {part: its images}.
        spec: the input that the model expects.
    """

    def __init__(self, sources: Mapping[str, Source], spec: InputSpec) -> None:
        self.hashed, self.spec = {part: _Hashed(source) for part, source in sources.items()}, spec

    def __call__(self, shard: Shard) -> Decoded:
        """Decode all images of a shard.

        Raises:
            DataError: the storage did not deliver an image, or this machine does not have the data.
        """
        hashed, images = self.hashed[shard.part], range(shard.start, shard.stop)
        hashed.found.clear()
        work = EvalWorker(hashed, self.spec, [images], hashed=False)
        pixels = np.empty(work.size, np.uint8)
        piece = work(0, pixels)
        why = dict(piece.bad)
        return Decoded(
            pixels.reshape(-1, *work.shape)[: piece.good],
            [hashed.found.get(i, "") for i in images],
            [why.get(position, "") for position in range(len(shard))],
        )


class _Hashed(Source):
    """A source that keeps the hash of every image that is read."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.labels, source.class_names, source.names)
        self.source, self.in_memory, self.ready_for = source, source.in_memory, source.ready_for
        self.found: dict[int, str] = {}

    def raw(self, i: int) -> Raw:
        try:
            raw = self.source.raw(i)
        except Unreachable as error:  # not the image's fault: no row with an error, the job stops
            raise DataError(str(error)) from error
        except BadImage as error:
            missing = error.__cause__ if isinstance(error.__cause__, FileNotFoundError) else None
            folder = os.path.dirname(os.path.abspath(missing.filename)) if missing and missing.filename else ""
            if folder and not os.path.isdir(folder):  # nor is this
                raise DataError(
                    f"Expected the data on every machine; {platform.node()} has no folder {folder}. Use storage that "
                    f"all machines share, or an s3:// address."
                ) from error
            raise
        self.found[i] = digest(raw).tobytes().hex()
        return raw


class _Decoded(EvalLoader):
    """The batches of one shard, as EvalLoader would make them."""

    def __init__(
        self, source: Source, spec: InputSpec, batch_size: int, device: torch.device, shard: Shard, images: Decoded
    ) -> None:
        super().__init__(source, spec, batch_size=batch_size, workers=0, device=device, bad_images="skip")
        self.shard, self.images = shard, images

    def __iter__(self) -> Generator[Batch, None, None]:
        return self._kept(self._assembled())

    def _assembled(self) -> Iterator[Made]:
        pixels, used = torch.from_numpy(self.images.pixels), 0
        for start in range(0, len(self.shard), self.batch_size):
            errors = self.images.errors[start : start + self.batch_size]
            bad = [(position, error) for position, error in enumerate(errors) if error]
            good = len(errors) - len(bad)
            first = self.shard.start + start
            piece = Piece(good, bad, None), pixels[used : used + good].reshape(-1)
            used += good
            yield self._batch([range(first, first + len(errors))], [piece])


class Computer:
    """Runs the model on decoded shards and writes their files.

    Args:
        settings: what to compute, and how.
        model: the model, on the CPU.
        sources: {part: its images}.

    Raises:
        VitkitError: this machine cannot compute it.
    """

    def __init__(self, settings: Settings, model: Backbone, sources: Mapping[str, Source]) -> None:
        self.runtime = Runtime(settings.device, settings.precision)
        self.model, self.sources = model.to(self.runtime.device).eval(), sources
        self.settings, self.folder = settings, Folder(settings.out)
        counts = {part: len(source) for part, source in sources.items()}
        self.compute = {part: TASKS[settings.task](self, count) for part, count in counts.items()}

    def __call__(self, shard: Shard, images: Decoded) -> Entry:
        """Compute one shard, write its file, and return its line of the manifest."""
        source, settings = self.sources[shard.part], self.settings
        loader = _Decoded(source, self.model.input_spec, settings.batch_size, self.runtime.device, shard, images)
        data = parquet(about(source, shard, images.sha256, images.errors) | self.compute[shard.part](loader))
        self.folder.write(shard.name, data)
        errors = sum(map(bool, images.errors))
        return Entry(shard.name, len(shard), errors, hashlib.sha256(data).hexdigest())


Compute = Callable[[_Decoded], Columns]  # the batches of a shard -> its columns


def _readable(loader: _Decoded) -> Array:
    return np.array([not error for error in loader.images.errors], bool)


def _embed(on: Computer, images: int) -> Compute:
    """Features, as `features.embed.fill` computes them."""
    model, runtime = on.model, on.runtime
    choice = choose(on.settings.features, model.config)
    by = way(model, runtime.precision, images, choice.name, on.settings.batch_size)
    run = forward(model, choice, by, runtime)

    def compute(loader: _Decoded) -> Columns:
        found = [np.empty((0, choice.width), np.float32)]
        for batch in loader:
            found.append(run(batch.pixels).cpu().numpy())
            need_finite(found[-1], loader.source, batch.index.numpy())
        return {"feature": vectors(np.concatenate(found), _readable(loader))}

    return compute


def _predict(on: Computer, images: int) -> Compute:
    """Answers, as `evaluation.predict.predictions` gives them."""
    model = on.model
    judged = model.known is not None
    run: Classifier = Judged(model) if judged else model

    def compute(loader: _Decoded) -> Columns:
        found = [logits for logits, _ in stream(run, loader)]
        rows = np.concatenate(found) if found else np.empty((0, len(answer_names(model)) + judged), np.float32)
        return answers(model, rows[:, : rows.shape[1] - judged], rows[:, -1] if judged else None, _readable(loader))

    return compute


def _eval(on: Computer, images: int) -> Compute:
    """Logits and answers, as `evaluation.logits.logits_of` computes them."""
    model, runtime = on.model, on.runtime
    by = way(model, runtime.precision, images, batch_size=on.settings.batch_size)
    run: Any = Running(by.build, model.input_spec) if by.build else model

    def compute(loader: _Decoded) -> Columns:
        found = [logits for logits, _ in stream(run, loader, runtime)]
        rows = np.concatenate(found) if found else np.empty((0, len(answer_names(model))), np.float32)
        readable = _readable(loader)
        return answers(model, rows, None, readable) | {"logits": vectors(rows, readable)}

    return compute


TASKS: dict[str, Callable[[Computer, int], Compute]] = {"embed": _embed, "predict": _predict, "eval": _eval}
