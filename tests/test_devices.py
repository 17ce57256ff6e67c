"""Devices by name; the GPU that starts early is started only where it is meant."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vitkit
from vitkit import devices

CODE = """
import sys, threading
from vitkit import devices
began = []
devices._start_cuda = lambda: began.append(threading.current_thread())
for name in sys.argv[1:]:
    devices.start_device(name)
assert "torch" not in sys.modules
for thread in threading.enumerate():  # a thread has started before it has begun its work
    if thread is not threading.main_thread():
        thread.join()
print(len(began), threading.main_thread() in began)
"""


@pytest.mark.parametrize(("names", "count"), [(["auto"], 1), (["cuda:0", "cuda"], 2), (["cpu", "cuda:1", "mps"], 0)])
def test_the_first_gpu_starts_beside_the_import_of_torch(names: list[str], count: int) -> None:
    ran = subprocess.run([sys.executable, "-c", CODE, *names], capture_output=True, text=True, check=True)
    assert ran.stdout == f"{count} False\n"


def test_several_processes_do_not_start_the_first_gpu() -> None:
    env = os.environ | {"RANK": "1"}
    ran = subprocess.run([sys.executable, "-c", CODE, "auto"], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout == "0 False\n"


@pytest.mark.parametrize("collecting", [True, False])
def test_torch_is_imported_without_collecting_garbage(collecting: bool) -> None:
    code = f"""
import gc, sys
from vitkit import devices
gc.enable() if {collecting} else gc.disable()
before = gc.get_stats()[0]["collections"]
devices.import_torch()
assert "torch" in sys.modules
print(gc.isenabled(), gc.get_stats()[0]["collections"] - before, gc.get_freeze_count() > 100_000)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    enabled, collections, frozen = ran.stdout.split()
    assert (enabled, frozen) == (str(collecting), "True")
    assert int(collections) <= 1  # one may come when the collector is on again
    count = gc.get_freeze_count()
    devices.import_torch()  # it is there already
    assert gc.get_freeze_count() == count


def test_nothing_starts_once_torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[object] = []
    monkeypatch.setattr(devices.threading, "Thread", lambda **how: began.append(how))
    devices.start_device("auto")
    assert not began


def test_a_machine_without_a_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def missing(name: str) -> None:
        tried.append(name)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(devices.ctypes, "CDLL", missing)
    devices._start_cuda()
    assert len(tried) == 1


def test_load_takes_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = vitkit.save(vitkit.create("vit-ti/16", num_classes=2, num_hidden_layers=1), tmp_path / "tiny.safetensors")
    monkeypatch.setattr("vitkit.checkpoints.reading.find_device", lambda name: torch.device("meta"))
    assert {str(p.device) for p in vitkit.load(path, device="auto").parameters()} == {"meta"}
    assert {str(p.device) for p in vitkit.load(path, device="cpu").parameters()} == {"cpu"}
