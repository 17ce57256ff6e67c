"""Kill a training run (SIGKILL) at random moments, resume it each time, and compare it with an uninterrupted one.

    python -m benchmarks.kills [--train 20] [--seed 0] [--folder FOLDER]

A small ViT with dropout, stochastic depth, MixUp and EMA learns the digits in processes of its own. It saves every 5
steps, so that many kills come while a state is written, and is resumed with another number of workers. Each kill waits
for a random part of the run's time; every other one also waits for a save to begin. A run that ends before its kill is
compared, and the next one is started. With --folder, you can stop the command and continue it: it counts the kills so
far in FOLDER/kills.json. Prints how many were tried, survived and lost; the exit code is 1 if anything was lost: a bit
of the weights, moments or EMA, or a number of the metrics. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 120
TRAIN = """
import sys
from dataclasses import replace
from vitkit.data.mix import Mix
from vitkit.jobs.train import train
from vitkit.training.recipes import RECIPES
out, steps, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
recipe = replace(RECIPES["digits"], dropout=0.1, drop_path=0.1, ema=0.99, mix=Mix(mixup=0.2, cutmix=0.5), steps=steps,
                 epochs=None, warmup=10, batch_size=32)
train("digits", out, recipe=recipe, resume=True,
      settings={"workers": workers, "save_every": 5, "evaluate_every": 10, "log_every": 3, "trackers": (),
                "device": "cpu"})
"""


def command(job: str, out: Path, number: int) -> list[str]:
    """Return the command of a run; `number` varies the workers."""
    return [sys.executable, "-c", TRAIN, str(out), str(STEPS), str(number % 3)]


def start(job: str, out: Path, number: int) -> subprocess.Popen[bytes]:
    """Start a job in a process group of its own."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    log = open(out.parent / f"{job}.log", "ab")  # noqa: SIM115
    return subprocess.Popen(command(job, out, number), env=env, start_new_session=True, stdout=log, stderr=log)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a run and its workers."""
    found = [process.pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    for pid in found:  # no process may react to the death of another
        os.kill(pid, signal.SIGSTOP)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    process.wait()


def saving(out: Path) -> bool:
    """Whether a file is being written: its staging folder exists."""
    return any(out.glob(".vitkit-*")) or any((out / "state").glob(".vitkit-*"))


def same(job: str, a: Path, b: Path) -> bool:
    """Whether two finished runs are equal to the bit."""
    from vitkit.checkpoints import containers
    from vitkit.jobs.listing import diff
    from vitkit.training.run_folder import RunFolder

    states = [RunFolder.open(run).latest() for run in (a, b)]
    one, two = (containers.read(state)[0] for state in states if state is not None)
    moments = set(one) == set(two) and all(bool((one[name] == two[name]).all()) for name in one)
    return moments and diff(a, b).same


def kill(job: str, wanted: int, place: Path, counts: dict[str, Any], keep: Any) -> None:
    """Kill a job until `wanted` kills are counted."""
    whole, cut = place / f"{job}-whole", place / f"{job}-cut"
    finished = place / f"{job}.seconds"
    if not finished.is_file():
        shutil.rmtree(whole, ignore_errors=True)
        began = time.monotonic()
        assert start(job, whole, 0).wait() == 0, (place / f"{job}.log").read_text()
        finished.write_text(str(time.monotonic() - began), encoding="utf-8")
    seconds = float(finished.read_text(encoding="utf-8"))
    while counts["tried"] < wanted:
        draw = random.Random(f"{job} {counts['seed']} {counts['tried']}")
        process = start(job, cut, counts["tried"])
        until = time.monotonic() + draw.uniform(0.2, 1.0) * seconds
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        if counts["tried"] % 2:  # a save begins, and a moment longer
            while process.poll() is None and not saving(cut):
                pass
            time.sleep(draw.uniform(0, 0.004))
        if process.poll() is None:
            during = saving(cut)
            end(process)
            counts["tried"] += 1
            counts["saving"] += during
        elif process.returncode == 0:
            finish(job, whole, cut, counts)
        else:
            counts["lost"] += 1
            counts["tried"] += 1
            text = (place / f"{job}.log").read_text(encoding="utf-8", errors="replace")
            print(f"LOST: {job} could not be resumed: {text[-2000:]}", flush=True)
            shutil.rmtree(cut)
        keep()
        if counts["tried"] % 10 == 0:
            print(f"{job}: {counts['tried']} of {wanted} kills", flush=True)
    if cut.exists():
        assert start(job, cut, 1).wait() == 0, (place / f"{job}.log").read_text()
        finish(job, whole, cut, counts)
        keep()


def finish(job: str, whole: Path, cut: Path, counts: dict[str, Any]) -> None:
    """Compare a run that came to its end with the uninterrupted one, and make room for the next."""
    counts["compared"] += 1
    if not same(job, whole, cut):
        counts["lost"] += 1
        print(f"LOST: {job} ended differently", flush=True)
    shutil.rmtree(cut)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = args.folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        record = place / "kills.json"
        counts: dict[str, dict[str, Any]] = {
            "train": {"seed": args.seed, "tried": 0, "saving": 0, "lost": 0, "compared": 0}
        }
        if record.is_file():
            counts |= json.loads(record.read_text(encoding="utf-8"))

        def keep() -> None:
            part = record.with_suffix(".part")
            part.write_text(json.dumps(counts), encoding="utf-8")
            part.replace(record)

        kill("train", args.train, place, counts["train"], keep)
        for job, found in counts.items():
            print(
                f"{job}: {found['tried']} kills tried ({found['saving']} during a save), "
                f"{found['tried'] - found['lost']} survived, {found['lost']} lost; {found['compared']} runs finished "
                f"and were compared"
            )
        sys.exit(1 if any(found["lost"] for found in counts.values()) else 0)


if __name__ == "__main__":
    main()
