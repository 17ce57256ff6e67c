"""Batches from a source: the same bytes for any number of workers, from any step, for any number of processes.

    TrainLoader    endless, from step n: order(seed, step) -> augment(rng(seed, epoch, index)) -> mix(seed, step)
    EvalLoader     every image exactly once over all processes, preprocessed as the InputSpec says

Workers only turn rows (epoch, index) into 8-bit pixels; they hold no random state. Batches are put together, normalised
and mixed by the process that iterates, on the device it names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from vitkit.data import mix as mixing
from vitkit.data.augment import Augment
from vitkit.data.base import Source
from vitkit.data.mix import Mix
from vitkit.data.order import Order, share, within
from vitkit.data.preprocess import normalize
from vitkit.data.sample_worker import Bad, Row, SampleWorker
from vitkit.data.workers import default_workers, parallel_map
from vitkit.errors import BadImage, ConfigError, DataError
from vitkit.model.config import InputSpec

BadImages = Literal["fail", "skip"]
Device = torch.device | str | None


@dataclass(frozen=True)
class Batch:
    """One batch.

    Args:
        pixels: [B, C, H, W] float32, normalised (and mixed).
        labels: [B] int64 classes.
        index: [B] int64 place of each image in the source.
        others: [B] int64 class of each image's partner in the mix; `labels` where nothing was mixed.
        weight: [B] float32 share of each image that is its own; 1 where nothing was mixed.
    """

    pixels: Tensor
    labels: Tensor
    index: Tensor
    others: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def targets(self, classes: int, smoothing: float = 0.0) -> Tensor:
        """Soft targets [B, classes]; see `mix.soft_targets`."""
        return mixing.soft_targets(self.labels, self.others, self.weight, classes, smoothing)


@dataclass(frozen=True)
class _Task:
    """What a batch is made of.

    Args:
        rows: the images to read.
    """

    rows: list[Row]


@dataclass(frozen=True)
class _Step(_Task):
    """What a training batch is made of.

    Args:
        step: its number.
        plan: the mix.
        places: where in the step's order the rows stand; see `TrainLoader.plan`.
    """

    step: int
    plan: mixing.Plan
    places: list[int]


Planned = TypeVar("Planned", bound=_Task)


class _Loader:
    def __init__(
        self,
        source: Source,
        spec: InputSpec,
        how: Augment | None,
        seed: int,
        batch_size: int,
        rank: int,
        ranks: int,
        workers: int | None,
        prefetch: int,
        device: Device,
        bad_images: BadImages,
        on_bad: Callable[[str, str], None] | None,
    ) -> None:
        within("batch_size", batch_size, 1)
        within("prefetch", prefetch, 1)
        within("workers", workers or 0, 0)
        if bad_images not in get_args(BadImages):
            raise ConfigError(f"bad_images must be one of {', '.join(get_args(BadImages))}; got {bad_images!r}.")
        share(1, rank, ranks)  # refuses a rank that is out of range
        if not len(source):
            raise DataError("The data set is empty.")
        self.source, self.spec, self.batch_size, self.seed = source, spec, batch_size, seed
        self.rank, self.ranks, self.prefetch = rank, ranks, prefetch
        self.device = torch.device(device) if device is not None else torch.device("cpu")
        spare = how is not None and self.device.type != "cpu"  # the model trains elsewhere
        self.workers = default_workers(source, ranks, spare) if workers is None else workers
        self.bad_images, self.on_bad = bad_images, on_bad
        self.skipped: dict[str, str] = {}  # name -> why, of every image that was skipped so far
        self._work = SampleWorker(source, spec, how, seed)

    def _pieces(self, tasks: Iterable[Planned], size: int) -> Iterator[tuple[Planned, list[Tensor], list[Bad]]]:
        """The tasks with their results; each task is cut into pieces, and its bad rows are counted together."""
        piece = self._work.piece
        given, awaited = itertools.tee(tasks)  # workers run ahead; what they were given is kept until it is awaited
        cuts = (task.rows[i : i + piece] for task in given for i in range(0, len(task.rows), piece))
        ahead = max(2, -(-self.prefetch * -(-size // piece) // max(self.workers, 1)))
        pin = self.device.type == "cuda"
        done = parallel_map(self._work, cuts, self.workers, ahead=ahead, pin=pin and not self._work.tiny)
        for task in awaited:
            parts: list[Tensor] = []
            bad: list[Bad] = []
            for start in range(0, len(task.rows), piece):
                part, trouble = next(done)
                parts.append(torch.as_tensor(part))
                bad += [(start + position, why) for position, why in trouble]
            if self._work.tiny and pin:  # one copy to the GPU instead of many
                parts = [torch.cat(parts).pin_memory()]
            yield task, parts, bad

    def _skip(self, index: int, why: str) -> None:
        """Record an image that cannot be read, or raise where the run shall fail."""
        if self.bad_images == "fail":
            raise BadImage(why)
        name = self.source.names[index]
        if name not in self.skipped:
            self.skipped[name] = why
            if self.on_bad is not None:
                self.on_bad(name, why)

    def _labels(self, rows: list[Row]) -> Tensor:
        return torch.from_numpy(self.source.labels[[i for _, i in rows]]).to(torch.int64)

    def _to_device(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)


class TrainLoader(_Loader):
    """Endless augmented batches, a function of (seed, step).

    Args:
        source: where images come from.
        spec: what the model expects.
        augment: how images are varied.
        batch_size: images of a global batch, over all processes.
        seed: the run's seed; decides order, augmentation and mixing.
        mix: MixUp and CutMix.
        rank: this process, from 0.
        ranks: processes in all; each takes its part of every global batch.
        workers: processes that decode; None for one a core (none for sources in memory, where the CPU trains).
        prefetch: batches that are prepared ahead.
        device: where batches are put and normalised.
        bad_images: `fail` raises BadImage; `skip` puts the next readable image of the order in its place.
        on_bad: called with (name, sentence) once for every image that is skipped; `skipped` keeps them too.
    """

    def __init__(
        self,
        source: Source,
        spec: InputSpec,
        augment: Augment | None = None,
        *,
        batch_size: int = 32,
        seed: int = 0,
        mix: Mix | None = None,
        rank: int = 0,
        ranks: int = 1,
        workers: int | None = None,
        prefetch: int = 2,
        device: Device = None,
        bad_images: BadImages = "fail",
        on_bad: Callable[[str, str], None] | None = None,
    ) -> None:
        super().__init__(
            source,
            spec,
            augment or Augment(),
            seed,
            batch_size,
            rank,
            ranks,
            workers,
            prefetch,
            device,
            bad_images,
            on_bad,
        )
        if batch_size < ranks:
            raise ConfigError(
                f"A global batch of {batch_size} cannot be shared by {ranks} processes; give each at least one image."
            )
        self.order = Order(len(source), batch_size, seed=seed)
        self.mix = mix or Mix()

    def steps(self, epochs: float) -> int:
        """Steps that make up so many epochs."""
        return self.order.steps(epochs)

    def plan(self, step: int) -> tuple[mixing.Plan, list[int]]:
        """What happens at a step: the mix, and the places in the step's order that this process needs.

        Its own come first; behind them the partners that belong to another process.
        """
        plan = mixing.plan(self.mix, self.seed, step, self.batch_size)
        own = range(self.batch_size)[share(self.batch_size, self.rank, self.ranks)]
        if plan.weight == 1.0:
            return plan, list(own)
        partners = dict.fromkeys(mixing.partner(o, self.batch_size) for o in own)
        return plan, [*own, *(p for p in partners if p not in own)]

    def rows(self, step: int) -> list[Row]:
        """(epoch, index) of the images this process reads at a step."""
        return self._step(step).rows

    def _step(self, step: int) -> _Step:
        plan, places = self.plan(step)
        everything = self.order.rows(step)
        return _Step([everything[plan.order[place]] for place in places], step, plan, places)

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """The batches of steps start, start + 1, ... (up to `stop`, else for ever).

        Args:
            start: first step; costs the same wherever it lies.
            stop: step before which it ends.
        """
        steps = itertools.count(start) if stop is None else range(start, stop)
        for step, x, bad in self._pieces(map(self._step, steps), self.batch_size // self.ranks):
            yield self._assemble(*self._replace(step, x, bad))

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def _replace(self, step: _Step, x: list[Tensor], bad: list[Bad]) -> tuple[_Step, list[Tensor]]:
        """Put the next readable images of the order where bad ones were: batches keep their size."""
        if not bad:
            return step, x
        rows = list(step.rows)
        good = itertools.chain.from_iterable(x)
        why = dict(bad)
        images: list[Tensor] = []
        for position in range(len(rows)):
            if position not in why:
                images.append(next(good))
                continue
            self._skip(rows[position][1], why[position])
            place = step.step * self.batch_size + step.plan.order[step.places[position]]
            rows[position], image = self._next_readable(place)
            images.append(image)
        return replace(step, rows=rows), [torch.stack(images)]

    def _next_readable(self, place: int) -> tuple[Row, Tensor]:
        for ahead in range(1, 2 * len(self.source) + 1):
            row = self.order.at(place + ahead)
            if self.source.names[row[1]] in self.skipped:
                continue
            x, bad = self._work([row])
            if not bad:
                return row, torch.as_tensor(x[0])
            self._skip(row[1], bad[0][1])
        raise DataError("No image of the data set can be read; run `vitkit doctor` on it.")

    def _assemble(self, step: _Step, x: list[Tensor]) -> Batch:
        rows, plan, places = step.rows, step.plan, step.places
        count = len(range(self.batch_size)[share(self.batch_size, self.rank, self.ranks)])
        labels = self._labels(rows)
        z = normalize([self._to_device(part) for part in x], self.spec)
        others, weight = labels[:count], 1.0
        out = z[:count]
        if plan.weight != 1.0:
            at = {place: i for i, place in enumerate(places)}
            partners = torch.tensor([at[mixing.partner(place, self.batch_size)] for place in places[:count]])
            out, weight = mixing.apply(out, z[self._to_device(partners)], plan)
            others = labels[partners]
        index = torch.tensor([i for _, i in rows[:count]], dtype=torch.int64)
        return Batch(out, *map(self._to_device, (labels[:count], index, others, torch.full((count,), weight))))


class EvalLoader(_Loader):
    """Every image of a source once, in its order, preprocessed.

    Args:
        source: where images come from.
        spec: what the model expects.
        batch_size: images of a batch of this process; the last may be smaller.
        rank: this process, from 0.
        ranks: processes in all; their parts differ by at most one image, and none is read twice.
        workers: processes that decode; None for one a core (none for sources in memory).
        prefetch: batches that are prepared ahead.
        device: where batches are put and normalised.
        bad_images: `fail` raises BadImage; `skip` leaves the image out.
        on_bad: called with (name, sentence) once for every image that is skipped; `skipped` keeps them too.
    """

    def __init__(
        self,
        source: Source,
        spec: InputSpec,
        *,
        batch_size: int = 32,
        rank: int = 0,
        ranks: int = 1,
        workers: int | None = None,
        prefetch: int = 2,
        device: Device = None,
        bad_images: BadImages = "fail",
        on_bad: Callable[[str, str], None] | None = None,
    ) -> None:
        super().__init__(source, spec, None, 0, batch_size, rank, ranks, workers, prefetch, device, bad_images, on_bad)
        self.indices = range(len(source))[share(len(source), rank, ranks)]

    def __len__(self) -> int:
        return math.ceil(len(self.indices) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        starts = range(0, len(self.indices), self.batch_size)
        tasks = (_Task([(0, index) for index in self.indices[i : i + self.batch_size]]) for i in starts)
        for task, x, bad in self._pieces(tasks, self.batch_size):
            rows = task.rows
            for position, why in bad:
                self._skip(rows[position][1], why)
            left_out = {position for position, _ in bad}
            kept = [row for position, row in enumerate(rows) if position not in left_out]
            if not kept:
                continue
            labels = self._to_device(self._labels(kept))
            index = self._to_device(torch.tensor([i for _, i in kept], dtype=torch.int64))
            yield Batch(
                normalize([self._to_device(part) for part in x], self.spec),
                labels,
                index,
                labels,
                torch.ones(len(kept), device=self.device),
            )
