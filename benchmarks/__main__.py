"""Run the benchmarks that need nothing but the peers, one after another; the others say what they need with --help."""

from __future__ import annotations

import subprocess
import sys

RUNS: dict[str, list[str]] = {
    "attention": [],
    "loading": [],
    "training": ["--model", "vit-ti/16", "--batch", "16"],
    "serve": [],
}
WITH_DATA = ("data", "features", "explain", "fashion", "cuda", "kill", "fuzz_serve")

for name, arguments in RUNS.items():
    print(f"\n== python -m benchmarks.{name} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], check=False)
print("\nThese take a folder, weights or a device: " + ", ".join(f"python -m benchmarks.{name}" for name in WITH_DATA))
