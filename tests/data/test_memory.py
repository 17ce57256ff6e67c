"""A million images: what their index costs, over the main process and all workers together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import gc, multiprocessing, os, sys
from PIL import Image
from vitkit.data import Augment, TrainLoader
from vitkit.data.folder import Files
from vitkit.model.config import InputSpec

class Synthetic(Files):
    def raw(self, i):
        assert self.names[i].endswith(f"{i:08d}.JPEG")
        return Image.new("RGB", (16, 16), (i % 256, 0, 0))

def memory(pid):      # proportional: what several processes share counts once; without files, which others may map too
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) / 1024

def measure(count):
    names = (f"n{i % 1000:08d}/n{i % 1000:08d}_{i:08d}.JPEG" for i in range(count))
    source = Synthetic(".", names, [i % 1000 for i in range(count)], [str(c) for c in range(1000)])
    loader = TrainLoader(source, InputSpec(size=(16, 16)), Augment(), batch_size=512, workers=4)
    batches = loader.batches(start=7)
    for _ in range(6):
        next(batches)
    gc.collect()
    total = sum(memory(pid) for pid in [os.getpid(), *(child.pid for child in multiprocessing.active_children())])
    assert len(multiprocessing.active_children()) == 4
    return total

small = measure(1000)
large = measure(1_000_000)
print(large - small)
"""


def test_a_million_names_stay_under_200_mb_in_all_workers_together():
    rollup = Path("/proc/self/smaps_rollup")
    if not rollup.exists() or "Pss_Anon" not in rollup.read_text():
        pytest.skip("proportional memory is measured on Linux")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", MEASURE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 30 < float(done.stdout) < 200
