"""The data pipelines against timm's, torchvision's and Hugging Face's, on the same files, one core, taking turns.

    python -m benchmarks.data FOLDER [--images 96] [--rounds 7]

FOLDER holds train/<class>/ with photos of about 500 px on the longer side (FoodVision Mini does). The 12-megapixel
photos are made from them. Every pipeline starts from files and ends with a normalised float32 batch. `vitkit bench
--what data` measures the plain ones, on any folder.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.timing import alternate, table

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a pipeline is measured for each core

import torch
from PIL import Image

from vitkit.data import Augment, TrainLoader, cached, open_source
from vitkit.data.base import Subset
from vitkit.data.folder import Files
from vitkit.jobs.bench.data import BATCH, evaluation, theirs, timm, torchvision, training
from vitkit.jobs.peers import library
from vitkit.model.config import InputSpec

SPEC = InputSpec(resize="crop", crop=0.9, interpolation="bicubic")
CROPS = Augment()  # RandomResizedCrop and flip
JITTER = Augment(color_jitter=0.4)  # timm's default


def turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each contender in each round: what else the machine does counts little."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):  # the first round warms up
        order = list(contenders)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            start = time.process_time()
            contenders[name]()
            if turn:
                seconds[name].append(time.process_time() - start)
    return seconds


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()


def large(files: list[Path], folder: Path, count: int) -> Files:
    """Photos of 12 megapixels, made from smaller ones."""
    for n, path in enumerate(files[:count]):
        noise = Image.effect_noise((4000, 3000), 12).convert("RGB")
        photo = Image.open(path).convert("RGB").resize((4000, 3000), Image.Resampling.BICUBIC)
        Image.blend(photo, noise, 0.1).save(folder / f"{n:03d}.jpg", quality=90)
    return Files(folder, [f"{n:03d}.jpg" for n in range(count)], [0] * count, ["photo"])


def busy(folder: Path, rounds: int) -> None:
    """Two worker processes, one pass over a folder: our loader against timm's and torchvision's."""
    loaders, data = library("timm.data"), library("torch.utils.data")
    source, root = open_source(folder), folder / "train"
    steps = len(source) // BATCH

    def ours() -> None:
        for batch in TrainLoader(source, SPEC, CROPS, batch_size=BATCH, workers=2).batches(0, steps):
            len(batch)

    def with_timm() -> None:
        loader = loaders.create_loader(
            loaders.ImageDataset(str(root)),
            (3, 224, 224),
            BATCH,
            is_training=True,
            num_workers=2,
            use_prefetcher=False,
            color_jitter=None,
            interpolation="bicubic",
            mean=SPEC.mean,
            std=SPEC.std,
            pin_memory=False,
            persistent_workers=False,
        )
        for x, _ in loader:
            len(x)

    def with_torchvision() -> None:
        images = library("torchvision.datasets").ImageFolder(str(root), torchvision(SPEC, True))
        for x, _ in data.DataLoader(images, BATCH, shuffle=True, num_workers=2, drop_last=True):
            len(x)

    print(f"\n## Two workers, {steps * BATCH} images with the start of the workers, by the clock\n")
    print(
        table(
            alternate({"vitkit": ours, "timm": with_timm, "torchvision": with_torchvision}, rounds),
            "vitkit",
            steps * BATCH,
            "images/s",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    whole = open_source(args.folder)
    source = Subset(
        whole, torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))[: args.images].numpy()
    )
    files = [path for i in range(len(source)) if (path := source.place(i)) is not None]
    n = len(files)
    sizes = [Image.open(path).size for path in files]
    print(
        f"{n} photos, mean {sum(w for w, _ in sizes) / n:.0f} x {sum(h for _, h in sizes) / n:.0f} px; "
        f"{platform.machine()}, load {os.getloadavg()[0]:.1f}; images a second of processor time on one core."
    )

    transform = timm(SPEC, False)
    assert evaluation(source, SPEC, digest) == theirs(files, transform, digest), "the pixels are not the same"
    processor = library("transformers.models.vit.image_processing_pil_vit").ViTImageProcessorPil()
    print("\n## Evaluation (bicubic, crop 0.9), pixels identical to timm's\n")
    print(
        table(
            turns(
                {
                    "vitkit": lambda: evaluation(source, SPEC),
                    "timm": lambda: theirs(files, transform),
                    "Hugging Face (Pillow, bilinear)": lambda: [
                        processor(Image.open(f).convert("RGB"), return_tensors="pt")["pixel_values"] for f in files
                    ],
                },
                args.rounds,
            ),
            "vitkit",
            n,
            "images/s",
        )
    )

    for title, how, jitter in (("RandomResizedCrop, flip", CROPS, 0.0), ("with colour jitter 0.4", JITTER, 0.4)):
        their_own = timm(SPEC, True, jitter)
        contenders = {
            "vitkit": lambda how=how: training(source, SPEC, how),
            "timm": lambda t=their_own: theirs(files, t),
        }
        if not jitter:
            vision = torchvision(SPEC, True)
            contenders["torchvision"] = lambda t=vision: theirs(files, t)
        print(f"\n## Training: {title}\n")
        print(table(turns(contenders, args.rounds), "vitkit", n, "images/s"))

    with tempfile.TemporaryDirectory() as folder:
        kept, exact = cached(source, f"{folder}/whole"), cached(source, f"{folder}/exact", spec=SPEC)
        small = cached(source, f"{folder}/small", short_side=256)
        their_own = timm(SPEC, True)
        print("\n## From the decoded cache, training (RandomResizedCrop, flip)\n")
        print(
            table(
                turns(
                    {
                        "vitkit, short side 256": lambda: training(small, SPEC, CROPS),
                        "vitkit, whole images": lambda: training(kept, SPEC, CROPS),
                        "timm": lambda: theirs(files, their_own),
                    },
                    args.rounds,
                ),
                "vitkit, short side 256",
                n,
                "images/s",
            )
        )
        print("\n## From the decoded cache, evaluation\n")
        assert evaluation(exact, SPEC, digest) == theirs(files, transform, digest), "the pixels are not the same"
        print(
            table(
                turns(
                    {"vitkit, cached": lambda: evaluation(exact, SPEC), "timm": lambda: theirs(files, transform)},
                    args.rounds,
                ),
                "vitkit, cached",
                n,
                "images/s",
            )
        )
        big = large(files, Path(folder), 6)
        big_files = [big.place(i) for i in range(len(big))]
        print("\n## Training at 12 megapixels (RandomResizedCrop, flip)\n")
        print(
            table(
                turns(
                    {"vitkit": lambda: training(big, SPEC, CROPS), "timm": lambda: theirs(big_files, their_own)},
                    max(3, args.rounds // 2),
                ),
                "vitkit",
                len(big),
                "images/s",
            )
        )
    busy(args.folder, max(3, args.rounds // 2))


if __name__ == "__main__":
    main()
