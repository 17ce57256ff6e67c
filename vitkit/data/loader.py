"""Batches from a source: the same bytes for any number of workers and processes, starting at any step.

    TrainLoader    endless, from step n: order(seed, step) -> augment(seed, epoch, index) -> mix(seed, step)
    EvalLoader     every image exactly once over all processes, preprocessed as the InputSpec says

Workers only turn rows (epoch, index) into 8-bit pixels and hold no random state. The process that iterates assembles,
normalises and mixes the batches, on the device of your choice. For small images in memory, that device can augment too
(on_device.py), and there are no workers.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from vitkit.data import mix as mixing
from vitkit.data import slots
from vitkit.data.ahead import by_threads, made_ahead
from vitkit.data.augment import Augment
from vitkit.data.base import Source
from vitkit.data.device_batches import DeviceBatches
from vitkit.data.gpu import PIECE as DEVICE_PIECE
from vitkit.data.gpu import Decode, DeviceWorker, GpuPixels, PlacedPiece
from vitkit.data.mix import Mix
from vitkit.data.on_device import OnDevice
from vitkit.data.order import BalancedOrder, Order, share, within
from vitkit.data.preprocess import normalize
from vitkit.data.resize import has_triton, takes
from vitkit.data.sample_worker import PIECE, Bad, EvalWorker, Piece, Row, SampleWorker, Sent
from vitkit.data.slots import Slots
from vitkit.data.workers import default_workers, parallel_map
from vitkit.errors import BadImage, ConfigError, DataError, pick
from vitkit.model.config import InputSpec
from vitkit.types import Array

AHEAD = 8  # pieces that each worker may finish before a GPU takes them, while it starts
RUN_AHEAD = 2**29  # bytes that they may take
THREAD_PIECE = 8  # images that a thread decodes at once where there are no workers
FEW = 1000  # images up to which starting the kernel that resizes on a GPU takes longer than it saves

LARGE_BATCH, SMALL_BATCH = 256, 64  # images per batch where nothing is trained: see `images_per_batch`
LARGE_BATCH_PIXELS = 256  # larger images would need more memory than some GPUs have

AugmentOn = Literal["cpu", "device"]
BadImages = Literal["fail", "skip"]
Device = torch.device | str | None

# How training images are drawn -> their order: each image once per epoch, or every class equally often.
SAMPLING: dict[str, Callable[[Source, int, int], Order]] = {
    "uniform": lambda source, batch_size, seed: Order(len(source), batch_size, seed=seed),
    "balanced": lambda source, batch_size, seed: BalancedOrder(source.labels, batch_size, seed=seed),
}


@dataclass(frozen=True)
class Batch:
    """One batch.

    Args:
        pixels: [B, C, H, W] float32, normalised and, for training, mixed.
        labels: [B] int64, the class of each image; [B, K] zeros and ones if an image can have several labels.
        index: [B] int64, the position of each image in the source.
        others: like `labels`, of the image that each one is mixed with; `labels` if nothing is mixed.
        weight: [B] float32, the share of its own pixels in each image; 1 if nothing is mixed.
        digests: [B, 32] uint8, the SHA-256 of the bytes that each image was decoded from, if they were asked for.
    """

    pixels: Tensor
    labels: Tensor
    index: Tensor
    others: Tensor
    weight: Tensor
    digests: Array | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def targets(self, classes: int, smoothing: float = 0.0) -> Tensor:
        """Return soft targets, [B, classes]; see `mix.soft_targets`."""
        return mixing.soft_targets(self.labels, self.others, self.weight, classes, smoothing)


Made = tuple[
    Batch | None, list[Bad]
]  # a batch, if any of its images can be read, and (index, reason) of those that cannot


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


def images_per_batch(batch_size: int | None, spec: InputSpec, device: torch.device) -> int:
    """Return how many images a model that is not trained gets at once, if the caller does not care.

    Args:
        batch_size: what the caller asked for; None for LARGE_BATCH on CUDA if images have at most LARGE_BATCH_PIXELS
            pixels a side, and SMALL_BATCH otherwise.
        spec: the input that the model expects.
        device: where the model is.
    """
    large = device.type == "cuda" and max(spec.size) <= LARGE_BATCH_PIXELS
    return batch_size or (LARGE_BATCH if large else SMALL_BATCH)


class _Loader:
    def __init__(
        self,
        source: Source,
        spec: InputSpec,
        batch_size: int,
        rank: int,
        ranks: int,
        workers: int | None,
        device: Device,
        bad_images: BadImages,
        on_bad: Callable[[str, str], None] | None,
        augmenting: bool,
    ) -> None:
        within("batch_size", batch_size, 1)
        within("workers", workers or 0, 0)
        if bad_images not in get_args(BadImages):
            raise ConfigError(f"bad_images must be one of {', '.join(get_args(BadImages))}; got {bad_images!r}.")
        share(1, rank, ranks)  # refuses a rank that is out of range
        if not len(source):
            raise DataError("Expected at least one image; the data set is empty.")
        self.source, self.spec, self.batch_size = source, spec, batch_size
        self.rank, self.ranks = rank, ranks
        self.device = torch.device(device) if device is not None else torch.device("cpu")
        spare = augmenting and self.device.type != "cpu"  # the cores are free: the model trains elsewhere
        self.workers = default_workers(source, ranks, spare) if workers is None else workers
        self.bad_images, self.on_bad = bad_images, on_bad
        self.skipped: dict[str, str] = {}  # name -> reason, for every image skipped so far

    def _skip(self, index: int, why: str) -> None:
        """Record an unreadable image, or raise if `bad_images` is `fail`."""
        if self.bad_images == "fail":
            raise BadImage(why)
        name = self.source.names[index]
        if name not in self.skipped:
            self.skipped[name] = why
            if self.on_bad is not None:
                self.on_bad(name, why)

    def _targets(self, index: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return the labels and the index of some images, on the CPU."""
        found = torch.tensor(list(index), dtype=torch.int64)
        return torch.from_numpy(self.source.labels)[found].long(), found


