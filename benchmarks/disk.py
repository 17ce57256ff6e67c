"""Let the disk fail at every point of a training run, resume the run, and compare it with an uninterrupted one.

    python -m benchmarks.disk [--every 1] [--kinds ENOSPC,EIO,EROFS,short,full]

A small library in C (disk_faults.c, built with cc and loaded with LD_PRELOAD) counts every operation on the run folder:
opening, writing, syncing, renaming, truncating and removing. For each of them, a run is started in which this one
operation fails: with no space (ENOSPC), an input/output error (EIO: also a failing fsync), a read-only file system
(EROFS), or a short write. `full` lets it and all later ones fail. After the failure the run must have ended with a
sentence, or finished; resumed, it must be bit-identical to an uninterrupted run. The clock of a last run jumps by up to
ten days, back and forth. `--every N` tries every Nth point. The exit code is 1 if anything was lost. Needs Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SHORT = -1  # as in disk_faults.c
KINDS = {
    "ENOSPC": (errno.ENOSPC, False),
    "EIO": (errno.EIO, False),
    "EROFS": (errno.EROFS, False),
    "short": (SHORT, False),
    "full": (errno.ENOSPC, True),
}
LIBRARY = "VITKIT_DISK_FAULTS"
DAYS = 10


def build(folder: Path) -> Path:
    """Compile the library; return its path."""
    out = folder / "disk_faults.so"
    source = Path(__file__).with_name("disk_faults.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(out), str(source), "-ldl"], check=True)
    return out


def train(out: Path) -> None:
    """Train a tiny model on the digits, resuming what is there; saves four times."""
    from dataclasses import replace

    from vitkit.jobs.train import train as job
    from vitkit.model.config import ViTConfig
    from vitkit.training.recipes import RECIPES

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_classes=10,
    )
    recipe = replace(
        RECIPES["digits"], config=config, steps=8, epochs=None, warmup=1, batch_size=16, dropout=0.1, ema=0.9
    )
    settings = {"workers": 0, "save_every": 2, "evaluate_every": 4, "log_every": 1, "trackers": (), "device": "cpu"}
    job("digits", out, recipe=recipe, resume=True, settings=settings)


def attempt(out: Path, kind: int, point: int, sticky: bool, clock: int = 0) -> tuple[str, int]:
    """Train in a copy of this process with one failing operation; return how it ended and how many points it had."""
    from vitkit.errors import VitkitError

    faults = ctypes.CDLL(os.environ[LIBRARY])
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        end = "traceback"
        try:
            faults.fault_arm(str(out).encode(), kind, ctypes.c_long(point), int(sticky))
            faults.fault_clock(ctypes.c_long(clock))
            train(out)
            end = "finished"
        except VitkitError as error:
            end = f"sentence: {error}"
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            faults.fault_clock(ctypes.c_long(0))
            os.write(write, f"{faults.fault_seen()} {end}"[:4000].encode())
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        seen, _, end = pipe.read().decode().partition(" ")
    os.waitpid(pid, 0)
    return end or "died", int(seen or 0)


def content(out: Path) -> dict[str, object]:
    """Return everything of a run that must come out the same."""
    from vitkit.checkpoints import containers
    from vitkit.jobs.listing import timeless
    from vitkit.training.run_folder import RunFolder

    run = RunFolder.open(out)
    state = run.latest()
    assert state is not None
    tensors = {name: tensor.numpy().tobytes() for name, tensor in containers.read(state)[0].items()}
    files = {file.name: file.read_bytes() for file in out.glob("*.safetensors")}
    return {**files, "state": tensors, "metrics": timeless(run)}


def suite(every: int, kinds: list[str], place: Path) -> bool:
    """Try every kind of failure at every `every`th point; print a summary; return whether nothing was lost."""
    train(place / "first")  # imports everything before the forks
    whole = place / "whole"
    end, points = attempt(whole, errno.EIO, -1, False)
    assert end == "finished", end
    expected = content(whole)
    print(f"a run has {points} points at which the disk can fail", flush=True)
    lost = 0
    for name in kinds:
        kind, sticky = KINDS[name]
        ends: Counter[str] = Counter()
        for point in range(0, points, every):
            out = place / "r"
            end, _ = attempt(out, kind, point, sticky)
            ends[end.partition(":")[0]] += 1
            again, _ = attempt(out, errno.EIO, -1, False)
            if end in ("traceback", "died") or again != "finished" or content(out) != expected:
                lost += 1
                print(f"LOST: {name} at point {point}: {end}; resumed: {again}", flush=True)
            shutil.rmtree(out)
        how = ", ".join(f"{count} {what}" for what, count in sorted(ends.items()))
        print(f"{name}: {sum(ends.values())} tried ({how}), each resumed", flush=True)
    end, _ = attempt(place / "clock", errno.EIO, -1, False, DAYS * 86400)
    same = end == "finished" and content(place / "clock") == expected
    print(f"a clock that jumps by up to {DAYS} days: {end}, {'equal' if same else 'DIFFERS'}")
    print(f"lost: {lost + (not same)}")
    return not lost and same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if LIBRARY not in os.environ:  # once more, with the library loaded before everything else
            library = str(build(Path(place)))
            env = os.environ | {LIBRARY: library, "LD_PRELOAD": library, "OMP_NUM_THREADS": "1"}
            sys.exit(subprocess.run([sys.executable, "-m", "benchmarks.disk", *sys.argv[1:]], env=env).returncode)
        sys.exit(0 if suite(args.every, args.kinds.split(","), Path(place)) else 1)


if __name__ == "__main__":
    main()
