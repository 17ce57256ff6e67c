"""Image files to normalised batches on one core: our loader, and the peers' transforms on the same files.

Counted in processor time, so that what else the machine does matters little. Ours is `EvalLoader` and `TrainLoader`
without workers; a peer's is Pillow, its transform and a stack, which is what its loader does for one core.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitkit.data import Augment, EvalLoader, TrainLoader, decode
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
PHOTOS = 64  # of a folder, at most
CROP = 0.9  # timm's share for most of its ViTs


def timm(spec: InputSpec, training: bool, jitter: float = 0.0) -> Transform:
    """timm's transform.

    Args:
        spec: size, filter, mean and std.
        training: random crops and flips, else the evaluation's resize and crop.
        jitter: of the colours, in training.
    """
    transform: Transform = library("timm.data").create_transform(
        spec.size,
        is_training=training,
        interpolation=spec.interpolation,
        crop_pct=spec.crop,
        mean=spec.mean,
        std=spec.std,
        color_jitter=jitter or None,
    )
    return transform


def torchvision(spec: InputSpec, training: bool) -> Transform:
    """torchvision's transform.

    Args:
        spec: size, filter, mean and std.
        training: random crops and flips, else the evaluation's resize and crop.
    """
    t = library("torchvision.transforms")
    filter_ = t.InterpolationMode(spec.interpolation)
    first = (
        [t.RandomResizedCrop(spec.size, interpolation=filter_), t.RandomHorizontalFlip()]
        if training
        else [t.Resize(int(spec.size[0] / spec.crop), interpolation=filter_), t.CenterCrop(spec.size)]
    )
    transform: Transform = t.Compose([*first, t.ToTensor(), t.Normalize(spec.mean, spec.std)])
    return transform


TRANSFORMS: dict[str, Callable[[InputSpec, bool], Transform]] = {"timm": timm, "torchvision": torchvision}


def evaluation(source: Source, spec: InputSpec, look: Callable[[Tensor], Any] = len) -> list[Any]:
    """Our evaluation batches of a source, each looked at.

    Args:
        source: the photos.
        spec: what a model expects.
        look: takes a batch.
    """
    return [look(batch.pixels) for batch in EvalLoader(source, spec, batch_size=BATCH, workers=0)]


def training(source: Source, spec: InputSpec, how: Augment) -> None:
    """Our training batches, one pass over a source.

    Args:
        source: the photos; whole batches of them, or less than one.
        spec: what a model expects.
        how: they are varied.
    """
    size = min(BATCH, len(source))
    for batch in TrainLoader(source, spec, how, batch_size=size, workers=0).batches(0, len(source) // size):
        len(batch)


def theirs(paths: Sequence[Path], transform: Transform, look: Callable[[Tensor], Any] = len) -> list[Any]:
    """A peer's batches of the same files, each looked at.

    Args:
        paths: the photos.
        transform: the peer's.
        look: takes a batch.
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
    """JPEG files: scikit-learn's two sample photos, each cut a little otherwise; noise on a slope without it.

    Args:
        folder: where they go.
        count: how many.
    """
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
    """torch on one thread, and afterwards on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(options: Options) -> Iterator[Benchmark]:
    """A table for evaluation and one for training.

    Args:
        options: which photos, and beside whom.
    """
    spec = InputSpec(size=options.config.image_hw, resize="crop", crop=CROP, interpolation="bicubic")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, one_thread():
        paths = make_photos(Path(folder)) if options.data is None else some(files(options.data))
        source = Files(Path(), [str(path) for path in paths], [0] * len(paths), ["photo"])
        width, height = np.mean([decode(source.raw(i), str(path)).size for i, path in enumerate(paths)], axis=0)
        which = f"{len(paths)} {'sample ' * (options.data is None)}photos of {width:.0f} x {height:.0f}"
        ours: dict[str, Run] = {
            "evaluation": lambda: evaluation(source, spec),
            "random crops and flips": lambda: training(source, spec, Augment()),
        }
        for title, run in ours.items():
            yield table(options, paths, spec, title, run, which)


def some(found: Sequence[str]) -> list[Path]:
    """As many of a folder's files as are measured, spread over all of them: whole batches, or less than one."""
    count = min(PHOTOS, len(found) if len(found) < BATCH else len(found) // BATCH * BATCH)
    return [Path(found[i]).absolute() for i in np.linspace(0, len(found) - 1, count).astype(int)]


def table(options: Options, paths: Sequence[Path], spec: InputSpec, title: str, run: Run, which: str) -> Benchmark:
    """One table: ours and the peers' on the same files."""
    found = Contenders(torch.device("cpu"))
    found.add("ours", "loader", lambda: run)
    for name in TRANSFORMS if options.peer is None else options.peer:
        if name not in TRANSFORMS:
            found.note(name, "has no transforms of its own for such files, or none that do the same.")
            continue

        def build(name: str = name) -> Run:
            transform = TRANSFORMS[name](spec, title != "evaluation")
            return lambda: theirs(paths, transform)

        found.add("peer", name, build)
    return found.table(
        f"{title}, {which} to {spec.size[0]} px, processor time",
        len(paths),
        options.rounds,
        options.seconds,
        run="pass",
        clock=time.process_time,
    )
