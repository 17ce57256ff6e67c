"""Loading ViT-B/16 from one safetensors file: vitkit against timm and transformers, seconds and memory.

    python -m benchmarks.loading

Each contender loads the file and then reads every weight once, so that a mapped file is not mistaken for a loaded one.
Time: all take turns in one process. Memory: each in a process of its own; the growth of the resident set over what the
imports took, at its peak, and of its private part (what no file backs) at the end. `vitkit bench --what loading`
measures the time alone, of any variant.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import timing  # before torch: it sets what torch reads  # isort: skip

from vitkit.jobs.bench.loading import LOADERS, ours, reading, write
from vitkit.model.config import variant

SPELLINGS = {dialect: ("vitkit", peer) for peer, (dialect, _) in LOADERS.items()}


def loader(library: str, path: Path) -> Callable[[], Any]:
    """A function that loads the file and reads every weight."""
    c = variant("vit-b/16", numerics="huggingface" if path.is_dir() else "timm")
    return reading((ours if library == "vitkit" else LOADERS[library][1])(path, c))


def _status(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def measure(library: str, path: Path) -> dict[str, float]:
    """In a fresh process: what loading adds to memory."""
    run = loader(library, path)
    rss, private = _status("VmRSS"), _status("RssAnon")
    model = run()
    return {
        "peak": _status("VmHWM") - rss,
        "private": _status("RssAnon") - private,
        "model": sum(p.numel() * 4 for p in model.parameters()) / 2**20,
    }


def main() -> None:
    """Print both tables."""
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        for spelling, names in SPELLINGS.items():
            path = write(variant("vit-b/16", numerics=spelling), spelling, Path(folder))
            print(f"\n## B/16, {spelling} spelling, one safetensors file\n")
            seconds = timing.alternate({name: loader(name, path) for name in names}, rounds=9)
            print(timing.table(seconds, "vitkit", unit="loads/s"))
            print("\n| | peak growth, MiB | private growth, MiB | weights, MiB |\n|---|---|---|---|")
            for name in names:
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.loading", name, str(path)],
                    check=True,
                    capture_output=True,
                    text=True,
                )
                row = json.loads(done.stdout.splitlines()[-1])
                print(f"| {name} | {row['peak']:.0f} | {row['private']:.0f} | {row['model']:.0f} |")


if __name__ == "__main__":
    main()