class TrainLoader(_Loader):
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
            self._skip(rows[position][1], why[position])
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
            self._skip(row[1], bad[0][1])
        raise DataError("No image in the data set can be read; run `vitkit doctor` on it to see why.")

    def _assemble(self, step: _Step, x: list[Tensor]) -> Batch:
        count = len(self._own)
        labels, index = self._targets(step.rows[:, 1].tolist())
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


# A batch that workers have prepared: the positions of its pieces, what the workers say with their slots, and the images
# that the GPU has decoded.
_Taken = tuple[list[range], list[tuple[Piece, Tensor]], list[Tensor | None]]


def _tensors(made: Made) -> tuple[Tensor, ...]:
    """Return the tensors of a batch that are on the device."""
    batch, _ = made
    return (batch.pixels, batch.labels, batch.weight) if batch is not None else ()


class EvalLoader(_Loader):
    """Every image of a source once, in the source's order, preprocessed.

    Args:
        source: where the images come from.
        spec: the input that the model expects.
        batch_size: images in a batch of this process; the last may be smaller (default: 32).
        rank: this process, counted from 0.
        ranks: number of processes; their parts differ by at most one image, and no image is read twice.
        workers: worker processes for decoding (default: one per core; none for images in memory).
        device: where batches are placed and normalised (default: the CPU).
        bad_images: `fail` (the default) raises BadImage; `skip` leaves the image out.
        on_bad: called with (name, error message) once for each skipped image; `skipped` records them too.
        hashed: whether batches have the digests of their images (default: False).
        decode: `cpu` (the default), or `gpu` to decode and resize JPEGs there; see gpu.py.
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
        device: Device = None,
        bad_images: BadImages = "fail",
        on_bad: Callable[[str, str], None] | None = None,
        hashed: bool = False,
        decode: Decode = "cpu",
    ) -> None:
        super().__init__(source, spec, batch_size, rank, ranks, workers, device, bad_images, on_bad, augmenting=False)
        self.hashed, self.decode = hashed, decode
        if decode not in get_args(Decode):
            raise ConfigError(f"decode must be one of {', '.join(get_args(Decode))}; got {decode!r}.")
        self.indices = range(len(source))[share(len(source), rank, ranks)]
        self._on_gpu: GpuPixels | None = None
        if decode == "gpu":
            self._on_gpu = GpuPixels(source, spec, self.device)
        elif self._resizes_there():
            self._on_gpu = GpuPixels(source, spec, self.device, encoded=False)

    def _resizes_there(self) -> bool:
        """Return whether a GPU resizes what workers decode. The pixels are the same, and cores decode more."""
        ready = self.source.ready_for == self.spec.of_images  # the images have the model's size
        worth_it = self.device.type == "cuda" and self.workers > 0 and len(self.indices) > FEW and not ready
        return worth_it and takes(self.spec) and has_triton()

    def __len__(self) -> int:
        return math.ceil(len(self.indices) / self.batch_size)

    def __iter__(self) -> Generator[Batch, None, None]:
        """Start the workers at once, and return the batches; closing the generator ends the workers."""
        batches = [self.indices[i : i + self.batch_size] for i in range(0, len(self.indices), self.batch_size)]
        resizes = self._on_gpu is not None and not self._on_gpu.encoded
        few = (DEVICE_PIECE if resizes else PIECE) if self.workers else self.batch_size
        if self._reads_by_threads():
            few = THREAD_PIECE
        cuts = [[batch[i : i + few] for i in range(0, len(batch), few)] for batch in batches]
        pieces = [cut for cuts_of in cuts for cut in cuts_of]
        work = (
            EvalWorker(self.source, self.spec, pieces, self.hashed)
            if self._on_gpu is None
            else DeviceWorker(self.source, self.spec, pieces, self.hashed, self._on_gpu.encoded)
        )
        if self.workers and slots.available():
            return self._from_slots(self._slots(work, few), cuts)
        return self._from_pieces(self._sent(work), cuts)

    def _slots(self, work: EvalWorker, few: int) -> Slots[Piece]:
        """Start workers that share memory: enough slots that they can run ahead while the model starts."""
        cuda = self.device.type == "cuda"
        wanted = min(AHEAD * self.workers, max(1, RUN_AHEAD // max(1, work.size))) if cuda else 2 * self.workers
        count = min(len(work.pieces), max(wanted, self.workers) + -(-self.batch_size // few))
        return Slots(work, len(work.pieces), self.workers, slots=count, size=work.size, pin=cuda)

    def _from_slots(self, pool: Slots[Piece], cuts: list[list[range]]) -> Generator[Batch, None, None]:
        """On a GPU, one thread decodes a batch while another resizes the one before, and the model computes a third."""
        with pool:
            taken = self._taken(pool, cuts)
            if self.device.type == "cuda":
                if self.decode == "gpu":
                    taken = made_ahead(taken, self.device, pool.stop, ahead=1)  # decoded photos can be large
                made = made_ahead(self._made(pool, taken), self.device, pool.stop, _tensors)
            else:
                made = self._made(pool, taken)
            with closing(made) as found:
                yield from self._kept(found)

    def _taken(self, pool: Slots[Piece], cuts: list[list[range]]) -> Generator[_Taken, None, None]:
        """Take what workers have done for each batch, and decode the files that they left to the GPU."""
        for cuts_of in cuts:
            pieces = [pool.take() for _ in cuts_of]
            yield cuts_of, pieces, self._decoded(pieces)

    def _made(self, pool: Slots[Piece], taken: Generator[_Taken, None, None]) -> Generator[Made, None, None]:
        """Yield batches, and let the workers fill the slots of each as soon as it is copied to the device."""
        with closing(taken):
            for cuts_of, pieces, decoded in taken:
                batch = self._batch(cuts_of, pieces, decoded)
                if self.device.type == "cuda":
                    copied = torch.cuda.Event(blocking=True)  # waiting leaves the core to others
                    copied.record()
                    copied.synchronize()
                pool.release(len(cuts_of))
                del pieces, decoded  # the GPU has read them, and their memory is for the next
                yield batch

    def _sent(self, work: EvalWorker) -> Iterator[tuple[Piece, Tensor]]:
        """Preprocess here, or in workers that share no memory."""
        pin = self.device.type == "cuda"
        if self.workers:
            return parallel_map(Sent(work), range(len(work.pieces)), self.workers, pin=pin)

        def one(k: int) -> tuple[Piece, Tensor]:
            slot = torch.empty(work.size, dtype=torch.uint8, pin_memory=pin)
            return work(k, slot.numpy()), slot

        pieces = range(len(work.pieces))
        return by_threads(one, pieces) if self._reads_by_threads() else map(one, pieces)

    def _reads_by_threads(self) -> bool:
        """Return whether threads decode, as there are no workers and the cores are free while a GPU computes."""
        return self.device.type == "cuda" and not self.workers and not self.source.in_memory

    def _from_pieces(
        self, done: Iterator[tuple[Piece, Tensor]], cuts: list[list[range]]
    ) -> Generator[Batch, None, None]:
        taken = ((cuts_of, [next(done) for _ in cuts_of]) for cuts_of in cuts)
        yield from self._kept(self._batch(cuts_of, pieces, self._decoded(pieces)) for cuts_of, pieces in taken)

    def _kept(self, made: Iterable[Made]) -> Generator[Batch, None, None]:
        """Yield the batches in which any image could be read, and record what could not."""
        for batch, unread in made:
            for index, why in unread:
                self._skip(index, why)
            if batch is not None:
                yield batch

    def _decoded(self, pieces: list[tuple[Piece, Tensor]]) -> list[Tensor | None]:
        """Decode the files that workers left to the GPU."""
        if self._on_gpu is None:
            return []
        return self._on_gpu.decode(cast("list[tuple[PlacedPiece, Tensor]]", pieces))

    def _batch(
        self, cuts: list[range], pieces: list[tuple[Piece, Tensor]], decoded: Sequence[Tensor | None] = ()
    ) -> Made:
        """Assemble a batch; `decoded` are the images that workers left to the GPU."""
        kept: list[int] = []
        unread: list[Bad] = []
        for cut, (piece, _) in zip(cuts, pieces, strict=True):
            unread += [(cut[position], why) for position, why in piece.bad]
            left_out = {position for position, _ in piece.bad}
            kept += [i for position, i in enumerate(cut) if position not in left_out]
        if not kept:
            return None, unread
        digests = np.concatenate([piece.digests for piece, _ in pieces]) if self.hashed else None
        if self._on_gpu is not None:
            x, bad = self._on_gpu(cast("list[tuple[PlacedPiece, Tensor]]", pieces), kept, decoded)
            unread += [(kept[place], why) for place, why in bad]
            good = np.setdiff1d(np.arange(len(kept)), [place for place, _ in bad])
            kept, digests = [kept[n] for n in good], digests[good] if digests is not None else None
            if not kept:
                return None, unread
            z = normalize(x, self.spec)
        else:
            (H, W), C = self.spec.size, len(self.spec.mean)
            parts = [slot[: piece.good * H * W * C].view(-1, H, W, C) for piece, slot in pieces if piece.good]
            z = normalize([part.to(self.device, non_blocking=True).permute(0, 3, 1, 2) for part in parts], self.spec)
        labels, index = self._targets(kept)
        labels = labels.to(self.device, non_blocking=True)
        return Batch(z, labels, index, labels, torch.ones(len(kept), device=self.device), digests), unread
