"""Train Fashion-MNIST or CIFAR-10 from scratch with its recipe: accuracy, time, and the time to each percent.

    python -m benchmarks.records cifar10 --data DIR --out DIR [--seed 1] [--set epochs=100 augment.pad=4]
    python -m benchmarks.records cifar10 --data DIR --out DIR --variants FILE.json --within 5
    python -m benchmarks.records draw docs/pictures/records.png

The data folder contains the published files: CIFAR-10's six *.bin, or Fashion-MNIST's four IDX files, gzipped or not.

The first form trains, then measures the test part once, with the averaged weights if the recipe has any; --no-test
leaves it closed. The second trains several variants at once, in processes of their own on one device, and never opens
the test part: use it to choose settings on held-out training images. FILE.json is {"name": {"FIELD": VALUE, ...}, ...}
with the fields that --set takes. --within gives each variant as many epochs as fit, whole schedule included, so that
they are compared at equal time; a short trial of each, all at once, measures how long a step takes.

The third draws the runs of benchmarks/records.json, the mean of each recipe's seeds.

--out gets record.json with the validation curve over time (and curve.png, where matplotlib is installed), and the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitkit.checkpoints import load
from vitkit.data.sources import open_source
from vitkit.evaluation.logits import logits_of
from vitkit.evaluation.measure import measure
from vitkit.jobs.train import Prepared, prepare, start
from vitkit.runtime import Runtime
from vitkit.training.recipe import Recipe
from vitkit.training.recipes import RECIPES

DATA = {"fashion": "idx", "cifar10": "cifar10"}  # recipe -> kind of source
VALIDATIONS = 20  # per run: each also saves the run
TRIAL = 20.0  # seconds of training after which the time of a step is known
STEPPING = 0.93  # share of the time that is left for steps by the validations, and by saving the run


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return a recipe with other values.

    Args:
        recipe: the recipe.
        changes: fields of Recipe, or such as `augment.erase` and `config.patch_size`.
    """
    for part in ("augment", "mix", "config"):
        inner = {name.partition(".")[2]: value for name, value in changes.items() if name.startswith(f"{part}.")}
        recipe = dataclasses.replace(recipe, **{part: dataclasses.replace(getattr(recipe, part), **inner)})
    return recipe.change(**{name: value for name, value in changes.items() if "." not in name})


