"""The logits of a data set: every image exactly once, on any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vitkit.cpu_products import fp32_products
from vitkit.data.base import Source
from vitkit.data.batch import BadImages, images_per_batch
from vitkit.data.eval_loader import EvalLoader
from vitkit.data.gpu import Decode
from vitkit.errors import DataError, InputError, VitkitError
from vitkit.model.backbone import Backbone
from vitkit.model.classifier import Classifier, device_of, evaluating
from vitkit.runtime import Runtime, on_host
from vitkit.types import Array, Tick


@dataclass(frozen=True)
class Outputs:
    """A model's outputs for a data set of N images and K classes.

    Args:
        logits: [N, K] float32, in the source's order.
        labels: [N] labels from the source.
        index: [N] position of each image in the source; skipped images are left out.
        names: name of each image.
        skipped: (name, reason) of every image that could not be read.
    """

    logits: Array
    labels: Array
    index: Array
    names: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


def stream(model: Classifier, loader: EvalLoader, runtime: Runtime | None = None) -> Iterator[tuple[Array, Array]]:
    """Yield (logits [B, K] float32, index [B]) for each batch as it is computed.

    Args:
        model: a ViT or any other classifier.
        loader: batches, on the model's device.
        runtime: sets the precision (default: fp32).

    Raises:
        InputError: some logits are not finite; the message names the first such image.
    """

    with closing(iter(loader)) as batches:  # ends the workers, whatever happens

        def computed() -> Iterator[tuple[Tensor, Tensor]]:
            for batch in batches:
                with evaluating(model):
                    logits = _logits(model, batch.pixels, runtime)
                yield batch.index, logits

        for places, found in on_host(computed()):
            logits, index = found.numpy(), places.numpy()
            if len(broken := np.flatnonzero(~np.isfinite(logits).all(1))):
                raise InputError(
                    f"Expected finite logits; {loader.source.names[int(index[broken[0]])]} gave NaN or infinity. "
                    f"Use --precision fp32, or other weights."
                )
            yield logits, index


def _logits(model: Classifier, x: Tensor, runtime: Runtime | None) -> Tensor:
    """Return logits [B, K] in fp32; the head runs in fp32 too, because close logits would be equal in 16 bits."""
    with runtime.autocast() if runtime else fp32_products(x.device.type):
        y = model.features(x) if isinstance(model, Backbone) else model(x)
    return model.classify(y.float()) if isinstance(model, Backbone) else y.float()


def logits_of(
    model: Classifier,
    source: Source,
    *,
    batch_size: int | None = None,
    workers: int | None = 0,
    runtime: Runtime | None = None,
    progress: Tick | None = None,
    bad_images: BadImages = "fail",
    decode: Decode = "cpu",
) -> Outputs:
    """Compute the logits of every image of a source.

    Args:
        model: a ViT or any other classifier.
        source: the images.
        batch_size: images per batch in each process (default: see `data.batch.images_per_batch`).
        workers: worker processes for decoding; None for one per core.
        runtime: processes, device and precision (default: this process, on the model's device, in fp32). With several
            processes, each of them must call this function, and each gets the whole result.
        progress: called with the number of images finished since the last call, over all processes.
        bad_images: `fail` raises BadImage; `skip` leaves the image out and lists it in the result.
        decode: where images are decoded, `cpu` or `gpu`.
    """
    rank, ranks = (runtime.rank, runtime.ranks) if runtime else (0, 1)
    device = runtime.device if runtime else device_of(model)
    loader = EvalLoader(
        source,
        model.input_spec,
        batch_size=images_per_batch(batch_size, model.input_spec, device),
        workers=workers,
        rank=rank,
        ranks=ranks,
        device=device,
        bad_images=bad_images,
        decode=decode,
    )
    done: list[tuple[Array, Array]] = []
    error: VitkitError | None = None
    try:
        for logits, index in stream(model, loader, runtime):
            done.append((logits, index))
            if progress is not None:
                progress(len(index) * ranks)
    except VitkitError as found:  # raised after `gather`: the other processes wait for this one's rows there
        error = found
    mine = (done, loader.skipped, error)
    parts = runtime.gather(mine) if runtime else [mine]
    if failed := next((failed for *_, failed in parts if failed is not None), None):
        raise failed
    rows = [row for part, *_ in parts for row in part]
    skipped = {name: why for _, part, _ in parts for name, why in part.items()}
    if not rows:
        raise DataError(f"Expected at least one readable image; got none. The first: {next(iter(skipped.values()))}")
    index = np.concatenate([index for _, index in rows])
    return Outputs(
        np.concatenate([logits for logits, _ in rows]),
        source.labels[index].astype(np.int64),
        index,
        tuple(source.names[int(i)] for i in index),
        tuple(skipped.items()),
    )
