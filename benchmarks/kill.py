"""Kill a run (SIGKILL) at many random moments, resume it each time, and compare it with an uninterrupted run.

    python -m benchmarks.kill [--kills 20] [--steps 1600] [--seed 0]

A small ViT with dropout, stochastic depth, MixUp and EMA learns the digits in processes of its own. It saves every 5
steps, so that many kills come while a checkpoint is being written, and resumes with another number of workers. Prints
every kill and how many came during a save. The exit code is 1 if any bit of the weights, moments or EMA, or any number
of the metrics, differs. Needs POSIX signals.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import sys
from dataclasses import replace
from vitkit.data.mix import Mix
from vitkit.jobs.train import train
from vitkit.training.recipes import RECIPES
out, steps, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
recipe = replace(RECIPES["digits"], dropout=0.1, drop_path=0.1, ema=0.99, mix=Mix(mixup=0.2, cutmix=0.5), steps=steps,
                 epochs=None)
train("digits", out, recipe=recipe, resume=True,
      settings={"workers": workers, "save_every": 5, "evaluate_every": 10, "log_every": 3, "trackers": ()})
"""


def child(out: Path, steps: int, workers: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(out), str(steps), str(workers)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def saving(out: Path) -> bool:
    """Whether a file is being written: its staging folder exists."""
    return any(out.glob(".vitkit-*")) or any((out / "state").glob(".vitkit-*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    from vitkit.jobs.listing import diff
    from vitkit.training.run_folder import RunFolder

    with tempfile.TemporaryDirectory() as place:
        whole, cut = Path(place) / "whole", Path(place) / "cut"
        began = time.monotonic()
        assert child(whole, args.steps, 0).wait() == 0
        print(f"uninterrupted: {time.monotonic() - began:.1f} s")
        pause = (time.monotonic() - began) / args.kills  # spreads the kills over the run
        kills = during = 0
        while kills < args.kills:
            process, before = child(cut, args.steps, kills % 3), state(cut)
            while process.poll() is None and state(cut) == before:  # until this process has saved a state
                time.sleep(0.01)
            time.sleep(draw.uniform(0, pause))
            if kills % 2:  # every other kill waits for a save to begin, and a moment longer
                while process.poll() is None and not saving(cut):
                    pass
                time.sleep(draw.uniform(0, 0.004))
            if process.poll() is not None:
                print("The run ended before it could be killed; use more --steps.")
                break
            os.kill(process.pid, signal.SIGSTOP)
            here = saving(cut)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills, during = kills + 1, during + here
            print(f"kill {kills}: after {state(cut)}{', while saving' if here else ''}", flush=True)
        assert child(cut, args.steps, 1).wait() == 0
        found = diff(whole, cut)
        states = [RunFolder.open(run).latest() for run in (whole, cut)]
        from vitkit.checkpoints import containers

        a, b = (containers.read(state)[0] for state in states if state is not None)
        moments = all(bool((a[name] == b[name]).all()) for name in a) and set(a) == set(b)
        print(
            f"{kills} kills, {during} while saving: weights, best and EMA "
            f"{'equal' if not any(found.weights.values()) else found.weights}, optimizer "
            f"{'equal' if moments else 'differs'}, metrics {'equal' if found.metrics is None else found.metrics}"
        )
        sys.exit(0 if found.same and moments and kills == args.kills else 1)


def state(out: Path) -> str | None:
    """Return the name of the newest state."""
    found = sorted((out / "state").glob("step-*.safetensors"))
    return found[-1].stem if found else None


if __name__ == "__main__":
    main()
