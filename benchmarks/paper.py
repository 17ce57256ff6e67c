"""The paper's studies in small, on Fashion-MNIST, on a machine that may lack the packages of the command line.

    python -m benchmarks.paper positions --data DIR --out DIR    # Table 8: nine cells, 15 epochs each
    python -m benchmarks.paper masked --data DIR --out DIR       # B.1.2: fine-tuning on 1% and 10% of the labels

`pooling`, `data-size` and `compute` are the other studies of `vitkit study`. The data folder contains the four IDX
files, gzipped or not. Several runs share the device (--jobs). Results are written as they come; the same command again
continues where it was stopped. Settings are chosen on a held-out part of train; the test part is measured once, at the
end, with the final weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from vitkit.checkpoints import load
from vitkit.data.sources import open_source
from vitkit.evaluation.logits import logits_of
from vitkit.jobs.cells import Request, name_of, sweep_cells, train_cell
from vitkit.jobs.study import STUDIES, label, recipe_of, summary
from vitkit.jobs.train import train
from vitkit.runtime import Runtime
from vitkit.training.recipe import Recipe
from vitkit.training.recipes import RECIPES
from vitkit.training.run_folder import RunFolder

SHARES = {0.01: 1500, 0.1: 3000}  # of the labels -> updates
LRS = (3e-4, 1e-3, 3e-3)  # tried with the first seed, for each start and share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=[*STUDIES, "masked"])
    parser.add_argument("--data", required=True, help="folder with the four IDX files")
    parser.add_argument("--out", required=True, type=Path, help="folder for the runs and the results")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", help="fp32 or bf16 (default: bf16 on CUDA, otherwise fp32)")
    parser.add_argument("--jobs", type=int, default=6, help="runs at the same time (default: 6)")
    parser.add_argument("--workers", type=int, help="worker processes per run (default: the cores / --jobs)")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 for a study, 0 1 2 for masked")
    parser.add_argument("--epochs", type=float, help="of each cell, or of pre-training (default: the study's)")
    parser.add_argument("--target", default="mean", help="what masked patches predict: mean, 4x4 or patch")
    parser.add_argument("--shorter", type=int, default=1, help="divide the updates of fine-tuning, for a trial")
    args = parser.parse_args()
    if args.precision is None:
        args.precision = "bf16" if Runtime(args.device).device.type == "cuda" else "fp32"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if args.workers is None:
        args.workers = max(cores // args.jobs, 1)
    began = time.perf_counter()
    (masked if args.study == "masked" else study)(args)
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": args.device,
        "precision": args.precision,
        "workers": args.workers,
        "trackers": (),
        "log_every": 100,
        "evaluate_every": 10**9,  # at the end only
        "save_every": 500,
    }


def tested(args: argparse.Namespace, folder: Path, which: str) -> float:
    """Return the accuracy of a finished run's weights on the test part."""
    runtime = Runtime(args.device)
    model = load(RunFolder.open(folder).weights(which), device=runtime.device)
    outputs = logits_of(model, open_source(f"idx:{args.data}", "test"), batch_size=500, runtime=runtime)
    return float((outputs.logits.argmax(1) == outputs.labels).mean())


