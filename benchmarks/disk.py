"""Let the disk fail at every point of a training run, resume the run, and compare it with an uninterrupted one.

    python -m benchmarks.disk [--every 1] [--kinds ENOSPC,EIO,EROFS,short,full] [--sizes 24] [--seconds S]

A small library in C (disk_faults.c, built with cc and loaded with LD_PRELOAD) counts every operation on the run folder:
opening, writing, syncing, renaming, truncating and removing. For each of them, a run is started in which this one
operation fails: with no space (ENOSPC), an input/output error (EIO: also a failing fsync), a read-only file system
(EROFS), or a short write. `full` lets it and all later ones fail. After the failure the run must have ended with a
sentence, or finished; resumed, it must be bit-identical to an uninterrupted run. `--every N` tries every Nth point.

Then the run is started on real file systems in memory (tmpfs) of --sizes sizes, from one page to more than it needs,
and resumed after the file system has been enlarged. Where `unshare` may not mount one, the size of files is limited
instead (RLIMIT_FSIZE). The clock of a last run jumps by up to ten days, back and forth. After --seconds, the rest is
left out. The exit code is 1 if anything was lost, and 3 if something was left out. Needs Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
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
PRIVATE = ("unshare", "--map-root-user", "--mount")  # starts a program that may mount file systems of its own
MOUNTS = "VITKIT_DISK_MOUNTS"  # set in that program
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


def attempt(
    out: Path, kind: int = 0, point: int = -1, sticky: bool = False, clock: int = 0, largest: int | None = None
) -> tuple[str, int]:
    """Train in a copy of this process; return how it ended and how many operations on the disk it had.

    Args:
        out: the run folder.
        kind: the errno of the failing operation, or SHORT.
        point: the number of the operation that fails; -1 for none.
        sticky: whether all later ones fail too.
        clock: seconds by which the clock jumps.
        largest: bytes that a file may have (default: any number).
    """
    from vitkit.errors import VitkitError

    faults = ctypes.CDLL(os.environ[LIBRARY])
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        end = "traceback"
        try:
            faults.fault_arm(str(out).encode(), kind, ctypes.c_long(point), int(sticky))
            faults.fault_clock(ctypes.c_long(clock))
            if largest is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
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


def tmpfs(place: Path, expected: dict[str, object], size: int) -> tuple[str, str, bool]:
    """Train where only `size` bytes fit, then resume with more; return both ends, and whether the result is equal."""
    where = place / "tmpfs"
    where.mkdir(exist_ok=True)
    out = where / "r"
    if MOUNTS not in os.environ:
        first = attempt(out, largest=size)[0]
        ends = first, attempt(out)[0]
    else:
        options = ("mount", "-t", "tmpfs", "none", str(where), "-o")
        subprocess.run([*options, f"size={size}"], check=True)
        first = attempt(out)[0]
        subprocess.run([*options, "remount,size=1g"], check=True)
        ends = first, attempt(out)[0]
    same = ends[1] == "finished" and content(out) == expected
    if MOUNTS in os.environ:
        subprocess.run(["umount", str(where)], check=True)
    else:
        shutil.rmtree(out)
    return *ends, same


def suite(every: int, kinds: list[str], sizes: int, seconds: float, place: Path) -> int:
    """Try every kind of failure at every `every`th point, and `sizes` small disks; print a summary.

    Returns:
        The exit code.
    """
    until, left_out = time.monotonic() + seconds, 0
    train(place / "first")  # imports everything before the forks
    whole = place / "whole"
    end, points = attempt(whole)
    assert end == "finished", end
    expected = content(whole)
    print(f"a run has {points} points at which the disk can fail", flush=True)
    lost = 0
    for name in kinds:
        kind, sticky = KINDS[name]
        ends: Counter[str] = Counter()
        for point in range(0, points, every):
            if time.monotonic() > until:
                left_out += 1
                continue
            out = place / "r"
            end, _ = attempt(out, kind, point, sticky)
            ends[end.partition(":")[0]] += 1
            again, _ = attempt(out)
            if end in ("traceback", "died") or again != "finished" or content(out) != expected:
                lost += 1
                print(f"LOST: {name} at point {point}: {end}; resumed: {again}", flush=True)
            shutil.rmtree(out)
        how = ", ".join(f"{count} {what}" for what, count in sorted(ends.items()))
        print(f"{name}: {sum(ends.values())} tried ({how}), each resumed", flush=True)
    need = sum(file.stat().st_size for file in whole.rglob("*") if file.is_file())
    ends = Counter()
    for number in range(sizes):
        if time.monotonic() > until:
            left_out += 1
            continue
        size = 4096 + 2 * need * number // sizes
        end, again, same = tmpfs(place, expected, size)
        ends[end.partition(":")[0]] += 1
        if end in ("traceback", "died") or not same:
            lost += 1
            print(f"LOST: a disk of {size:,} bytes: {end}; resumed: {again}", flush=True)
    how = ", ".join(f"{count} {what}" for what, count in sorted(ends.items()))
    what = "a full tmpfs" if MOUNTS in os.environ else "a limit on the size of files (no tmpfs may be mounted here)"
    print(f"{what}: {sum(ends.values())} sizes tried ({how}), each resumed", flush=True)
    end, _ = attempt(place / "clock", clock=DAYS * 86400)
    same = end == "finished" and content(place / "clock") == expected
    print(f"a clock that jumps by up to {DAYS} days: {end}, {'equal' if same else 'DIFFERS'}")
    print(f"lost: {lost + (not same)}" + (f"; left out: {left_out}" if left_out else ""))
    return 1 if lost or not same else 3 if left_out else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--sizes", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if LIBRARY not in os.environ:  # once more, with the library loaded before everything else
            library = str(build(Path(place)))
            env = os.environ | {LIBRARY: library, "LD_PRELOAD": library, "OMP_NUM_THREADS": "1"}
            may_mount = (
                shutil.which(PRIVATE[0]) is not None
                and not subprocess.run(
                    [*PRIVATE, "mount", "-t", "tmpfs", "none", place], capture_output=True, check=False
                ).returncode
            )
            command = [sys.executable, "-m", "benchmarks.disk", *sys.argv[1:]]
            if may_mount:
                command, env = [*PRIVATE, *command], env | {MOUNTS: "1"}
            sys.exit(subprocess.run(command, env=env, check=False).returncode)
        kinds = [kind for kind in args.kinds.split(",") if kind]
        sys.exit(suite(args.every, kinds, args.sizes, args.seconds, Path(place)))


if __name__ == "__main__":
    main()