def reached(curve: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds after which each whole percent of validation accuracy was first reached.

    Args:
        curve: `seconds` and `top1` of each validation, in order.
    """
    found: dict[str, float] = {}
    for row in curve:
        for percent in range(math.floor(100 * row["top1"]), 0, -1):
            if str(percent) in found:
                break
            found[str(percent)] = row["seconds"]
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def picture(curves: Mapping[str, list[dict[str, Any]]], title: str, out: Path) -> None:
    """Draw validation accuracy over time, if matplotlib is installed."""
    try:
        from vitkit.explanations import draw
    except ImportError:
        return
    best = {name: _best_so_far(curve) for name, curve in curves.items() if curve}
    if best:
        draw.save(draw.lines(best, title=title, x="seconds of training", y="best validation accuracy, %"), out)


def _best_so_far(curve: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [row["seconds"] for row in curve], list(itertools.accumulate((100 * row["top1"] for row in curve), max))


NAMES = {"cifar10": "CIFAR-10", "fashion": "Fashion-MNIST"}
KEPT = Path(__file__).with_suffix(".json")  # runs that had a GPU to themselves


def draw_kept(out: Path) -> None:
    """Draw the mean curve of each recipe's runs in KEPT, by the better of the weights and their average at a step."""
    curves = {}
    for what, name in NAMES.items():
        runs = [run for run in json.loads(KEPT.read_text()) if run["recipe"] == what]
        tests = [next(iter(run["test"].values()))["top1"] for run in runs]
        better = [{row["step"]: row for row in sorted(run["curve"], key=lambda row: row["top1"])} for run in runs]
        curves[f"{name} ({sum(tests) / len(tests):.1%} on test)"] = [
            {key: sum(rows[step][key] for rows in better) / len(runs) for key in ("seconds", "top1")}
            for step in sorted(better[0])
        ]
    picture(curves, "from scratch on one H200, mean of two seeds", out)


def fitted(args: argparse.Namespace, recipe: Recipe) -> Recipe:
    """Return the recipe with as many epochs as fit into `args.within` minutes, by a trial that leaves nothing behind.

    It gets steps instead where not even one epoch fits.
    """
    ended: list[float] = []  # when each step ended

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            ended.append(time.perf_counter())
            if len(ended) > 2 and ended[-1] - ended[0] > TRIAL and ended[-2] - ended[0] <= TRIAL:
                os.kill(os.getpid(), signal.SIGTERM)  # stops the trial after the next step

    out = args.out / "trial"
    ready = _prepared(args, recipe, out)
    start(ready, watch)
    shutil.rmtree(out)
    steps = _fitting(ended, 60 * args.within)
    epochs = steps * recipe.batch_size // len(ready.train)
    return recipe.change(epochs=epochs) if epochs else recipe.change(steps=steps)


def _fitting(ended: Sequence[float], seconds: float) -> int:
    """Return how many steps fit into some seconds, at the rate of the trial's second half."""
    half = (len(ended) - 1) // 2
    return max(1, math.floor(STEPPING * seconds * (len(ended) - 1 - half) / (ended[-1] - ended[half])))


def record(args: argparse.Namespace) -> dict[str, Any]:
    """Train one run and measure it; return what record.json holds."""
    changes = {name: json.loads(value) for name, value in (item.split("=", 1) for item in args.set)}
    recipe = changed(RECIPES[args.what], {**changes, **({} if args.val is None else {"val": args.val})})
    if args.within:
        recipe = fitted(args, recipe)
    ready = _prepared(args, recipe, args.out / "run")
    judged = "last" if recipe.ema is None else "ema"  # not the better of the two: that would be a choice by the test
    curve: list[dict[str, Any]] = []
    rates: list[dict[str, Any]] = []
    began, limit = 0.0, 60 * args.minutes if args.minutes else math.inf

    def watch(event: dict[str, Any]) -> None:
        nonlocal began, limit
        now = time.perf_counter()
        if event["event"] == "start":
            began = now
        elif event["event"] == "train":
            rates.append(event["time"])
        elif event["event"] == "val":
            row = {"seconds": round(now - began, 2), "step": event["step"], "weights": event["weights"]}
            curve.append({**row, "top1": event["top1"], "loss": event["loss"]})
            print(json.dumps({"run": args.out.name, **curve[-1]}), flush=True)
        elif event["event"] == "step" and now - began > limit:
            limit = math.inf
            os.kill(os.getpid(), signal.SIGTERM)  # stops the run after the next step, and saves it

    run, outcome = start(ready, watch)
    middle = sorted(rate["images_per_second"] for rate in rates)[len(rates) // 2 : len(rates) // 2 + 1]
    found: dict[str, Any] = {
        "recipe": args.what,
        "changes": changes,
        "seed": args.seed,
        "precision": args.precision,
        "parameters": run.info["parameters"],
        "steps": [outcome.step, outcome.total],
        "epochs": round(outcome.step * recipe.batch_size / len(ready.train), 1),
        "seconds": round(outcome.seconds, 1),
        "images_per_second": middle[0] if middle else None,
        "waiting": round(sum(rate["waiting"] for rate in rates) / len(rates), 4) if rates else None,
        "final": next((row["top1"] for row in reversed(curve) if row["weights"] == judged), None),
        "best": max((row["top1"] for row in curve), default=None),
        "reached": reached(curve),
        "curve": curve,
    }
    if not args.no_test:
        found["test"] = {}
        runtime, test = Runtime(args.device), open_source(f"{DATA[args.what]}:{args.data}", "test")
        model = load(run.weights(judged), device=runtime.device)
        result = measure(logits_of(model, test, batch_size=500, runtime=runtime), run.info["data"]["classes"])
        found["test"][judged] = {"top1": result.top1, "n": result.n, "ci95": list(result.ci95)}
        print(f"test, {judged}: {result.top1:.2%} of {result.n:,}", flush=True)
    return found


def _prepared(args: argparse.Namespace, recipe: Recipe, out: Path) -> Prepared:
    settings = {
        "device": args.device,
        "precision": args.precision,
        "compile": args.compile,
        "seed": args.seed,
        "workers": args.workers,
        "trackers": (),
        "log_every": 50,
    }
    data = f"{DATA[args.what]}:{args.data}"
    ready = prepare(data, out, recipe=recipe, resume=args.resume, settings=settings)
    every = max(1, math.ceil(recipe.total(len(ready.train)) / VALIDATIONS))
    return dataclasses.replace(ready, settings=dataclasses.replace(ready.settings, evaluate_every=every))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Train all variants at once, each by this program in a process of its own; return their records."""
    variants = json.loads(args.variants.read_text())
    running = {}
    for name, changes in variants.items():
        out = args.out / name
        command = [sys.executable, "-m", "benchmarks.records", args.what, "--data", args.data, "--out", str(out)]
        command += ["--device", args.device, "--precision", args.precision, "--seed", str(args.seed), "--no-test"]
        for option in ("minutes", "within", "val", "workers"):
            given = getattr(args, option)
            command += [f"--{option}", str(given)] if given is not None else []
        command += ["--set", *(f"{field}={json.dumps(value)}" for field, value in changes.items())]
        running[name] = subprocess.Popen(command)
    codes = {name: process.wait() for name, process in running.items()}
    found = {}
    for name, code in codes.items():
        file = args.out / name / "record.json"
        found[name] = json.loads(file.read_text()) if not code and file.is_file() else {"failed": code, "curve": []}
    print(f"\n| {args.what} | held out | seconds | epochs | images/s | waiting |\n|---|---|---|---|---|---|")
    for name, row in sorted(found.items(), key=lambda item: -(item[1].get("final") or 0)):
        values = [f"{row['final']:.2%}" if row.get("final") else f"failed ({codes[name]})" if codes[name] else "none"]
        values += [str(row.get(key, "")) for key in ("seconds", "epochs", "images_per_second", "waiting")]
        print(f"| {name} | {' | '.join(values)} |")
    return found


def main() -> None:
    if sys.argv[1:2] == ["draw"]:
        draw_kept(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=DATA)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16 or fp8 (default: fp32)")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--workers", type=int, help="worker processes, if the CPU augments (default: one per core)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="changes to the recipe, in JSON")
    parser.add_argument("--val", type=float, help="share to hold out (default: the recipe's); 0 trains on all of train")
    parser.add_argument("--no-test", action="store_true", help="do not open the test part, for choosing settings")
    parser.add_argument("--resume", action="store_true", help="resume the run at --out")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes of training (default: never)")
    parser.add_argument("--within", type=float, help="minutes into which the schedule must fit (default: the recipe's)")
    parser.add_argument("--variants", type=Path, help="a JSON file of variants to train at once; no test part")
    args = parser.parse_args()
    if args.within and args.resume:
        parser.error("--within chooses the number of steps of a new run; leave it out with --resume")
    args.out.mkdir(parents=True, exist_ok=True)
    found = compare(args) if args.variants else record(args)
    (args.out / "record.json").write_text(json.dumps(found, indent=1) + "\n")
    curves = {name: row["curve"] for name, row in found.items()} if args.variants else {args.what: found["curve"]}
    picture(curves, f"{args.what}: validation accuracy over time", args.out / "curve.png")
    if not args.variants:
        final = f"{found['final']:.2%}" if found["final"] is not None else "none"
        print(f"trained {found['steps'][0]:,} steps in {found['seconds']:.0f} s; final validation accuracy: {final}")


if __name__ == "__main__":
    main()
