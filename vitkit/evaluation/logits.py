"""Logits of a data set: every image exactly once, on any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from vitkit.data.base import Source
from vitkit.data.loader import BadImages, EvalLoader
from vitkit.errors import DataError, InputError, VitkitError
from vitkit.model.classifier import Classifier, device_of, evaluating
from vitkit.runtime import Runtime
from vitkit.types import Array, Tick


@dataclass(frozen=True)
class Outputs:
    """What a predictor said of a data set; N images, K classes.

    Args:
        logits: [N, K] float32, in the source's order.
        labels: [N] the source's labels.
        index: [N] place of each image in the source; images that were skipped are missing.
        names: what each image is called.
        skipped: (name, sentence) of every image that could not be read.
    """

    logits: Array
    labels: Array
    index: Array
    names: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


def stream(predictor: Classifier, loader: EvalLoader, runtime: Runtime | None = None) -> Iterator[tuple[Array, Array]]:
    """Yield (logits [B, K] float32, index [B]) of a loader's batches as they are computed.

    Args:
        predictor: a ViT, or whatever else predicts.
        loader: batches, on the predictor's device.
        runtime: says the precision; fp32 without it.

    Raises:
        InputError: logits that are not finite; names the first image.
    """
    for batch in loader:
        with evaluating(predictor), runtime.autocast() if runtime else nullcontext():
            logits = predictor(batch.pixels).float().cpu().numpy()
        index = batch.index.cpu().numpy()
        if len(broken := np.flatnonzero(~np.isfinite(logits).all(1))):
            raise InputError(
                f"Expected finite logits; {loader.source.names[int(index[broken[0]])]} gave NaN or "
                f"infinity. Use --precision fp32, or other weights."
            )
        yield logits, index


def logits_of(
    predictor: Classifier,
    source: Source,
    *,
    batch_size: int = 64,
    workers: int | None = 0,
    runtime: Runtime | None = None,
    progress: Tick | None = None,
    bad_images: BadImages = "fail",
) -> Outputs:
    """Feed every image of a source to a predictor.

    Args:
        predictor: a ViT, or whatever else predicts.
        source: the images.
        batch_size: images at once in each process.
        workers: processes that decode; None for one a core.
        runtime: several processes, an accelerator, mixed precision; without it this process, in fp32, where the
            predictor's weights are. With several processes all of them call this, and all get the whole result.
        progress: called with the number of images finished since the last call, over all processes.
        bad_images: `fail` raises BadImage; `skip` leaves the image out and names it in the result.
    """
    rank, ranks = (runtime.rank, runtime.ranks) if runtime else (0, 1)
    loader = EvalLoader(
        source,
        predictor.input_spec,
        batch_size=batch_size,
        workers=workers,
        rank=rank,
        ranks=ranks,
        device=runtime.device if runtime else device_of(predictor),
        bad_images=bad_images,
    )
    done: list[tuple[Array, Array]] = []
    error: VitkitError | None = None
    try:
        for logits, index in stream(predictor, loader, runtime):
            done.append((logits, index))
            if progress is not None:
                progress(len(index) * ranks)
    except VitkitError as found:  # told to the other processes before it is raised: they wait for this one's rows
        error = found
    mine = (done, loader.skipped, error)
    parts = runtime.gather(mine) if runtime else [mine]
    if failed := next((failed for *_, failed in parts if failed is not None), None):
        raise failed
    rows = [row for part, *_ in parts for row in part]
    skipped = {name: why for _, part, _ in parts for name, why in part.items()}
    if not rows:
        raise DataError(f"No image of the data set can be read: {next(iter(skipped.values()))}")
    index = np.concatenate([index for _, index in rows])
    return Outputs(
        np.concatenate([logits for logits, _ in rows]),
        source.labels[index].astype(np.int64),
        index,
        tuple(source.names[int(i)] for i in index),
        tuple(skipped.items()),
    )
