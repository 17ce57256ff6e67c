"""From JPEG files to features and answers on one GPU: vitkit's embed and eval, next to timm's loader with a compiled
model and to plain Pillow processes that only decode and resize.

python -m benchmarks.fed --photos FOLDER [--images 20000] [--model vit_base_patch16_224] [--rounds 2] [--seconds 330]

The files are made first: different crops of the photos, with a short side of 256 pixels. Then everyone runs once (the
first runs, which start engines and compilers), then all take turns. Every line is printed when it is known, and nothing
new begins after --seconds. All preprocess alike: bicubic to 248 pixels, 224 from the centre.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

CLASSES = 4
TIMM = "timm's loader, compiled model"
PREDICTED = 80  # photos of the prediction in a fresh process
PREDICT = """
import sys, time
start = time.perf_counter()
from vitkit.devices import import_torch, start_device
start_device("auto")  # as the command does
import_torch()
import vitkit
vitkit.load, vitkit.predict
imported = time.perf_counter()
model = vitkit.load(sys.argv[1], device="auto")
loaded = time.perf_counter()
found = vitkit.predict(model, sys.argv[2:])
print(f"{imported - start:.2f} s to import, {loaded - imported:.2f} s to load, "
      f"{time.perf_counter() - loaded:.2f} s to predict {len(found)} photos")
from vitkit.process_group import leave
leave(0)  # as the command does
"""


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
        # The comment tells apart the files of equal crops, which `embed` would compute once.
        file, quality = folder / f"class-{i % CLASSES}" / f"{i:06d}.jpg", rng.randint(80, 95)
        image.save(file, quality=quality, comment=f"{i}".encode())


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
    parser.add_argument("--rounds", type=int, default=2, help="Rounds after the first runs (default: 2).")
    parser.add_argument("--seconds", type=float, default=330, help="Begin nothing new after this time (default: 330).")
    parser.add_argument("--only", nargs="*", help="Contenders to run (default: all).")
    parser.add_argument("--json", type=Path, help="File for the seconds per --images of every run (default: none).")
    options = parser.parse_args()

    began = time.perf_counter()
    cores = len(os.sched_getaffinity(0))
    folder = Path(tempfile.mkdtemp(prefix="fed-"))
    try:
        files = make_all(options, folder, cores)
        contenders, after = _contenders(options, folder, files, cores)
        if options.only:
            contenders = {name: work for name, work in contenders.items() if name in options.only}
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        told = False
        for turn in range(options.rounds + 1):
            for name, work in list(contenders.items()):
                if time.perf_counter() - began > options.seconds:
                    break
                if (
                    not turn and not told and name in (TIMM, list(contenders)[-1])
                ):  # compiling takes long: short comes first
                    told = True
                    for line in after():
                        print(line, flush=True)
                start = time.perf_counter()
                try:
                    count = work() or len(files)
                except Exception as error:  # one that cannot run here must not end the others
                    print(
                        f"{name}: left out ({type(error).__name__}: {' '.join(str(error).split())[:200]})", flush=True
                    )
                    del contenders[name]
                    continue
                took = time.perf_counter() - start
                seconds[name] += [took * len(files) / count] if turn else []
                kind = f"turn {turn}" if turn else "first"
                print(f"{name}, {kind}: {took:.2f} s, {count / took:,.0f} images/s", flush=True)
        print(summary(seconds, len(files)), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"images": len(files), "seconds": seconds}, indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".safetensors").unlink(missing_ok=True)


def make_all(options: argparse.Namespace, folder: Path, cores: int) -> list[str]:
    """Write the data set with one process per core, and return its files."""
    for k in range(CLASSES):
        (folder / f"class-{k}").mkdir()
    photos = sorted(str(path) for path in Path(options.photos).rglob("*.jpg"))
    images = max(options.batch, options.images // options.batch * options.batch)  # no smaller last batch
    piece = -(-images // (4 * cores))
    jobs = [(photos, folder, i, min(i + piece, images)) for i in range(0, images, piece)]
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.map(make, jobs)
    files = sorted(str(file) for file in folder.rglob("*.jpg"))
    size = sum(os.path.getsize(file) for file in files) / 1e6
    print(
        f"{len(files):,} files, {size:.0f} MB, {cores} cores, made in {time.perf_counter() - start:.0f} s", flush=True
    )
    return files


def summary(seconds: dict[str, list[float]], images: int) -> str:
    """Return a Markdown table of the turns: rates, and their share of Pillow's."""
    plain = statistics.median(seconds["Pillow only"]) if seconds.get("Pillow only") else None
    lines = ["| | images/s, median of the turns | share of Pillow only |", "|---|---|---|"]
    for name, values in seconds.items():
        if values:
            middle = statistics.median(values)
            share = f"{plain / middle:.2f}" if plain else ""
            lines.append(f"| {name} | {images / middle:,.0f} | {share} |")
    return "\n".join(lines)


