"""Every image exactly once over all processes, preprocessed as the InputSpec says.

Workers decode, and the process that iterates assembles and normalises the batches on the device of your choice; a GPU
may resize and decode too (gpu.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import cast, get_args

import numpy as np
import torch
from torch import Tensor

from vitkit.data import slots
from vitkit.data.ahead import by_threads, made_ahead
from vitkit.data.base import Source
from vitkit.data.batch import BadImages, Batch, Device, Loader
from vitkit.data.gpu import PIECE as DEVICE_PIECE
from vitkit.data.gpu import Decode, DeviceWorker, GpuPixels, PlacedPiece
from vitkit.data.order import share
from vitkit.data.preprocess import normalize
from vitkit.data.resize import has_triton, takes
from vitkit.data.sample_worker import PIECE, Bad, EvalWorker, Piece, Sent
from vitkit.data.slots import Slots
from vitkit.data.workers import parallel_map
from vitkit.errors import ConfigError
from vitkit.model.config import InputSpec

AHEAD = 8  # pieces that each worker may finish before a GPU takes them, while it starts
RUN_AHEAD = 2**29  # bytes that they may take
THREAD_PIECE = 8  # images that a thread decodes at once where there are no workers
FEW = 1000  # images up to which starting the kernel that resizes on a GPU takes longer than it saves

# A batch, if any of its images can be read, and (index, reason) of those that cannot.
Made = tuple[Batch | None, list[Bad]]
# A batch that workers have prepared: the positions of its pieces, what the workers say with their slots, and the images
# that the GPU has decoded.
_Taken = tuple[list[range], list[tuple[Piece, Tensor]], list[Tensor | None]]


def _tensors(made: Made) -> tuple[Tensor, ...]:
    """Return the tensors of a batch that are on the device."""
    batch, _ = made
    return (batch.pixels, batch.labels, batch.weight) if batch is not None else ()


class EvalLoader(Loader):
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
                self.skip(index, why)
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
        labels, index = self.targets(kept)
        labels = labels.to(self.device, non_blocking=True)
        return Batch(z, labels, index, labels, torch.ones(len(kept), device=self.device), digests), unread