def write(path: Path, values: Mapping[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def study(args: argparse.Namespace) -> None:
    """Train the cells of a study, then measure each on the test part."""
    row, out = STUDIES[args.study], args.out
    epochs = args.epochs or row.epochs
    request = Request(
        data=f"idx:{args.data}",
        out=out,
        recipe=recipe_of(f"idx:{args.data}"),
        changes={"epochs": epochs},
        settings=settings(args),
        shots=row.shots,
    )
    cells = row.with_seeds(args.seeds or [0])
    if args.epochs and row.epochs is None:
        raise SystemExit(f"The cells of {args.study} set their own epochs; leave --epochs out.")
    rows = sweep_cells(request, cells, resume=True, jobs=args.jobs, say=lambda text: print(text, flush=True))
    if isinstance(rows, int):
        raise SystemExit(128 + rows)
    for one in rows:
        one["test"] = tested(args, out / one["name"], one["weights"])
    write(out / "study.json", {"study": args.study, "epochs": epochs, "rows": rows, "summary": summary(rows)})
    print(f"| {args.study} ({row.source}) | held out | {row.shots}-shot | test | paper |\n|---|---|---|---|---|")
    for number, one in enumerate(summary(rows)):
        same = [other["test"] for other in rows if label_of(other) == label_of(one)]
        paper = f"{row.paper[number]:.2%}" if number < len(row.paper) else ""
        few = f"{one['few_shot']:.2%}"
        print(f"| {label(one['cell'])} | {one['top1']:.2%} | {few} | {statistics.mean(same):.2%} | {paper} |")


def label_of(row: Mapping[str, Any]) -> str:
    return label({field: value for field, value in row["cell"].items() if field != "seed"})


def finetuning(args: argparse.Namespace, share: float) -> Recipe:
    """Return the recipe of both starts: the same data, augmentation and updates."""
    return dataclasses.replace(
        RECIPES["fashion-adamw"],
        epochs=None,
        steps=max(SHARES[share] // args.shorter, 1),
        batch_size=128,
        ema=None,
        images=share,
    )


def pretrained(args: argparse.Namespace) -> dict[str, Any]:
    """Pre-train on all training images, without labels."""
    recipe = dataclasses.replace(RECIPES["masked-patch-fashion"], val=0.0, target=args.target)
    began = time.perf_counter()

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "train" and event["step"] % 500 == 0:
            print(f"  pretrain  step {event['step']:,}  loss {event['loss']:.4f}", flush=True)

    run, _ = train(
        f"idx:{args.data}",
        args.out / "pretrain",
        recipe=recipe,
        resume=True,
        watch=watch,
        changes={"epochs": args.epochs},
        settings=settings(args),
    )
    last = [row for row in run.metrics() if row["event"] == "train"][-1]
    seconds = time.perf_counter() - began
    return {"name": "pretrain", "loss": last["loss"], "accuracy": last.get("accuracy"), "seconds": seconds}


def tuned(args: argparse.Namespace, start: str, share: float, lr: float, seed: int) -> dict[str, Any]:
    """Train on a share of the labels, from scratch or from the pre-trained weights."""
    request = Request(
        data=f"idx:{args.data}",
        out=args.out / start,
        recipe=finetuning(args, share),
        settings=settings(args),
        how={"weights": str(args.out / "pretrain")} if start == "masked" else {},
    )
    row = train_cell(request, {"images": share, "lr": lr, "seed": seed}, resume=True)
    if isinstance(row, int):
        raise SystemExit(128 + row)
    return {**row, "start": start, "share": share, "lr": lr, "seed": seed, "name": task_name(start, share, lr, seed)}


def task_name(start: str, share: float, lr: float, seed: int) -> str:
    return f"{start}/{name_of({'images': share, 'lr': lr, 'seed': seed})}"


def masked(args: argparse.Namespace) -> None:
    """Compare fine-tuning after masked pre-training with training from scratch, on the same few labels."""
    seeds, out = args.seeds or [0, 1, 2], args.out
    out.mkdir(parents=True, exist_ok=True)
    path = out / "masked.json"
    done: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else {}
    first, others = seeds[0], seeds[1:]

    def chosen(start: str, share: float) -> float:
        """The learning rate with the highest accuracy on the held-out part, of the first seed."""
        scores = {lr: done[task_name(start, share, lr, first)]["top1"] for lr in LRS}
        return max(scores, key=lambda lr: (scores[lr], -lr))

    def batch(pool: ProcessPoolExecutor, tasks: Sequence[tuple[Any, ...]]) -> None:
        waiting = []
        for work, *rest in tasks:
            name = task_name(*rest) if rest else "pretrain"
            if name not in done:
                waiting.append(pool.submit(work, args, *rest))
        for one in as_completed(waiting):
            row = one.result()
            done[row["name"]] = row
            write(path, {"target": args.target, "rows": done})
            print(json.dumps(row), flush=True)

    def trials(start: str) -> list[tuple[Any, ...]]:
        return [(tuned, start, share, lr, first) for share in reversed(SHARES) for lr in LRS]

    def repeats(start: str) -> list[tuple[Any, ...]]:
        return [(tuned, start, share, chosen(start, share), seed) for share in reversed(SHARES) for seed in others]

    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        batch(pool, [(pretrained,), *trials("scratch")])
        batch(pool, [*trials("masked"), *repeats("scratch")])
        batch(pool, repeats("masked"))
    found: dict[str, Any] = {}
    print("| labels | start | lr | test, each seed | mean |\n|---|---|---|---|---|")
    for share in SHARES:
        for start in ("scratch", "masked"):
            lr = chosen(start, share)
            rows = [done[task_name(start, share, lr, seed)] for seed in seeds]
            for row in rows:
                folder = out / start / name_of({"images": share, "lr": lr, "seed": row["seed"]})
                row.setdefault("test", tested(args, folder, row["weights"]))
            scores = [row["test"] for row in rows]
            found[f"{start} {share:g}"] = {"lr": lr, "test": scores, "mean": statistics.mean(scores)}
            each = ", ".join(f"{score:.2%}" for score in scores)
            print(f"| {share:.0%} | {start} | {lr:g} | {each} | {statistics.mean(scores):.2%} |", flush=True)
    write(path, {"target": args.target, "rows": done, "result": found})


if __name__ == "__main__":
    main()
