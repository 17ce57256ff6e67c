"""Kill training runs and `embed` (SIGKILL) at random moments, resume them, and compare them with uninterrupted ones.

    python -m benchmarks.kills [--train 20] [--two 4] [--embed 4] [--jobs 1] [--seconds S] [--seed 0] [--folder FOLDER]

`train`: a small ViT with dropout, stochastic depth, MixUp and EMA learns the digits in a process of its own. It saves
every 5 steps and validates every 10, and is resumed with another number of workers. `two`: the same in two processes,
started by torchrun; every third kill ends only one of them, and then the other and torchrun must end by themselves.
`embed`: the features of the digits into a cache, which is written after every batch.

Each kill waits for a random part of the time that an uninterrupted run takes, so that most runs are killed several
times; every other kill also waits for a save to begin. A run that comes to its end is compared, and the next one is
started. The processes of `train` and `embed` are forked from one that has imported everything, so a kill comes while
they work on their files, not while they import. --jobs sets the number of runs at the same time.

After --seconds no kill is begun; the runs are finished and compared. With --folder, you can stop the command (also by
Ctrl-C or SIGTERM) and continue it: it counts the kills so far in FOLDER/kills.json, which is all that another machine
needs to continue once every run is finished. Prints how many were tried, survived and lost, and what the runs were
doing when they were killed. The exit code is 1 if anything was lost (a bit of the weights, moments, EMA or features, a
number of the metrics, a cached feature, a process that hangs or stays behind), and 3 if kills are still to be tried.
Needs Linux, and no packages of the command line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = 120
PART = (0.02, 0.7)  # of the time of an uninterrupted run, after which it is killed
PATIENCE = 300.0  # seconds within which a run ends by itself
FORKS = multiprocessing.get_context("forkserver")
IMPORTED = ("vitkit.jobs.train", "vitkit.features.embed", "sklearn.datasets", "rich.progress")
FORKING = threading.RLock()  # two threads that ask how a process ended would both read the answer
TRAIN = f"""
import os
import sys
from dataclasses import replace
from vitkit.data.mix import Mix
from vitkit.jobs.train import train
from vitkit.training.recipes import RECIPES
recipe = replace(RECIPES["digits"], dropout=0.1, drop_path=0.1, ema=0.99, mix=Mix(mixup=0.2, cutmix=0.5), steps={STEPS},
                 epochs=None, warmup=10, batch_size=32)
phase = os.open(sys.argv[1] + ".phase", os.O_WRONLY | os.O_CREAT)
def watch(event):
    os.pwrite(phase, event["event"].ljust(16).encode(), 0)
train("digits", sys.argv[1], recipe=recipe, resume=True, watch=watch,
      settings={{"workers": int(sys.argv[2]) % 3, "save_every": 5, "evaluate_every": 10, "log_every": 3,
                 "trackers": (), "device": "cpu"}})
"""
EMBED = """
import sys
import numpy as np
import torch
import vitkit
torch.manual_seed(0)
model = vitkit.create("vit-ti/16", image_size=32, num_classes=0, num_hidden_layers=4)
found = vitkit.embed(model, "digits", cache=sys.argv[1], workers=int(sys.argv[2]) % 2, batch_size=16, device="cpu")
np.save(sys.argv[1] + "/features.npy", found["all"].features)
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@dataclass(frozen=True)
class Job:
    """What is killed.

    Args:
        program: takes the folder and a number that varies the workers.
        processes: how many of them torchrun starts; 1 for none of torchrun.
        saves: the files and folders, as patterns, that appear or change when something is saved.
        same: whether what is in two folders is equal to the bit.
    """

    program: str
    processes: int
    saves: tuple[str, ...]
    same: Callable[[Path, Path], bool]


def same_run(a: Path, b: Path) -> bool:
    """Compare two runs: weights, moments, EMA and metrics."""
    from vitkit.checkpoints import containers
    from vitkit.jobs.listing import diff
    from vitkit.training.run_folder import RunFolder

    states = [RunFolder.open(run).latest() for run in (a, b)]
    one, two = (containers.read(state)[0] for state in states if state is not None)
    moments = set(one) == set(two) and all(bool((one[name] == two[name]).all()) for name in one)
    return moments and diff(a, b).same


