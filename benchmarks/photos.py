"""How well the tools for photos work, on frozen features of real weights.

    python -m benchmarks.photos labels  --data FOLDER     # share of planted wrong labels that the ranking puts first
    python -m benchmarks.photos unknown --data FOLDER     # photos of other things, and classes that were left out
    python -m benchmarks.photos suggest --data FOLDER     # accuracy after labelling suggested or random photos
    python -m benchmarks.photos near    --data FOLDER     # near-duplicates: changed photos found, different ones not

FOLDER holds pizza_steak_sushi/, imagenet_val_500/, fashion_mnist/ and weights/ with timm's ViT-Ti/16. Features are
cached.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import vitkit
from vitkit.data import open_source
from vitkit.data.base import Source, Subset
from vitkit.evaluation.predict import Images
from vitkit.features import FeatureCache, embed, labels, unknown
from vitkit.types import Array

WEIGHTS = "weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.timm.pth"
PER_CLASS = 50
SEEDS = 10


class Features:
    """The features of the data sets, computed when they are asked for."""

    def __init__(self, data: Path, cache: Path, cifar10: Path | None = None) -> None:
        self.cifar10 = cifar10
        self.data, self.cache = data, FeatureCache(cache)
        self.model = vitkit.load(data / WEIGHTS, num_attention_heads=3)

    def of(self, source: Source) -> tuple[Array, Array]:
        found = embed(self.model, source, self.cache, workers=0)
        return found.features, found.labels

    def food(self, split: str) -> tuple[Array, Array]:
        return self.of(open_source(self.data / "pizza_steak_sushi", split))

    def fashion(self, split: str, per_class: int) -> tuple[Array, Array, tuple[str, ...]]:
        return self.some(str(self.data / "fashion_mnist"), split, per_class)

    def some(self, spec: str, split: str, per_class: int) -> tuple[Array, Array, tuple[str, ...]]:
        source = open_source(spec, split)
        rows = np.sort(np.concatenate([np.flatnonzero(source.labels == k)[:per_class] for k in range(10)]))
        return *self.of(Subset(source, rows)), source.class_names


def found_first(X: Array, y: Array, wrong: Array, new: Array) -> float:
    """Plant labels, and return the share of them in the first tenth of the ranking."""
    planted = y.copy()
    planted[wrong] = new
    first = labels.rank(X, planted).order[: round(0.1 * len(y))]
    return len(set(first.tolist()) & set(wrong.tolist())) / len(wrong)


def measure_labels(features: Features) -> None:
    X, y = features.food("train")
    shares = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        wrong = rng.permutation(len(y))[: round(0.05 * len(y))]
        shares.append(found_first(X, y, wrong, (y[wrong] + rng.integers(1, 3, len(wrong))) % 3))
    report(f"FoodVision Mini, {len(y)} photos, {len(wrong)} labels changed at random", shares)
    X, y, names = features.fashion("train", PER_CLASS)
    ranking = labels.rank(X, y)
    table = np.zeros((10, 10), int)
    np.add.at(table, (y, ranking.suggested), 1)
    both = table + table.T - 2 * np.diag(np.diag(table))
    a, b = np.unravel_index(both.argmax(), both.shape)
    shares, everywhere = [], []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        pair = rng.permutation(np.flatnonzero((y == a) | (y == b)))[: round(0.05 * len(y))]
        shares.append(found_first(X, y, pair, np.where(y[pair] == a, b, a)))
        wrong = rng.permutation(len(y))[: round(0.05 * len(y))]
        everywhere.append(found_first(X, y, wrong, (y[wrong] + rng.integers(1, 10, len(wrong))) % 10))
    report(f"Fashion-MNIST, {PER_CLASS} per class, {len(wrong)} labels changed at random", everywhere)
    report(f"Fashion-MNIST, {PER_CLASS} per class, {len(pair)} swaps of {names[a]} and {names[b]}", shares)


def report(what: str, shares: list[float]) -> None:
    print(
        f"{what}: {np.mean(shares):.1%} in the first 10% (worst of {len(shares)} seeds {min(shares):.1%})", flush=True
    )


def auroc(known: Array, other: Array) -> float:
    """The probability that a photo of something else is farther away than a known one."""
    return float((other[:, None] > known).mean() + 0.5 * (other[:, None] == known).mean())


def measure_unknown(features: Features) -> None:
    X, y = features.food("train")
    Xt, yt = features.food("test")
    other, _ = features.of(Images(features.data / "imagenet_val_500"))
    spec = features.model.input_spec
    found = unknown.fit(X, y, spec, 0.95)
    a, b = unknown.distances(found, Xt), unknown.distances(found, other)
    print(
        f"{len(b)} other photos: AUROC {auroc(a, b):.4f}; accepted {np.mean(b <= found.limit):.1%} of them and "
        f"{np.mean(a <= found.limit):.1%} of {len(a)} test photos"
    )
    for k, name in enumerate(("pizza", "steak", "sushi")):
        kept, inside = y != k, yt != k
        found = unknown.fit(X[kept], y[kept], spec, 0.95)
        a, b = unknown.distances(found, Xt[inside]), unknown.distances(found, Xt[~inside])
        print(
            f"without {name}: AUROC {auroc(a, b):.3f}; accepted {np.mean(b <= found.limit):.1%} of {name} and "
            f"{np.mean(a <= found.limit):.1%} of the others"
        )


def measure_suggest(features: Features) -> None:
    from vitkit.features.probe import Options, fit
    from vitkit.features.suggest import suggest

    def accuracy(X: Array, y: Array, Xt: Array, yt: Array, names: tuple[str, ...]) -> float:
        head = fit("logistic", X, y, names, Options(strength=0.01)).head
        return float((head.logits(Xt).argmax(1) == yt).mean())

    sets: dict[str, tuple[Any, ...]] = {
        "FoodVision Mini": (*features.food("train"), *features.food("test"), ("pizza", "steak", "sushi"), 3, 10),
        "Fashion-MNIST": (
            *features.fashion("train", 200)[:2], *features.fashion("test", 100), 3, 50
        ),
    }  # fmt: skip
    if features.cifar10:  # nothing about `suggest` was chosen on it
        spec = f"cifar10:{features.cifar10}"
        sets["CIFAR-10"] = (*features.some(spec, "train", 200)[:2], *features.some(spec, "test", 100), 3, 50)
    for what, (X, y, Xt, yt, names, first, count) in sets.items():
        results: dict[str, list[list[float]]] = {"suggested": [], "random": []}
        for seed in range(SEEDS):
            rng = np.random.default_rng(seed)
            start = np.concatenate([rng.permutation(np.flatnonzero(y == k))[:first] for k in range(len(names))])
            for way, scores in results.items():
                have, row = start, []
                for _ in range(3):
                    rest = np.setdiff1d(np.arange(len(y)), have)
                    if way == "random":
                        new = rng.permutation(rest)[:count]
                    else:
                        head = fit("logistic", X[have], y[have], names, Options(strength=0.01)).head
                        new = rest[suggest(X[rest], head.logits(X[rest]), count)]
                    have = np.concatenate([have, new])
                    row.append(accuracy(X[have], y[have], Xt, yt, names))
                scores.append(row)
        for way, scores in results.items():
            means = ", ".join(f"{value:.1%}" for value in np.mean(scores, 0))
            print(f"{what}, {first} per class and then 3 times {count} {way}: {means}", flush=True)
        gain = np.mean(results["suggested"], 1) - np.mean(results["random"], 1)
        print(f"  gain {gain.mean():.1%}, standard error {gain.std(ddof=1) / SEEDS**0.5:.1%}", flush=True)


def measure_near(features: Features) -> None:
    import io

    from PIL import Image, ImageEnhance

    from vitkit.data.near import close_features, close_hashes, perceptual_hash

    def recompressed(image: Image.Image) -> Image.Image:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=30)
        return Image.open(buffer)

    def cropped(image: Image.Image) -> Image.Image:
        w, h = image.size
        return image.crop((w // 33, h // 33, w - w // 33, h - h // 33))

    changes: dict[str, Callable[[Image.Image], Image.Image]] = {
        "half the size": lambda image: image.resize((image.width // 2, image.height // 2)),
        "JPEG quality 30": recompressed,
        "brightness 1.25": lambda image: ImageEnhance.Brightness(image).enhance(1.25),
        "gray": lambda image: image.convert("L").convert("RGB"),
        "3% cropped on each side": cropped,
        "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    }
    source = Images([features.data / "pizza_steak_sushi", features.data / "imagenet_val_500"])
    images = [source.read(i)[0].convert("RGB") for i in range(len(source))]
    hashes = np.array([perceptual_hash(image) for image in images], np.uint64)
    X, _ = features.of(source)
    pairs = len(images) * (len(images) - 1) // 2
    print(f"{pairs:,} pairs of different photos: {len(list(close_hashes(hashes)))} close by hash, "
          f"{len(list(close_features(X)))} by features")  # fmt: skip
    some = range(0, len(images), 10)
    for word, change in changes.items():
        new = [change(images[i]) for i in some]
        by_hash = [
            bool(list(close_hashes(np.array([hashes[i], perceptual_hash(one)], np.uint64))))
            for i, one in zip(some, new)
        ]
        F, _ = features.of(Images(new))
        close = set(close_features(np.concatenate([X, F])))
        by_features = [(i, len(X) + n) in close for n, i in enumerate(some)]
        print(f"{word}: {np.mean(by_hash):.1%} by hash, {np.mean(by_features):.1%} by features", flush=True)


MEASURES = {"labels": measure_labels, "unknown": measure_unknown, "suggest": measure_suggest, "near": measure_near}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("photos-cache"))
    parser.add_argument("--cifar10", type=Path, help="folder of CIFAR-10's binary files, for suggest")
    args = parser.parse_args()
    MEASURES[args.what](Features(args.data, args.cache, args.cifar10))


if __name__ == "__main__":
    main()
