"""Speed and memory of explain and figures, and how faithful the maps are.

python -m benchmarks.explain WEIGHTS [--images FOLDER] [--faithfulness N [--occlusion N]] [--only-faithfulness]

Register neurons are found on the images with even numbers; the table is made on those with odd numbers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.timing import alternate  # isort: skip  (sets OMP_WAIT_POLICY before torch is imported)

import resource
import statistics
from typing import cast

import numpy as np
import torch

import vitkit
from vitkit import ViT
from vitkit.data import preprocess
from vitkit.data.base import Subset
from vitkit.explanations.attention import attention_distance, class_attention, gradient_rollout, rollout
from vitkit.explanations.common import grid_of, patch_map
from vitkit.explanations.occlusion import Faithfulness, faithfulness, occlusion
from vitkit.explanations.registers import find, patch_norms, with_registers
from vitkit.jobs.explain import FOUND_ON, explain
from vitkit.jobs.figures import figures, pixels, sample_photos, some_images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("--images", default=None)
    parser.add_argument("--count", type=int, default=128)
    parser.add_argument("--faithfulness", type=int, default=0, metavar="N")
    parser.add_argument("--occlusion", type=int, default=10**9, metavar="N", help="score it on fewer images")
    parser.add_argument("--only-faithfulness", action="store_true")
    args = parser.parse_args()
    model = cast(ViT, vitkit.load(args.weights))
    if not args.only_faithfulness:
        speed(model, args)
    if args.faithfulness:
        faithful(model, args)


def speed(model: ViT, args: argparse.Namespace) -> None:
    photo = sample_photos().read(1)[0]
    x = preprocess(photo, model.input_spec)[None]

    seconds = alternate(
        {
            "forward": lambda: model(x),
            "attention of the class token": lambda: class_attention(model, x),
            "rollout": lambda: rollout(model, x),
            "gradient rollout": lambda: gradient_rollout(model, x),
        }
    )
    print("| one image | ms | times a forward pass |\n|---|---|---|")
    for name, values in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(values, seconds["forward"], strict=True))
        print(f"| {name} | {1000 * statistics.median(values):.1f} | {ratio:.1f} |")

    with tempfile.TemporaryDirectory() as folder:

        def whole() -> None:
            list(explain(model, photo, Path(folder)))

        times = alternate({"explain": whole}, rounds=3)["explain"]
        print(
            f"\nexplain of one image, with pictures, arrays and tables: {statistics.median(times):.2f} s "
            f"({min(times):.2f} to {max(times):.2f})"
        )
        start = time.perf_counter()
        occlusion(model, x)
        print(f"occlusion of one image: {time.perf_counter() - start:.2f} s")

        source = some_images(args.images, args.count)
        start = time.perf_counter()
        list(figures(model, source, Path(folder)))
        print(f"figures over {len(source)} images: {time.perf_counter() - start:.1f} s")

        peaks = []
        for count in (16, len(source)):
            attention_distance(model, pixels(some_images(args.images, count), model.input_spec))
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        print(
            f"largest memory after attention distance over 16 and {len(source)} images: {peaks[0]:.0f} and "
            f"{peaks[1]:.0f} MiB"
        )


def faithful(model: ViT, args: argparse.Namespace) -> None:
    source = some_images(args.images, 10**9)
    choose, report = (Subset(source, np.arange(first, len(source), 2)) for first in (0, 1))
    few = Subset(choose, np.linspace(0, len(choose) - 1, min(FOUND_ON, len(choose))).round().astype(int))
    found = find(model, pixels(few, model.input_spec))
    print(found, flush=True)
    moved = with_registers(model, found.neurons, found.count) if found.neurons else model
    models = {"": model, " with registers": moved}

    said, largest = [], []
    for x in pixels(report, model.input_spec, 25):
        with torch.no_grad():
            said.append(torch.stack([one(x).argmax(1) for one in models.values()], 1).numpy())
        largest.append(np.stack([patch_norms(one, x).max((2, 3)) for one in models.values()], 1))  # [B, 2, 1 + L]
    answers = np.concatenate(said)  # [images, 2]
    print(f"the same answer with registers for {np.mean(answers[:, 0] == answers[:, 1]):.1%} of {len(report)} images")
    if all(name.isdigit() for name in source.class_names):  # folders named by class index
        truth = np.array([int(source.class_names[report.read(i)[1]]) for i in range(len(report))])
        print(f"top-1 without and with registers: {', '.join(f'{v:.1%}' for v in (truth == answers.T).mean(1))}")
    print("\n| largest norm / median after layer | " + " | ".join(map(str, range(len(model.blocks) + 1))) + " |")
    print("|---|" + "---|" * (len(model.blocks) + 1))
    for name, row in zip(models, np.concatenate(largest).mean(0), strict=True):
        print(f"| model{name} | " + " | ".join(f"{value:.1f}" for value in row) + " |", flush=True)

    scores: dict[str, list[Faithfulness]] = {}
    chosen = np.linspace(0, len(report) - 1, min(args.faithfulness, len(report))).round().astype(int)
    few = set(chosen[np.linspace(0, len(chosen) - 1, min(args.occlusion, len(chosen))).round().astype(int)].tolist())
    for done, i in enumerate(chosen.tolist(), 1):
        x = preprocess(report.read(i)[0], model.input_spec)[None]
        grid = grid_of(model, x)
        maps = {"occlusion": occlusion(model, x)[0]} if i in few else {}
        for name, one in models.items():
            maps[f"rollout{name}"] = patch_map(rollout(one, x), one, grid)[0]
            maps[f"gradient rollout{name}"] = patch_map(gradient_rollout(one, x), one, grid)[0]
        for name, score in (found_scores := faithfulness(model, x, maps)).items():
            scores.setdefault(name, []).append(score)
            scores.setdefault(f"random for {name}", []).append(found_scores["random"])
        if done % 10 == 0 or done == len(chosen):
            table(scores)


def table(scores: dict[str, list[Faithfulness]]) -> None:
    print(
        "\n| map | images | deletion (low is good) | loses to random | insertion (high is good) | loses to random |\n"
        "|---|---|---|---|---|---|"
    )
    for name, of in scores.items():
        if name.startswith("random for "):
            continue
        cells = [f"{len(of)}"]
        for kind, sign in (("deletion", 1), ("insertion", -1)):
            chance = np.array([getattr(s, kind) for s in scores[f"random for {name}"]])
            values = np.array([getattr(s, kind) for s in of])
            cells += [f"{values.mean():.3f} ± {values.std(ddof=1) / len(values) ** 0.5:.3f}"]
            cells += ["" if name == "random" else f"{int((sign * values >= sign * chance).sum())}"]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
