"""Train Fashion-MNIST from scratch with the recipe `fashion`, then measure the test part once: time and accuracy.

    python -m benchmarks.fashion --data DIR --out DIR [--device cuda] [--precision bf16] [--compile]

The data folder contains the four IDX files, gzipped or not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from vitkit.checkpoints import load
from vitkit.data.sources import open_source
from vitkit.evaluation.logits import logits_of
from vitkit.evaluation.measure import measure
from vitkit.jobs.train import train
from vitkit.runtime import Runtime
from vitkit.training.recipes import RECIPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--workers", type=int, help="worker processes for augmentation (default: one per core)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="changes to the recipe, in JSON")
    parser.add_argument("--val", type=float, help="share to hold out (default: the recipe's); 0 trains on all of train")
    parser.add_argument("--no-test", action="store_true", help="do not open the test part, for choosing settings")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    changes: dict[str, Any] = {name: json.loads(value) for name, value in (item.split("=", 1) for item in args.set)}
    recipe = RECIPES["fashion"]
    for part in ("augment", "mix", "config"):  # such as augment.erase=0.5
        inner = {name.partition(".")[2]: changes.pop(name) for name in list(changes) if name.startswith(f"{part}.")}
        if inner:
            recipe = dataclasses.replace(recipe, **{part: dataclasses.replace(getattr(recipe, part), **inner)})

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "val" or (event["event"] == "train" and event["step"] % 500 == 0):
            print(json.dumps(event), flush=True)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = args.workers if args.workers is not None else cores
    began = time.perf_counter()
    run, outcome = train(
        f"idx:{args.data}",
        args.out,
        recipe=recipe,
        resume=args.resume,
        watch=watch,
        changes={"val": args.val, **changes},
        settings={
            "device": args.device,
            "precision": args.precision,
            "compile": args.compile,
            "seed": args.seed,
            "workers": workers,
            "trackers": (),
            "log_every": 50,
            "evaluate_every": None,
        },
    )
    seconds = time.perf_counter() - began
    print(f"trained {outcome.total:,} steps in {seconds:.0f} s; best validation accuracy {outcome.best}")
    if args.no_test:
        return
    runtime = Runtime(args.device)
    test = open_source(f"idx:{args.data}", "test")
    for which in ("last", "ema", "best"):
        if (run.path / f"{which}.safetensors").is_file():
            outputs = logits_of(load(run.weights(which), device=runtime.device), test, batch_size=500, runtime=runtime)
            found = measure(outputs, run.info["data"]["classes"])
            print(f"test, {which}: {found.top1:.2%} of {found.n:,} (95%: {found.ci95[0]:.2%} to {found.ci95[1]:.2%})")


if __name__ == "__main__":
    main()