def same_features(a: Path, b: Path) -> bool:
    """Compare the features in two caches; one that was found damaged and renamed is a loss."""
    one, two = ((folder / "features.npy").read_bytes() for folder in (a, b))
    return one == two and not list(b.glob("*.damaged*"))


RUN = (".vitkit-*", "state/.vitkit-*")
PHASES = ("starting", "training", "validating", "saving")
JOBS = {
    "train": Job(TRAIN, 1, RUN, same_run),
    "two": Job(TRAIN, 2, RUN, same_run),
    "embed": Job(EMBED, 1, ("*-wal",), same_features),
}


class Forked:
    """A run in a process forked by FORKS, in a session of its own; as much of Popen as is needed.

    Args:
        name: a row of JOBS.
        out: its folder; its output goes to a file next to it.
        number: varies the workers.
    """

    def __init__(self, name: str, out: Path, number: int) -> None:
        with FORKING:
            self.process = FORKS.Process(target=_run, args=(JOBS[name].program, out, number))
            self.process.start()
        self.pid = self.process.pid or 0

    def poll(self) -> int | None:
        with FORKING:
            return self.process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float = float("inf")) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a run", timeout)
            time.sleep(0.005)
        return code


def _run(program: str, out: Path, number: int) -> None:
    """Run a program in this process."""
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # its workers are its own, as in a run from the command line
    with open(out.with_suffix(".log"), "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.argv = ["run", str(out), str(number)]
    exec(compile(program, "run", "exec"), {"__name__": "__main__"})


Process = Forked | subprocess.Popen[bytes]


def start(name: str, out: Path, number: int) -> Process:
    """Start a job in a session of its own; its output goes to a file next to its folder."""
    job = JOBS[name]
    out.with_suffix(".phase").unlink(missing_ok=True)
    if job.processes == 1:
        return Forked(name, out, number)
    program = out.with_suffix(".py")
    program.write_text(job.program, encoding="utf-8")
    with open(out.with_suffix(".log"), "wb") as log:
        command = [sys.executable, *TORCHRUN, str(program), str(out), str(number)]
        return subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)


def phase(name: str, out: Path) -> str:
    """Return what a run was doing when it was killed: one of PHASES."""
    if JOBS[name].saves == RUN and saves(name, out):
        return "saving"
    try:
        event = out.with_suffix(".phase").read_text().strip()
    except OSError:
        event = ""
    return "validating" if event == "validating" else "training" if event else "starting"


def descendants(pid: int) -> list[int]:
    """Return a process and all that it has started, those first that have existed longest."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def end(process: Process) -> None:
    """Kill a run and everything that it has started."""
    found = descendants(process.pid)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # no process may react to the death of another
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    process.wait()


def end_one(process: Process, draw: random.Random) -> str:
    """Kill one training process of several; return what is wrong with how the others ended, if anything."""
    everyone = descendants(process.pid)
    ranks = [pid for pid in everyone[1:] if (_parent(pid) == process.pid)]
    if not ranks:  # torchrun has not started them yet
        end(process)
        return ""
    os.kill(draw.choice(ranks), signal.SIGKILL)
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        end(process)
        return f"the other processes went on for {PATIENCE:g} s"
    until = time.monotonic() + 60
    while left := [pid for pid in everyone if _parent(pid)]:
        if time.monotonic() > until:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return f"{len(left)} processes stayed behind"
        time.sleep(0.1)
    return ""


def _parent(pid: int) -> int:
    """Return the parent of a process; 0 if the process is gone, or has ended and only its exit code is left."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state == "Z" else int(parent)


def saves(name: str, out: Path) -> set[tuple[str, int, int]]:
    """Return what is being saved, as something that differs when a save begins."""
    found = set()
    for pattern in JOBS[name].saves:
        for path in out.glob(pattern):
            with suppress(OSError):
                about = path.stat()
                found.add((path.name, about.st_size, about.st_mtime_ns))
    return found


