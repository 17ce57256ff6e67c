"""Image files to normalized batches on one core: our loaders, and the peers' transforms on the same files.

Measured in processor time, so that other programs on the machine matter little. Ours are `EvalLoader` and `TrainLoader`
without workers, on the files and on the decoded cache; a peer's is Pillow, its transform and `torch.stack`, which is
what its loader does per core.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitkit.data import Augment, EvalLoader, TrainLoader, cached, decode
from vitkit.data.base import Source
from vitkit.data.folder import Files
from vitkit.data.samples import PHOTOS as SAMPLES
from vitkit.data.samples import sample_photo
from vitkit.evaluation.predict import files
from vitkit.jobs.bench.options import Options
from vitkit.jobs.bench.table import Benchmark
from vitkit.jobs.bench.turns import Contenders, Run
from vitkit.jobs.peers import library
from vitkit.model.config import InputSpec

Transform = Callable[[Image.Image], Tensor]
BATCH = 32
PHOTOS = 64  # at most, out of a folder
CROP = 0.9  # timm's for most of its ViTs
SHORT_SIDE = 256  # of images in the decoded cache for training
AUGMENTATIONS = {"random crops and flips": Augment(), "crops, flips and colour jitter": Augment(color_jitter=0.4)}


def timm(spec: InputSpec, how: Augment | None) -> Transform:
    """Build timm's transform.

    Args:
        spec: size, filter, mean and std.
        how: crops, flips and colour jitter for training; None for the resize and crop of evaluation.
    """
    transform: Transform = library("timm.data").create_transform(
        spec.size,
        is_training=how is not None,
        interpolation=spec.interpolation,
        crop_pct=spec.crop,
        mean=spec.mean,
        std=spec.std,
        color_jitter=(how and how.color_jitter) or None,
    )
    return transform


def torchvision(spec: InputSpec, how: Augment | None) -> Transform:
    """Build torchvision's transform.

    Args:
        spec: size, filter, mean and std.
        how: crops, flips and colour jitter for training; None for the resize and crop of evaluation.
    """
    t = library("torchvision.transforms")
    filter_ = t.InterpolationMode(spec.interpolation)
    if how is None:
        first = [t.Resize(int(spec.size[0] / spec.crop), interpolation=filter_), t.CenterCrop(spec.size)]
    else:
        first = [t.RandomResizedCrop(spec.size, interpolation=filter_), t.RandomHorizontalFlip()]
        first += [t.ColorJitter(*3 * [how.color_jitter])] if how.color_jitter else []
    transform: Transform = t.Compose([*first, t.ToTensor(), t.Normalize(spec.mean, spec.std)])
    return transform


TRANSFORMS: dict[str, Callable[[InputSpec, Augment | None], Transform]] = {"timm": timm, "torchvision": torchvision}


def evaluation(source: Source, spec: InputSpec, look: Callable[[Tensor], Any] = len) -> list[Any]:
    """Read our evaluation batches of a source, and return what `look` returns for each.

    Args:
        source: the photos.
        spec: what the model expects.
        look: called with each batch of pixels.
    """
    return [look(batch.pixels) for batch in EvalLoader(source, spec, batch_size=BATCH, workers=0)]


def training(source: Source, spec: InputSpec, how: Augment) -> None:
    """Read our training batches, one pass over a source.

    Args:
        source: the photos; a multiple of the batch size, or fewer than one batch.
        spec: what the model expects.
        how: the augmentation.
    """
    size = min(BATCH, len(source))
    for batch in TrainLoader(source, spec, how, batch_size=size, workers=0).batches(0, len(source) // size):
        len(batch)


def theirs(paths: Sequence[Path], transform: Transform, look: Callable[[Tensor], Any] = len) -> list[Any]:
    """Read a peer's batches of the same files, and return what `look` returns for each.

    Args:
        paths: the photos.
        transform: the peer's transform.
        look: called with each batch of pixels.
    """
    found = []
    for start in range(0, len(paths), BATCH):
        out = []
        for path in paths[start : start + BATCH]:
            with open(path, "rb") as file:
                out.append(transform(Image.open(file).convert("RGB")))
        found.append(look(torch.stack(out)))
    return found


def make_photos(folder: Path, count: int = BATCH) -> list[Path]:
    """Write JPEG files: scikit-learn's two sample photos, each cropped differently; without it, a noisy gradient."""
    try:
        whole = [sample_photo(name) for name in SAMPLES]
    except ImportError:
        slope = np.add.outer(np.arange(427), np.arange(640))[:, :, None] * (255 / 1066) * np.array([1, 0.8, 0.6])
        noise = np.random.default_rng(0).normal(0, 12, slope.shape)
        whole = [Image.fromarray(np.clip(slope + noise, 0, 255).astype(np.uint8))]
    paths = [folder / f"{n:03d}.jpg" for n in range(count)]
    for n, path in enumerate(paths):
        image = whole[n % len(whole)]
        image.crop((n, n, image.width, image.height)).save(path, quality=90)
    return paths


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread; restores the number of threads afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(options: Options) -> Iterator[Benchmark]:
    """Yield a table for evaluation and one per augmentation."""
    spec = InputSpec(size=options.config.image_hw, resize="crop", crop=CROP, interpolation="bicubic")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, one_thread():
        paths = make_photos(Path(folder)) if options.data is None else some(files(options.data))
        source = Files(Path(), [str(path) for path in paths], [0] * len(paths), ["photo"])
        width, height = np.mean([decode(source.raw(i), str(path)).size for i, path in enumerate(paths)], axis=0)
        which = f"{len(paths)} {'sample ' * (options.data is None)}photos of {width:.0f} x {height:.0f}"
        exact = cached(source, Path(folder, "exact"), spec=spec, workers=0)
        small = cached(source, Path(folder, "small"), short_side=SHORT_SIDE, workers=0)

        def table(title: str, how: Augment | None, ours: dict[str, Run]) -> Benchmark:
            found = Contenders(options, torch.device("cpu"))
            for name, run in ours.items():
                found.add("ours", name, lambda run=run: run)  # type: ignore[misc]
            for name in TRANSFORMS if options.peer is None else options.peer:
                if name not in TRANSFORMS:
                    found.note(name, "has no transforms of its own that do the same.")
                    continue

                def build(name: str = name) -> Run:
                    transform = TRANSFORMS[name](spec, how)
                    return lambda: theirs(paths, transform)

                found.add("peer", name, build)
            title = f"{title}, {which} to {spec.size[0]} px, processor time"
            return found.table(title, len(paths), run="pass", clock=time.process_time)

        yield table(
            "evaluation",
            None,
            {"loader": lambda: evaluation(source, spec), "loader, decoded cache": lambda: evaluation(exact, spec)},
        )
        for title, how in AUGMENTATIONS.items():
            ours = {"loader": partial(training, source, spec, how)}
            yield table(title, how, {**ours, "loader, decoded cache": partial(training, small, spec, how)})


def some(found: Sequence[str]) -> list[Path]:
    """Choose the files to measure, spread over a folder: whole batches, or fewer than one batch."""
    count = min(PHOTOS, len(found) if len(found) < BATCH else len(found) // BATCH * BATCH)
    return [Path(found[i]).absolute() for i in np.linspace(0, len(found) - 1, count).astype(int)]
