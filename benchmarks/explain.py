"""Speed and memory of explain and figures, and how faithful the maps are.

python -m benchmarks.explain WEIGHTS [--images FOLDER] [--faithfulness N]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.timing import alternate  # isort: skip  (sets OMP_WAIT_POLICY before torch is imported)

import resource
import statistics

import vitkit
from vitkit.data import preprocess
from vitkit.explanations.attention import attention_distance, class_attention, gradient_rollout, rollout
from vitkit.explanations.occlusion import occlusion
from vitkit.jobs.explain import explain, summary
from vitkit.jobs.figures import figures, pixels, sample_photos, some_images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("--images", default=None)
    parser.add_argument("--count", type=int, default=128)
    parser.add_argument("--faithfulness", type=int, default=0, metavar="N")
    args = parser.parse_args()
    model = vitkit.load(args.weights)
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

        if args.faithfulness:
            chosen = some_images(args.images, args.faithfulness)
            start = time.perf_counter()
            found = list(explain(model, [chosen.read(i)[0] for i in range(len(chosen))], Path(folder), score=True))
            print(
                f"\nfaithfulness over {len(found)} images, {time.perf_counter() - start:.0f} s\n\n"
                f"| map | deletion (low is good) | beats random | insertion (high is good) | beats random |\n"
                f"|---|---|---|---|---|"
            )
            for name, row in summary(found).items():
                shares = [
                    f"{row[key]:.0%}" if name != "random" else ""
                    for key in ("deletion_beats_random", "insertion_beats_random")
                ]
                print(f"| {name} | {row['deletion']:.3f} | {shares[0]} | {row['insertion']:.3f} | {shares[1]} |")


if __name__ == "__main__":
    main()
