"""A tiny run on real digits, and processes that can be killed."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vitkit.data.augment import Augment
from vitkit.model.config import ViTConfig
from vitkit.training.recipe import Recipe

CONFIG = ViTConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    image_size=8,
    patch_size=4,
    num_channels=1,
    num_classes=10,
    layer_norm_eps=1e-6,
)
TINY = Recipe(
    source="tests",
    config=CONFIG,
    small_data=True,
    steps=12,
    batch_size=16,
    lr=1e-3,
    weight_decay=0.1,
    warmup=2,
    clip=1.0,
    augment=Augment(scale=(0.7, 1.0), flip=0.0),
)
HANGS = 120.0  # seconds after which a copy of this process is taken to hang; pytest allows a test more
SETTINGS: dict[str, Any] = {"trackers": (), "log_every": 5, "evaluate_every": 4, "device": "cpu", "workers": 0}


def tiny(**changes: Any) -> Recipe:
    return replace(TINY, **changes)


def apart(a: Path, b: Path, which: str = "last") -> float:
    """The largest difference of two runs' weights, but for the key bias.

    The true gradient of the key bias is zero, because softmax ignores what is added to all keys; Adam amplifies the
    rounding of its gradient to whole steps.
    """
    from vitkit.checkpoints import containers

    one, two = (containers.read(folder / f"{which}.safetensors")[0] for folder in (a, b))
    assert one.keys() == two.keys()
    found = 0.0
    for name, value in one.items():
        off = (value - two[name]).abs()
        if name.endswith("qkv.bias"):
            width = len(off) // 3
            off[width : 2 * width] = 0
        found = max(found, float(off.max()))
    return found


def run(out: Path, recipe: Recipe = TINY, **how: Any) -> Any:
    """Train on the digits; returns (run folder, outcome)."""
    from vitkit.jobs.train import train

    settings = {**SETTINGS, **how.pop("settings", {})}
    return train(how.pop("data", "digits"), out, recipe=recipe, settings=settings, **how)


def forked(work: Callable[[int], Any], ranks: int = 1) -> list[int]:
    """Do work(rank) in copies of this process, joined as torchrun would; returns how each ended (-9: killed).

    A copy that hangs prints where, and ends with exit code 1.
    """
    with socket.socket() as reserved:  # keeps the port for the copies, because it does not listen
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for port in random.SystemRandom().sample(range(20_000, 32_000), 100):  # which no outgoing connection gets
            with suppress(OSError):
                reserved.bind(("127.0.0.1", port))
                break
        return _forked(work, ranks, reserved.getsockname()[1])


def _forked(work: Callable[[int], Any], ranks: int, port: int) -> list[int]:
    sys.stdout.flush()
    sys.stderr.flush()
    children: list[int] = []
    ended: list[int] = []
    for rank in range(ranks):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # no thread of ours holds a lock here
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                faulthandler.dump_traceback_later(HANGS, exit=True, file=2)
                if ranks > 1:
                    os.environ |= {
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                        "WORLD_SIZE": str(ranks),
                        "LOCAL_WORLD_SIZE": str(ranks),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                    }
                if "accelerate" in sys.modules:  # a tracker's test may have told it that it is alone
                    sys.modules["accelerate"].PartialState._reset_state()
                warnings.simplefilter("ignore")
                work(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    try:
        for pid in children:
            ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    finally:
        for pid in children[len(ended) :]:  # pytest has given up
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return ended


def bytes_of(folder: Path) -> dict[str, Any]:
    """Everything of a run that must come out the same: checkpoint files, state tensors, metrics without times."""
    from vitkit.checkpoints import containers
    from vitkit.jobs.listing import timeless
    from vitkit.training.run_folder import RunFolder

    found: dict[str, Any] = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    state = RunFolder.open(folder).latest()
    assert state is not None
    # Only the tensors: the metadata has the size of metrics.jsonl, which depends on the digits of the times.
    found[state.name] = {name: tensor.numpy().tobytes() for name, tensor in containers.read(state)[0].items()}
    found["metrics"] = timeless(RunFolder.open(folder))
    return found


def extra_of(file: Path) -> dict[str, str]:
    """What a checkpoint's metadata holds besides the model: its step and, of the best, its accuracy."""
    from vitkit.checkpoints import containers

    return json.loads(containers.read(file)[1]["vitkit"])["extra"]


def vitkit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """The command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["vitkit", *args])
    monkeypatch.setenv("COLUMNS", "200")
    from vitkit.cli import main

    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err
