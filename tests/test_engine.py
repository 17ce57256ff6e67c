"""The engine: one process needs nothing, several agree; devices and precisions that are not there are named."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from tests.training.tiny import forked
from vitkit.engine import Engine, tracker
from vitkit.errors import ConfigError, DataError, MissingDependency, UnknownName


def test_one_process() -> None:
    engine = Engine("cpu")
    assert (engine.rank, engine.ranks, engine.main, engine.device) == (0, 1, True, torch.device("cpu"))
    model = nn.Linear(2, 2)
    assert engine.prepare(model) is model
    assert engine.unwrap(model) is model
    assert engine.gather("x") == ["x"]
    assert engine.on_main(lambda: 5) == 5
    rows = np.ones((3, 2))
    assert engine.gather_rows(rows) is rows
    engine.wait()
    engine.close()


def test_precision() -> None:
    x = torch.ones(2, 2)
    with Engine("cpu", "bf16").autocast():
        assert torch.is_autocast_enabled("cpu")
    with Engine("cpu").autocast():
        assert (x @ x).dtype == torch.float32
    with pytest.raises(ConfigError, match="fp16 is for accelerators"):
        Engine("cpu", "fp16")
    with pytest.raises(UnknownName, match="fp23"):
        Engine("cpu", "fp23")


@pytest.mark.parametrize(("device", "words"), [("cuda", "no device 'cuda' here"), ("toaster", "such as auto, cpu")])
def test_devices_that_are_not_there(device: str, words: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=words):
        Engine(device)


def test_clip() -> None:
    engine, p = Engine("cpu"), nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([p], lr=1.0)
    p.grad = torch.full((4,), 3.0)
    assert engine.clip(optimizer, [p], None) == pytest.approx(6.0)
    assert torch.equal(p.grad, torch.full((4,), 3.0))
    assert engine.clip(optimizer, [p], 1.0) == pytest.approx(6.0)
    assert p.grad.norm() == pytest.approx(1.0, rel=1e-4)


def test_two_processes() -> None:
    def work(rank: int) -> None:
        engine = Engine("cpu")
        assert (engine.rank, engine.ranks, engine.main) == (rank, 2, rank == 0)
        assert engine.gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
        rows = engine.gather_rows(np.full((rank + 1, 2), rank))          # 1 row and 2 rows
        assert rows[:, 0].tolist() == [0, 1, 1]
        assert engine.sum(torch.tensor([1.0 + rank])).item() == 3
        assert engine.on_main(lambda: os.getpid()) == engine.gather(os.getpid())[0]
        with pytest.raises(DataError, match="only here"):
            engine.on_main(lambda: (_ for _ in ()).throw(DataError("only here")))
        torch.manual_seed(0)
        bare = nn.Linear(3, 1)
        model = engine.prepare(bare)
        assert engine.unwrap(model) is bare
        with engine.no_sync(model):
            model(torch.ones(1, 3)).sum().backward()
        model(torch.full((1, 3), float(rank))).sum().backward()          # mean over processes of 1 + rank
        assert torch.allclose(bare.weight.grad, torch.full((1, 3), 1.5))
        engine.wait()
        engine.close()

    assert forked(work, ranks=2) == [0, 0]


def test_importing_the_engine_imports_neither_torch_nor_accelerate() -> None:
    code = "import sys, vitkit.engine; print('torch' in sys.modules, 'accelerate' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == \
        ["False", "False"]


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependency, match=r"pip install 'vitkit\[track\]'"):
        tracker("wandb", "p", ".", "r")
    with pytest.raises(UnknownName, match="wandb, mlflow"):
        tracker("abacus", "p", ".", "r")
