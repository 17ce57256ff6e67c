"""Train FoodVision Mini with its two recipes and several seeds; measure the test part once, after the last step.

    python -m benchmarks.foodvision --data pizza_steak_sushi --weights vit_tiny_patch16_224....pth [--seeds 0 1 2]
    python -m benchmarks.foodvision --data pizza_steak_sushi            # from scratch only

Trains on all of train (--val 0) and measures the last weights, so nothing is selected on the test part. `--hold-out`
measures on a fifth of train instead and does not open the test part; the recipes were chosen that way.
"""

from __future__ import annotations

from benchmarks import timing as _timing  # noqa: F401  # isort: skip  (sets OMP_WAIT_POLICY before torch is imported)

import argparse
import statistics
import tempfile
import time

from vitkit.checkpoints import load
from vitkit.data.sources import open_source
from vitkit.evaluation.logits import logits_of
from vitkit.evaluation.measure import measure
from vitkit.jobs.splits import train_and_val
from vitkit.jobs.train import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", help="pre-trained Ti/16 (default: run only the recipe from scratch)")
    parser.add_argument("--recipes", nargs="*", help="foodvision-finetune, foodvision-scratch")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=float, help="number of epochs (default: the recipe's)")
    parser.add_argument("--hold-out", action="store_true")
    args = parser.parse_args()
    recipes = args.recipes or (["foodvision-finetune"] if args.weights else []) + ["foodvision-scratch"]
    share = 0.2 if args.hold_out else 0.0
    for name in recipes:
        right = []
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                began, busy = time.perf_counter(), time.process_time()
                run, _ = train(
                    args.data,
                    f"{folder}/r",
                    recipe=name,
                    changes={"val": share, "epochs": args.epochs},
                    weights=args.weights if "finetune" in name else None,
                    settings={"seed": seed, "trackers": (), "workers": 0, "evaluate_every": 10**9},
                )
                seconds = f"{time.perf_counter() - began:.0f} s, {time.process_time() - busy:.0f} s of CPU"
                _, held, _ = train_and_val(args.data, share, seed)
                found = measure(logits_of(load(run.weights("last")), held or open_source(args.data, "test")))
            right.append(round(found.top1 * found.n))
            print(f"{name}, seed {seed}: {right[-1]} of {found.n} ({found.top1:.1%}), {seconds}", flush=True)
        print(f"{name}: mean {statistics.mean(right):.1f} of {found.n} ({statistics.mean(right) / found.n:.1%})")


if __name__ == "__main__":
    main()