def _contenders(
    options: argparse.Namespace, folder: Path, files: list[str], cores: int
) -> tuple[dict[str, Callable[[], int | None]], Callable[[], Iterator[str]]]:
    """Return what takes turns, and what is measured once after the first turn.

    What takes turns returns how many images it had, or None for all files once.
    """
    import numpy as np
    import torch

    import vitkit
    from vitkit.data.base import Subset
    from vitkit.data.eval_loader import EvalLoader
    from vitkit.data.sources import open_splits
    from vitkit.features import FeatureCache, fill
    from vitkit.jobs.evaluate import evaluate
    from vitkit.runtime import Runtime
    from vitkit.speed.frozen import way

    runtime = Runtime("auto", "auto")
    cuda = runtime.device.type == "cuda"
    source = open_splits(str(folder))["all"]()
    model = vitkit.create(options.model, num_classes=CLASSES).eval()
    model.input_spec = dataclasses.replace(model.input_spec, resize="crop", crop=0.9, interpolation="bicubic")
    vitkit.save(model, folder.with_suffix(".safetensors"))
    model = model.to(runtime.device)
    spec = {"batch_size": options.batch, "workers": cores, "runtime": runtime}

    def embed(decode: str = "cpu") -> None:
        with tempfile.TemporaryDirectory() as place:  # a new cache each time: hashing and writing count
            filled = fill(model, source, FeatureCache(place), decode=decode, **spec)
            assert filled.computed == len(files)

    def resized_by_workers() -> None:
        with mock.patch.object(EvalLoader, "_resizes_there", return_value=False):
            embed()

    def evaluated(decode: str = "cpu", times: int = 1) -> int:
        """Evaluate all files, several times over to tell the start from the rate: `eval` computes copies again."""
        images = Subset(source, np.tile(np.arange(len(source)), times)) if times > 1 else source
        evaluate(model, images, same_order=True, decode=decode, **spec)
        return len(images)

    def pillow() -> None:
        parts = [files[i :: 4 * cores] for i in range(4 * cores)]
        with multiprocessing.get_context("fork").Pool(cores) as pool:
            assert sum(pool.imap_unordered(decode, parts)) == len(files)

    by = way(model, runtime.precision, len(files), None, options.batch)
    pixels = torch.randn(options.batch, 3, 224, 224, device=runtime.device)

    def alone() -> None:
        run = by.build() if by.build else model
        with torch.inference_mode():
            for _ in range(len(files) // options.batch):
                run(pixels)
        if cuda:
            torch.cuda.synchronize()

    compiled: list[Callable[..., torch.Tensor]] = []

    def timms() -> None:
        from vitkit.jobs.peers import library

        timm, data = library("timm"), library("timm.data")
        theirs = timm.create_model(options.model, num_classes=CLASSES).eval().to(runtime.device)
        compiled[:] = compiled or [torch.compile(theirs) if cuda else theirs]
        config = data.resolve_data_config({}, model=theirs)
        loader = data.create_loader(
            data.create_dataset("", root=str(folder)),
            input_size=config["input_size"],
            batch_size=options.batch,
            interpolation="bicubic",
            mean=config["mean"],
            std=config["std"],
            crop_pct=0.9,
            num_workers=cores,
            pin_memory=cuda,
            use_prefetcher=cuda,
            device=runtime.device,
        )
        with torch.inference_mode(), torch.autocast(runtime.device.type, torch.bfloat16):
            logits = [compiled[0](x).float().cpu() for x, _ in loader]
        assert sum(map(len, logits)) == len(files)

    def after() -> Iterator[str]:
        """Yield what is measured once: 80 predictions in a fresh process, and what decoding on the GPU changes."""
        command = [sys.executable, "-c", PREDICT, str(folder.with_suffix(".safetensors")), *files[:PREDICTED]]
        # An installation has bytecode, which pip compiles. Where it is missing and may not be written, every start
        # compiles it again, so both are measured: the first of these processes compiles, the second finds it.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with tempfile.TemporaryDirectory() as place:
            for kind in ("no bytecode", "bytecode"):
                start = time.perf_counter()
                ran = subprocess.run(
                    command,
                    env=env | {"PYTHONPYCACHEPREFIX": place},
                    capture_output=True,
                    text=True,
                    check=False,
                )
                told = (ran.stdout or ran.stderr).strip().splitlines()[-1:] or ["nothing was printed"]
                yield f"predict in a fresh process, {kind}: {time.perf_counter() - start:.2f} s ({told[0]})"
        if not cuda:
            return
        some = open_splits(str(folder))["all"]()
        how = {"batch_size": options.batch, "workers": cores, "device": runtime.device}
        scale, levels, most, share, same, count = 255 * model.input_spec.std[0], 0.0, 0.0, 0.0, 0, 0
        try:
            pairs = zip(
                EvalLoader(some, model.input_spec, **how), EvalLoader(some, model.input_spec, decode="gpu", **how)
            )
            for here, there in itertools.islice(pairs, 4):
                apart = (here.pixels - there.pixels).abs() * scale
                levels += apart.mean().item()
                most, share = max(most, apart.max().item()), share + (apart > 0.5).float().mean().item()
                with torch.inference_mode():
                    a, b = (model(x).argmax(1) for x in (here.pixels, there.pixels))
                same, count = same + int((a == b).sum()), count + len(a)
        except Exception as error:  # whatever torchvision raises must not end the run
            yield f"decoding on the GPU: {type(error).__name__}: {error}"
            return
        batches = max(1, count // options.batch)
        yield (
            f"decoding on the GPU, {count} images next to Pillow: mean difference {levels / batches:.2f} levels, "
            f"largest {most:.0f}, {share / batches:.1%} of the pixels differ, {same} of {count} answers of the "
            f"(untrained) model are the same"
        )

    found: dict[str, Callable[[], int | None]] = {
        "Pillow only": pillow,
        "vitkit embed": embed,
        "vitkit eval": evaluated,
        f"the model alone ({by.name})": alone,
    }
    if cuda:
        found["vitkit embed, decoded on the GPU"] = lambda: embed("gpu")
        found["vitkit eval, decoded on the GPU"] = lambda: evaluated("gpu")
        found["the same, four times over"] = lambda: evaluated("gpu", 4)
        found["vitkit embed, resized by the workers"] = resized_by_workers
    return found | {TIMM: timms}, after


if __name__ == "__main__":
    main()
