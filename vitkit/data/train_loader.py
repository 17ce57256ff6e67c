"""Batches for training: the same bytes for any number of workers and processes, starting at any step.

order(seed, step) -> augment(seed, epoch, index) -> mix(seed, step). Workers only turn rows (epoch, index) into 8-bit
pixels and hold no random state. The process that iterates assembles, normalises and mixes the batches, on the device of
your choice. For small images in memory, that device can augment too (on_device.py), and there are no workers.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vitkit.data import mix as mixing
from vitkit.data.augment import Augment
from vitkit.data.base import Source
from vitkit.data.batch import BadImages, Batch, Device, Loader
from vitkit.data.device_batches import DeviceBatches
from vitkit.data.mix import Mix
from vitkit.data.on_device import OnDevice
from vitkit.data.order import BalancedOrder, Order, share, within
from vitkit.data.preprocess import normalize
from vitkit.data.sample_worker import Bad, Row, SampleWorker
from vitkit.data.workers import parallel_map
from vitkit.errors import ConfigError, DataError, pick
from vitkit.model.config import InputSpec
from vitkit.types import Array

AugmentOn = Literal["cpu", "device"]

# How training images are drawn -> their order: each image once per epoch, or every class equally often.
SAMPLING: dict[str, Callable[[Source, int, int], Order]] = {
    "uniform": lambda source, batch_size, seed: Order(len(source), batch_size, seed=seed),
    "balanced": lambda source, batch_size, seed: BalancedOrder(source.labels, batch_size, seed=seed),
}


@dataclass(frozen=True)
class _Step:
    """A training batch to make.

    Args:
        rows: [n, 2] int64, (epoch, index) of the images to read.
        step: its number.
        plan: how it is mixed.
        places: [n], positions of the rows in the mixed global batch: this process's own, then partners from other
            processes.
        partners: positions in `rows` of what each of this process's images is mixed with.
    """

    rows: Array
    step: int
    plan: mixing.Plan
    places: Array
    partners: Array


class TrainLoader(Loader):
    """An endless sequence of augmented batches, a function of (seed, step).

    Args:
        source: where the images come from.
        spec: the input that the model expects.
        augment: how images are augmented (default: `Augment()`).
        batch_size: images in a global batch, over all processes (default: 32).
        seed: decides order, augmentation and mixing (default: 0).
        mix: MixUp and CutMix (default: neither).
        sampling: a row of SAMPLING: `uniform` (the default) or `balanced`.
        augment_on: `cpu` (the default), or `device` for images of one size in memory; see on_device.py.
        rank: this process, counted from 0.
        ranks: number of processes; each takes its part of every global batch.
        workers: worker processes for decoding (default: one per core; none for images in memory when the CPU trains).
        prefetch: batches to prepare in advance (default: 2).
        device: where batches are placed and normalised (default: the CPU).
        bad_images: `fail` (the default) raises BadImage; `skip` uses the next readable image of the order instead.
        on_bad: called with (name, error message) once for each skipped image; `skipped` records them too.
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
        sampling: str = "uniform",
        augment_on: str = "cpu",
        rank: int = 0,
        ranks: int = 1,
        workers: int | None = None,
        prefetch: int = 2,
        device: Device = None,
        bad_images: BadImages = "fail",
        on_bad: Callable[[str, str], None] | None = None,
    ) -> None:
        within("prefetch", prefetch, 1)
        super().__init__(source, spec, batch_size, rank, ranks, workers, device, bad_images, on_bad, augmenting=True)
        self.seed, self.prefetch = seed, prefetch
        self._work = SampleWorker(source, spec, augment or Augment(), seed)
        if batch_size < ranks:
            raise ConfigError(
                f"Expected a global batch of at least one image per process; got {batch_size} images for {ranks} "
                f"processes. Use a larger batch size."
            )
        self.order = pick(SAMPLING, sampling, "sampling")(source, batch_size, seed)
        self.mix = mix or Mix()
        if augment_on not in get_args(AugmentOn):
            raise ConfigError(f"augment_on must be one of {', '.join(get_args(AugmentOn))}; got {augment_on!r}.")
        on_device = augment_on == "device"
        self._own = np.arange(batch_size)[share(batch_size, rank, ranks)]  # positions in the mixed global batch
        self._whole: DeviceBatches | None = None
        if on_device:
            made = OnDevice(source, spec, augment or Augment(), seed, self.device)
            self._whole = DeviceBatches(made, source.labels, len(self._own))

    def steps(self, epochs: float) -> int:
        """Return the number of steps in `epochs` epochs."""
        return self.order.steps(epochs)

    def rows(self, step: int) -> list[Row]:
        """Return the (epoch, index) of the images that this process reads for a step."""
        return _tuples(self._step(step).rows)

    def _step(self, step: int) -> _Step:
        plan, places = mixing.plan(self.mix, self.seed, step, self.batch_size), self._own
        partners = np.arange(len(places))
        if plan.weight != 1.0:
            wanted = mixing.partners(places, self.batch_size)
            far = np.setdiff1d(wanted, places)  # in other processes
            places = np.concatenate([places, far])
            order = places.argsort()
            partners = order[np.searchsorted(places, wanted, sorter=order)]
        rows = self.order.array(step)[np.asarray(plan.order)[places]]
        return _Step(rows, step, plan, places, partners)

    def batches(
        self, start: int = 0, stop: int | None = None, on_wait: Callable[[float], None] | None = None
    ) -> Iterator[Batch]:
        """Yield the batches of steps start, start + 1, ...

        Args:
            start: first step; a later one takes no longer to reach (default: 0).
            stop: the step to stop before (default: never stop).
            on_wait: see `parallel_map`.
        """
        steps = itertools.count(start) if stop is None else range(start, stop)
        if self._whole is not None:
            yield from self._on_device(self._whole, steps)
            return
        for step, x, bad in self._pieces(map(self._step, steps), self.batch_size // self.ranks, on_wait):
            yield self._assemble(*self._replace(step, x, bad))

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def _pieces(
        self, tasks: Iterable[_Step], size: int, on_wait: Callable[[float], None] | None = None
    ) -> Iterator[tuple[_Step, list[Tensor], list[Bad]]]:
        """Yield each step with its pixels and its unreadable rows; workers get a step in pieces."""
        piece = self._work.piece
        given, awaited = itertools.tee(tasks)  # workers run ahead of the loop below
        cuts = (_tuples(task.rows[i : i + piece]) for task in given for i in range(0, len(task.rows), piece))
        ahead = max(2, -(-self.prefetch * -(-size // piece) // max(self.workers, 1)))
        pin = self.device.type == "cuda"
        pin_here = pin and not self._work.tiny
        done = parallel_map(self._work, cuts, self.workers, ahead=ahead, pin=pin_here, on_wait=on_wait)
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

    def _on_device(self, whole: DeviceBatches, steps: Iterable[int]) -> Iterator[Batch]:
        """Yield the batches of some steps. A GPU gets its next batch by a thread and a stream of their own, while the
        model trains on the last one."""

        def make(number: int) -> Batch:
            step = self._step(number)
            return Batch(*whole(step.rows, step.partners, step.plan))

        if self.device.type != "cuda":
            yield from map(make, steps)
            return
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))  # which copies the images to the device

        def make_ahead(number: int, after: torch.cuda.Event) -> tuple[Batch, torch.cuda.Event]:
            # The caller is about to launch its next step, and the GPU has little left to do until then. This thread
            # leaves Python to it, until the GPU has caught up.
            after.synchronize()
            with torch.cuda.stream(stream):
                return make(number), stream.record_event()

        waiting: deque[Future[tuple[Batch, torch.cuda.Event]]] = deque()
        pool, left = ThreadPoolExecutor(1, "augment"), iter(steps)

        def order(count: int) -> None:
            for step in itertools.islice(left, count):
                after = torch.cuda.Event(blocking=True)
                after.record(torch.cuda.current_stream(self.device))
                waiting.append(pool.submit(make_ahead, step, after))

        try:
            order(self.prefetch)
            while waiting:
                batch, made = waiting.popleft().result()
                order(1)
                current = torch.cuda.current_stream(self.device)
                current.wait_event(made)
                for part in (batch.pixels, batch.labels, batch.index, batch.others, batch.weight):
                    part.record_stream(current)  # its memory belongs to the other stream
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)

    def _replace(self, step: _Step, x: list[Tensor], bad: list[Bad]) -> tuple[_Step, list[Tensor]]:
        """Replace unreadable images by the next readable ones of the order, so that batches keep their size."""
        if not bad:
            return step, x
        rows = _tuples(step.rows)
        good = itertools.chain.from_iterable(x)
        why = dict(bad)
        images: list[Tensor] = []
        for position in range(len(rows)):
            if position not in why:
                images.append(next(good))
                continue
            self.skip(rows[position][1], why[position])
            place = step.step * self.batch_size + step.plan.order[int(step.places[position])]
            rows[position], image = self._next_readable(place)
            images.append(image)
        return replace(step, rows=np.array(rows)), [torch.stack(images)]

    def _next_readable(self, place: int) -> tuple[Row, Tensor]:
        for ahead in range(1, 2 * len(self.source) + 1):
            row = self.order.at(place + ahead)
            if self.source.names[row[1]] in self.skipped:
                continue
            x, bad = self._work([row])
            if not bad:
                return row, torch.as_tensor(x[0])
            self.skip(row[1], bad[0][1])
        raise DataError("No image in the data set can be read; run `vitkit doctor` on it to see why.")

    def _assemble(self, step: _Step, x: list[Tensor]) -> Batch:
        count = len(self._own)
        labels, index = self.targets(step.rows[:, 1].tolist())
        z = normalize([part.to(self.device, non_blocking=True) for part in x], self.spec)
        out, others, weight = z[:count], labels[:count], 1.0
        if step.plan.weight != 1.0:
            partners = torch.from_numpy(step.partners)
            out, weight = mixing.apply(out, z[partners.to(self.device, non_blocking=True)], step.plan)
            others = labels[partners]
        rest = (labels[:count], index[:count], others, torch.full((count,), weight))
        labels, index, others, share_of = (part.to(self.device, non_blocking=True) for part in rest)
        return Batch(out, labels, index, others, share_of)


def _tuples(rows: Array) -> list[Row]:
    return [(epoch, index) for epoch, index in rows.tolist()]
