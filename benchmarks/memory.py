"""Memory in MiB, each measurement in a process of its own (Linux).

    python -m benchmarks.memory [--model vit-b/16] [--size 1024] [--steps 1000]

Loading: growth of the resident set over what the imports took, at its peak, and of its private part at the end.
Attention: growth at its peak of asking for one image's attention, next to a plain forward pass.
Training: the resident set over a whole run on the digits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import timing as _timing  # noqa: F401  # isort: skip  (sets OMP_WAIT_POLICY before torch is imported)

from vitkit.jobs.bench.loading import LOADERS, ours, reading, write
from vitkit.model.config import variant

ASKS = {
    "plain forward pass": lambda model, x: model(x),
    "class-token row of the last layer": lambda model, x: model.attention(x, layers=-1, query=0),
    "class-token row of every layer": lambda model, x: model.attention(x, query=0),
    "all of the last layer's attention": lambda model, x: model.attention(x, layers=-1),
}


def status(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def loading(model: str, dialect: str, library: str, path: str) -> dict[str, float]:
    """What loading adds."""
    load = ours if library == "vitkit" else LOADERS[library][1]
    run = reading(load(Path(path), variant(model, numerics=dialect)))
    resident, private = status("VmRSS"), status("RssAnon")
    kept = run()
    weights = sum(p.numel() * 4 for p in kept.parameters()) / 2**20
    return {
        "peak growth": status("VmHWM") - resident,
        "private growth": status("RssAnon") - private,
        "weights": weights,
    }


def attention(model: str, size: str, ask: str) -> dict[str, float]:
    """What one question adds."""
    import torch

    import vitkit

    vit = vitkit.create(model, image_size=int(size)).eval()
    x = torch.randn(1, 3, int(size), int(size))
    with torch.inference_mode():
        vit(torch.randn(1, 3, 64, 64))
        before = status("VmHWM")
        ASKS[ask](vit, x)
    return {"peak growth": status("VmHWM") - before}


def training(steps: str) -> dict[str, float]:
    """The resident set at every tenth of a run, and the share of time spent waiting for data."""
    from vitkit.jobs.train import train

    seen: dict[str, float] = {}

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] % (int(steps) // 10) == 0:
            seen[f"step {event['step']}"] = status("VmRSS")

    with tempfile.TemporaryDirectory() as folder:
        run, _ = train("digits", f"{folder}/r", recipe="digits", changes={"steps": int(steps)}, watch=watch)
        waiting = [row["time"]["waiting"] for row in run.metrics() if row["event"] == "train"]
    return {**seen, "waiting for data, %": 100 * sum(waiting) / len(waiting)}


def show(title: str, what: str, *words: str) -> None:
    command = [sys.executable, "-m", "benchmarks.memory", "--only", what, *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8")
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{title}: " + ", ".join(f"{name} {value:.0f}" for name, value in found.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit-b/16")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        what, *words = args.only
        print(json.dumps({"loading": loading, "attention": attention, "training": training}[what](*words)))
        return
    for peer, (dialect, _) in LOADERS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = str(write(variant(args.model, numerics=dialect), dialect, Path(folder)))
            for library in ("vitkit", peer):
                show(f"{args.model}, loading, {dialect} file, {library}", "loading", args.model, dialect, library, path)
    for ask in ASKS:
        show(f"{args.model} at {args.size} px, {ask}", "attention", args.model, str(args.size), ask)
    show("training on digits", "training", str(args.steps))


if __name__ == "__main__":
    main()