class Kills:
    """The kills of one job: `lane` runs in several threads.

    Args:
        name: a row of JOBS.
        wanted: the number of kills.
        place: a folder for all runs of the command.
        counts: what has been tried so far, kept by `keep`.
        keep: writes all counts to disk.
        stop: set when the command is to end at once.
        until: when to begin no more kills, as `time.monotonic`.
    """

    def __init__(
        self,
        name: str,
        wanted: int,
        place: Path,
        counts: dict[str, Any],
        keep: Callable[[], None],
        stop: threading.Event,
        until: float = float("inf"),
    ) -> None:
        self.name, self.wanted, self.place, self.counts = name, wanted, place, counts
        self.keep, self.stop, self.until, self.lock = keep, stop, until, threading.Lock()
        self.number, self.begun = counts["tried"], 0  # of the next kill; kills that are being tried
        self.whole = place / f"{name}-whole"

    def prepare(self) -> str:
        """Let one run come to its end without a kill; return what went wrong, if anything."""
        if "seconds" in self.counts and self.whole.is_dir():
            return ""
        shutil.rmtree(self.whole, ignore_errors=True)
        began = time.monotonic()
        process = start(self.name, self.whole, 0)
        if not self.wait(process, PATIENCE):
            return "stopped before its first run had ended"
        if process.returncode:
            return self.said(self.whole)
        self.counts["seconds"] = time.monotonic() - began
        self.keep()
        return ""

    def wait(self, process: Process, seconds: float) -> bool:
        """Wait for a process to end; end it if it takes too long, or if the command is to end."""
        until = time.monotonic() + seconds
        while process.poll() is None:
            if self.stop.wait(0.01) or time.monotonic() > until:
                end(process)
                return False
        return True

    def said(self, out: Path) -> str:
        return out.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip()[-1500:]

    def claim(self) -> int | None:
        """Return the number of the next kill, or None if there is none left."""
        with self.lock:
            if self.stop.is_set() or time.monotonic() > self.until:
                return None
            if self.counts["tried"] + self.begun >= self.wanted:
                return None
            self.begun += 1
            self.number += 1
            return self.number - 1

    def lane(self, number: int) -> None:
        """Kill, resume and compare runs in one folder until no kill is left."""
        out = self.place / f"{self.name}-cut-{number}"
        while (kill := self.claim()) is not None:
            self.one(out, kill)
            with self.lock:
                self.begun -= 1
        if not self.stop.is_set() and out.exists():
            self.finish(out)

    def one(self, out: Path, kill: int) -> None:
        draw = random.Random(f"{self.name} {self.counts['seed']} {kill}")
        process = start(self.name, out, kill)
        until = time.monotonic() + draw.uniform(*PART) * self.counts["seconds"]
        while process.poll() is None and time.monotonic() < until and not self.stop.is_set():
            time.sleep(0.01)
        if kill % 2:  # a save begins, and a moment longer
            before = saves(self.name, out)
            until = time.monotonic() + PATIENCE
            while process.poll() is None and saves(self.name, out) <= before and time.monotonic() < until:
                if self.stop.is_set():
                    break
                time.sleep(0.0005)
            time.sleep(draw.uniform(0, 0.004))
        wrong, during = "", ""
        if process.poll() is None:
            during = phase(self.name, out) if JOBS[self.name].saves == RUN else PHASES[3 if kill % 2 else 1]
            if JOBS[self.name].processes > 1 and kill % 3 == 0:
                wrong = end_one(process, draw)
            else:
                end(process)
        elif process.returncode == 0:
            self.compare(out)
            return
        elif self.stop.is_set():  # Ctrl-C may reach a process before it has a session of its own
            return
        else:
            wrong = f"could not be resumed: {self.said(out)}"
        self.count(wrong, tried=1, **({during: 1} if during else {}))
        if wrong:
            shutil.rmtree(out, ignore_errors=True)

    def cut(self) -> list[Path]:
        """Return the folders of runs that have not come to their end."""
        found = self.place.glob(f"{self.name}-cut-*")
        return sorted(out for out in found if out.is_dir() and "lost" not in out.name)

    def finish(self, out: Path) -> None:
        """Let a run come to its end, and compare it."""
        process = start(self.name, out, 1)
        if self.wait(process, PATIENCE) and process.returncode == 0:
            self.compare(out)
        elif not self.stop.is_set():
            hangs = process.returncode == -signal.SIGKILL
            self.count(f"took longer than {PATIENCE:g} s" if hangs else f"could not be resumed: {self.said(out)}")
            shutil.rmtree(out, ignore_errors=True)

    def compare(self, out: Path) -> None:
        """Compare a run that came to its end with the uninterrupted one, and make room for the next."""
        same = JOBS[self.name].same(self.whole, out)
        self.count("" if same else "ended differently", compared=1)
        if same:
            shutil.rmtree(out)
        else:
            out.rename(out.with_name(f"{out.name}-lost-{time.time_ns()}"))

    def count(self, wrong: str, **found: int) -> None:
        with self.lock:
            for key, value in found.items():
                self.counts[key] += value
            self.counts["lost"] += bool(wrong)
            if wrong:
                print(f"LOST: {self.name}: {wrong}", flush=True)
            self.keep()
            if "tried" in found and self.counts["tried"] % 10 == 0:
                print(f"{self.name}: {self.counts['tried']:,} of {self.wanted:,} kills", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("train", 20), ("two", 4), ("embed", 4)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"kills of `{name}` (default: {default})")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (default: 1)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no kill after it (default: never)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments (default: 0)")
    parser.add_argument("--folder", type=Path, help="keeps runs and counts (default: a temporary folder)")
    args = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    until = time.monotonic() + args.seconds
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    FORKS.set_forkserver_preload(list(IMPORTED))
    first = FORKS.Process(target=int)  # imports everything, so that the first run has no more to do than the others
    first.start()
    first.join()
    with tempfile.TemporaryDirectory() as temporary:
        place = (args.folder or Path(temporary)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        record = place / "kills.json"
        new = {"seed": args.seed, "tried": 0, "lost": 0, "compared": 0, **dict.fromkeys(PHASES, 0)}
        counts: dict[str, dict[str, Any]] = {name: dict(new) for name in JOBS}
        if record.is_file():
            counts |= json.loads(record.read_text(encoding="utf-8"))
        writing = threading.Lock()

        def keep() -> None:
            with writing:
                part = record.with_suffix(".part")
                part.write_text(json.dumps(counts), encoding="utf-8")
                part.replace(record)

        left = open_runs = 0
        for name in JOBS:
            wanted, found = getattr(args, name), counts[name]
            job = Kills(name, wanted, place, found, keep, stop, until)
            begin = not stop.is_set() and time.monotonic() < until and (found["tried"] < wanted or job.cut())
            if begin and (wrong := job.prepare()):
                print(f"{name}: not tried: {wrong}", flush=True)
            elif begin:
                with ThreadPoolExecutor(args.jobs) as pool:
                    list(pool.map(job.lane, range(args.jobs)))
                    if not stop.is_set():  # begun with more --jobs than now
                        list(pool.map(job.finish, job.cut()))
            left += max(0, wanted - found["tried"])
            open_runs += len(job.cut()) if wanted else 0
            print(
                f"{name}: {found['tried']:,} kills tried ({', '.join(f'{found[key]:,} {key}' for key in PHASES)}), "
                f"{found['tried'] - found['lost']:,} survived, {found['lost']} lost; {found['compared']:,} runs "
                f"finished and were compared",
                flush=True,
            )
        if left or open_runs:
            how = f"; continue with --folder {args.folder}" if args.folder else ""
            print(f"still to do: {left:,} kills, {open_runs} runs to finish and compare{how}")
        sys.exit(1 if any(found["lost"] for found in counts.values()) else 3 if left or open_runs else 0)


if __name__ == "__main__":
    main()
