"""From JPEG files to features and answers on one GPU: vitkit's embed and eval, next to timm's loader with a compiled
model and to plain Pillow processes that only decode and resize. All take turns in one run.

python -m benchmarks.fed --photos FOLDER [--images 20000] [--model vit_base_patch16_224] [--rounds 3]

The files are made first: different crops of the photos, with a short side of 256 pixels.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.timing import alternate, table

CLASSES = 4


def make(job: tuple[list[str], Path, int, int]) -> None:
    """Write the files [first, last) of the data set."""
    from PIL import Image

    photos, folder, first, last = job
    for i in range(first, last):
        rng = random.Random(i)
        with Image.open(photos[rng.randrange(len(photos))]) as image:
            image = image.convert("RGB")
            share = rng.uniform(0.7, 1.0)
            width, height = int(image.width * share), int(image.height * share)
            left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
            scale = 256 / min(width, height)
            box = (left, top, left + width, top + height)
            size = (max(256, round(width * scale)), max(256, round(height * scale)))
            image = image.resize(size, Image.Resampling.BICUBIC, box=box)
        image.save(folder / f"class-{i % CLASSES}" / f"{i:06d}.jpg", quality=rng.randint(80, 95))


def decode(names: list[str]) -> int:
    """Decode, resize and crop files as timm's evaluation transform does, with Pillow alone."""
    from PIL import Image

    for name in names:
        with Image.open(name) as image:
            image = image.convert("RGB")
            scale = 248 / min(image.size)
            image = image.resize(
                (round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC
            ).crop((12, 12, 236, 236))
            image.tobytes()
    return len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", required=True, help="Folder of photos to crop from.")
    parser.add_argument("--images", type=int, default=20_000, help="Files to make (default: 20000).")
    parser.add_argument("--model", default="vit_base_patch16_224", help="Architecture (default: vit_base_patch16_224).")
    parser.add_argument("--batch", type=int, default=256, help="Images per batch (default: 256).")
    parser.add_argument("--rounds", type=int, default=3, help="Rounds (default: 3).")
    parser.add_argument("--only", nargs="*", help="Contenders to run (default: all).")
    parser.add_argument("--json", type=Path, help="File for the seconds of every round (default: none).")
    options = parser.parse_args()

    cores = len(os.sched_getaffinity(0))
    folder = Path(tempfile.mkdtemp(prefix="fed-"))
    for k in range(CLASSES):
        (folder / f"class-{k}").mkdir()
    photos = sorted(str(path) for path in Path(options.photos).rglob("*.jpg"))
    piece = -(-options.images // (4 * cores))
    jobs = [(photos, folder, i, min(i + piece, options.images)) for i in range(0, options.images, piece)]
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.map(make, jobs)
    files = sorted(folder.rglob("*.jpg"))
    for file in files[len(files) // options.batch * options.batch :]:
        file.unlink()  # a smaller last batch would be compiled again
    files = files[: len(files) // options.batch * options.batch]
    size = sum(file.stat().st_size for file in files)
    print(f"{len(files):,} files, {size / 1e6:.0f} MB, made in {time.perf_counter() - start:.0f} s", flush=True)

    contenders = _contenders(options, folder, [str(file) for file in files], cores)
    if options.only:
        contenders = {name: work for name, work in contenders.items() if name in options.only}
    contenders = {name: _spoken(name, work) for name, work in contenders.items()}
    seconds = alternate(contenders, rounds=options.rounds)
    print(table(seconds, "vitkit embed", work=len(files), unit="images/s"))
    if options.json:
        options.json.write_text(json.dumps({"images": len(files), "seconds": seconds}, indent=1))


def _spoken(name: str, work: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        start = time.perf_counter()
        work()
        print(f"{name}: {time.perf_counter() - start:.2f} s", flush=True)

    return run


def _contenders(
    options: argparse.Namespace, folder: Path, files: list[str], cores: int
) -> dict[str, Callable[[], None]]:
    import torch

    import vitkit
    from vitkit.data.sources import open_splits
    from vitkit.errors import VitkitError
    from vitkit.features import FeatureCache, fill
    from vitkit.jobs.evaluate import evaluate
    from vitkit.jobs.peers import library
    from vitkit.runtime import Runtime

    runtime = Runtime()
    source = open_splits(str(folder))["all"]()
    model = vitkit.create(options.model, num_classes=CLASSES).eval().to(runtime.device)
    spec = {"batch_size": options.batch, "workers": cores, "runtime": runtime}

    def embed() -> None:
        with tempfile.TemporaryDirectory() as place:  # a new cache each time: hashing and writing count
            fill(model, source, FeatureCache(place), **spec)

    def evaluated() -> None:
        evaluate(model, source, same_order=True, **spec)

    def pillow() -> None:
        parts = [files[i :: 4 * cores] for i in range(4 * cores)]
        with multiprocessing.get_context("fork").Pool(cores) as pool:
            assert sum(pool.imap_unordered(decode, parts)) == len(files)

    found: dict[str, Callable[[], None]] = {"vitkit embed": embed, "vitkit eval": evaluated, "Pillow only": pillow}
    try:
        timm, data = library("timm"), library("timm.data")
    except VitkitError as error:
        print(f"timm is left out: {error}")
        return found
    theirs = timm.create_model(options.model, num_classes=CLASSES).eval().to(runtime.device)
    config = data.resolve_data_config({}, model=theirs)
    compiled = torch.compile(theirs) if runtime.device.type == "cuda" else theirs

    def timms() -> None:
        loader = data.create_loader(
            data.create_dataset("", root=str(folder)),
            input_size=config["input_size"],
            batch_size=options.batch,
            interpolation=config["interpolation"],
            mean=config["mean"],
            std=config["std"],
            crop_pct=config["crop_pct"],
            num_workers=cores,
            pin_memory=runtime.device.type == "cuda",
            use_prefetcher=runtime.device.type == "cuda",
            device=runtime.device,
        )
        with torch.inference_mode(), torch.autocast(runtime.device.type, torch.bfloat16):
            logits = [compiled(x).float().cpu() for x, _ in loader]
        assert sum(map(len, logits)) == len(files)

    return found | {"timm's loader, compiled model": timms}


if __name__ == "__main__":
    main()
