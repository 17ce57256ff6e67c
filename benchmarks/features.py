"""Embedding compared with timm's forward pass and loader on the same files, and its memory use for 1,000 and 10,000
images.

python -m benchmarks.features --data FOLDER --weights vit_tiny_...timm.pth [--images 300] [--workers 2] [--rounds 5]
python -m benchmarks.features --memory
"""

from __future__ import annotations

import argparse
import gc
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import alternate, table

COUNTS = (1_000, 10_000)


def throughput(data: str, weights: str, images: int, workers: int, rounds: int, batch: int) -> None:
    import numpy as np
    import torch

    import vitkit
    from tests.peers import peer
    from vitkit.data.base import Subset
    from vitkit.data.sources import open_splits
    from vitkit.features import FeatureCache, fill

    splits = open_splits(data)
    source = splits["train" if "train" in splits else "all"]()
    count = min(images, len(source))
    places = np.linspace(0, len(source) - 1, count).astype(int)
    files = [source.place(int(i)) for i in places]
    chosen = Subset(source, places)
    model = vitkit.load(weights)

    timm, timm_data = peer("timm"), peer("timm.data")
    theirs = timm.create_model(Path(weights).name.split(".timm")[0], pretrained=False).eval()
    theirs.load_state_dict(torch.load(weights, weights_only=True), strict=True)
    config = timm_data.resolve_data_config({}, model=theirs)

    class Reader(timm_data.readers.reader.Reader):
        """The same files, as timm reads them."""

        def __getitem__(self, i):
            return open(files[i], "rb"), 0

        def __len__(self):
            return len(files)

        def _filename(self, i, basename=False, absolute=False):
            return str(files[i])

    found = {}

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder:  # a new cache each time, so that hashing and writing count
            filled = fill(model, chosen, FeatureCache(folder), batch_size=batch, workers=workers)
            found["vitkit"] = filled.read().features

    def timms() -> None:
        loader = timm_data.create_loader(
            timm_data.ImageDataset("", reader=Reader()),
            input_size=config["input_size"],
            batch_size=batch,
            use_prefetcher=False,
            num_workers=workers,
            interpolation=config["interpolation"],
            mean=config["mean"],
            std=config["std"],
            crop_pct=config["crop_pct"],
            persistent_workers=False,
            device=torch.device("cpu"),
        )
        with torch.inference_mode():
            found["timm"] = torch.cat(
                [theirs.forward_head(theirs.forward_features(x), pre_logits=True) for x, _ in loader]
            ).numpy()

    processor: dict[str, list[float]] = {"vitkit embed": [], "timm forward": []}

    def counted(name, work):
        def run() -> None:
            before = used()
            work()
            gc.collect()  # ends the loader's processes, so that their time is counted
            processor[name].append(used() - before)

        return run

    contenders = {"vitkit embed": ours, "timm forward": timms}
    seconds = alternate({name: counted(name, work) for name, work in contenders.items()}, rounds=rounds)
    difference = np.abs(found["vitkit"] - found["timm"]).max() / np.abs(found["timm"]).max()
    print(
        f"{count} photos, batch {batch}, {workers} workers, {torch.get_num_threads()} threads; largest relative "
        f"difference of the features {difference:.1e}\n"
    )
    print(table(seconds, "vitkit embed", work=count, unit="images/s"))
    print("\nIn processor time, workers included (less affected by other programs):\n")
    print(
        table(
            {name: values[1:] for name, values in processor.items()},
            "vitkit embed",
            work=count,
            unit="images per processor second",
        )
    )


def used() -> float:
    """Return the processor time of this process and its finished children, in seconds."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def memory(count: int) -> None:
    """Embed `count` synthetic photos; print peak resident memory and cache size in MiB, and seconds."""
    import numpy as np
    from PIL import Image

    from vitkit import ViT, ViTConfig
    from vitkit.data.base import Source
    from vitkit.features import FeatureCache, fill

    class Synthetic(Source):
        """Photos that are generated when they are read."""

        def __init__(self) -> None:
            super().__init__(np.zeros(count, np.int32), ["a", "b"])

        def raw(self, i: int) -> Image.Image:
            return Image.fromarray(np.random.default_rng(i).integers(0, 256, (64, 64, 3), np.uint8))

    model = ViT(
        ViTConfig(
            hidden_size=192,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=384,
            image_size=32,
            patch_size=8,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        filled = fill(model, Synthetic(), FeatureCache(folder), workers=0)
        assert filled.computed == count
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} {size / 2**20:.1f} {filled.seconds:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of photos")
    parser.add_argument("--weights", help="timm's file of vit_tiny_patch16_224.augreg_in21k_ft_in1k or another ViT")
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.count:
        memory(args.count)
        return
    if args.data and args.weights:
        throughput(args.data, args.weights, args.images, args.workers, args.rounds, args.batch)
    if args.memory or not args.data:
        print("\n| images | peak resident MiB | cache MiB | seconds |\n|---|---|---|---|")
        for count in COUNTS:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.features", "--count", str(count)],
                capture_output=True,
                text=True,
                check=True,
            )
            print(f"| {count:,} | {' | '.join(done.stdout.split())} |", flush=True)


if __name__ == "__main__":
    main()
