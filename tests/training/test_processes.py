"""Two processes (gloo, CPU) against one: same global batches, nearly the same weights; resuming with one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.training.test_loop import distance
from tests.training.tiny import SETTINGS, bytes_of, forked, run, tiny
from vitkit.data.mix import Mix
from vitkit.jobs import train as jobs
from vitkit.speed import training
from vitkit.speed.cuda_graphs import GraphedStep
from vitkit.training.run_folder import RunFolder

RECIPE = tiny(steps=20, lr=1e-3, warmup=0, ema=0.9, mix=Mix(mixup=0.5, probability=0.5))


def test_two_processes_end_where_one_does(tmp_path: Path) -> None:
    run(tmp_path / "one", RECIPE)
    assert forked(lambda rank: run(tmp_path / "two", RECIPE), ranks=2) == [0, 0]
    for which in ("last", "ema"):
        assert distance(tmp_path / "one", tmp_path / "two", which) < 1e-4
    one, two = RunFolder.open(tmp_path / "one"), RunFolder.open(tmp_path / "two")
    assert two.info["processes"] == 2
    for a, b in zip(one.metrics(), two.metrics(), strict=True):
        assert a["event"] == b["event"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        if a["event"] == "val":
            assert a["images"] == b["images"] == 179  # an odd number: every image once


def test_two_processes_with_muon_and_augmentation_on_the_device(tmp_path: Path) -> None:
    recipe = tiny(steps=6, optimizer="muon", augment_on="device", mix=Mix(cutmix=1.0), ema=0.9, layer_decay=0.8)
    run(tmp_path / "one", recipe)
    assert forked(lambda rank: run(tmp_path / "two", recipe), ranks=2) == [0, 0]
    for which in ("last", "ema"):
        assert distance(tmp_path / "one", tmp_path / "two", which) < 1e-4


def test_two_processes_with_accumulation_and_dropout(tmp_path: Path) -> None:
    recipe = tiny(steps=6, dropout=0.1, batch_size=16)
    settings = {**SETTINGS, "micro_batch": 2}
    for name in ("a", "b"):
        assert forked(lambda rank, name=name: run(tmp_path / name, recipe, settings=settings), ranks=2) == [0, 0]
    assert distance(tmp_path / "a", tmp_path / "b") == 0
    run(tmp_path / "plain", tiny(steps=6, batch_size=16))
    forked(lambda rank: run(tmp_path / "same", tiny(steps=6, batch_size=16), settings=settings), ranks=2)
    assert distance(tmp_path / "same", tmp_path / "plain") < 1e-4


def test_cut_on_two_resumed_on_one(tmp_path: Path) -> None:
    def cut(rank: int) -> None:
        def watch(event: dict) -> None:  # the main process alone is asked to stop; both do
            if event["event"] == "step" and event["step"] == 9:
                os.kill(os.getpid(), signal.SIGTERM)

        _, outcome = run(tmp_path / "cut", RECIPE, watch=watch)
        assert (outcome.stopped, outcome.step) == (True, 10)

    assert forked(cut, ranks=2) == [0, 0]
    _, outcome = run(tmp_path / "cut", RECIPE, resume=True)
    assert outcome.step == 20
    run(tmp_path / "one", RECIPE)
    assert distance(tmp_path / "cut", tmp_path / "one") < 1e-4
    losses = [[row["loss"] for row in RunFolder.open(tmp_path / name).metrics()] for name in ("cut", "one")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(("batch", "micro"), [(16, None), (14, 2), (4, 1)])
def test_a_batch_that_three_processes_share_unevenly(batch: int, micro: int | None, tmp_path: Path) -> None:
    """16 = 5 + 5 + 6; with micro-batches of 1, the processes with one of 4 images wait for the one with two."""
    recipe = tiny(steps=6, batch_size=batch)
    run(tmp_path / "one", recipe)
    settings = {**SETTINGS, "micro_batch": micro}
    assert forked(lambda rank: run(tmp_path / "three", recipe, settings=settings), ranks=3) == [0, 0, 0]
    assert distance(tmp_path / "one", tmp_path / "three") < 1e-4
    for a, b in zip(*(RunFolder.open(tmp_path / name).metrics() for name in ("one", "three")), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a.get("gradient", 0.0) == pytest.approx(b.get("gradient", 0.0), rel=1e-4)


def test_an_error_reaches_every_process(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        from vitkit.errors import ConfigError, OutputError

        with pytest.raises(ConfigError, match=r"at least one image per process; got a batch of 1 for 2 processes\."):
            run(tmp_path / "r", tiny(batch_size=1))
        with pytest.raises(OutputError):
            run(Path("/dev/null/r"), tiny(steps=1, warmup=0))

    assert forked(work, ranks=2) == [0, 0]


class OnTheCpu(GraphedStep):
    """What a GraphedStep does, without a device: every call overwrites the logits and gradients of the last one."""

    made = 0

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.module, self.x = module, torch.zeros_like(x)
        self.parameters = list(module.parameters())
        self.logits, self.gradient = torch.zeros(len(x), 10), torch.zeros(len(x), 10)
        self.gradients = tuple(torch.zeros_like(p) for p in self.parameters)
        self.ahead, self.back = SimpleNamespace(replay=self.forward), SimpleNamespace(replay=self.backward)
        OnTheCpu.made += 1

    def forward(self) -> None:
        stands = {name: p.detach().requires_grad_() for name, p in self.module.named_parameters()}
        with torch.enable_grad():
            self.computed, self.stands = functional_call(self.module, stands, (self.x,)), list(stands.values())
        self.logits.copy_(self.computed.detach())

    def backward(self) -> None:
        found = torch.autograd.grad(self.computed, self.stands, self.gradient)
        for place, gradient in zip(self.gradients, found, strict=True):
            place.copy_(gradient)


def test_two_processes_with_graphs_end_where_they_do_without(tmp_path: Path) -> None:
    """Gradients that always come in the same memory are averaged, clipped and applied like others."""
    recipe, ended = tiny(steps=6, drop_path=0.2, dropout=0.1, ema=0.9), {}
    for name in ("graphs", "eager"):

        def work(rank: int, name: str = name) -> None:
            training.fusible = lambda *_: True
            training.GraphedStep = OnTheCpu
            if name == "eager":
                jobs.wrapped = lambda model, graph, fp8: training.TrainingForward(model)
            run(tmp_path / name, recipe)
            assert OnTheCpu.made == (name == "graphs")

        assert forked(work, ranks=2) == [0, 0]
        ended[name] = bytes_of(tmp_path / name)
    assert ended["graphs"] == ended["eager"]
    assert RunFolder.open(tmp_path / "graphs").info["processes"] == 2


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "-m",
        "vitkit",
        "train",
        "digits",
        "--recipe",
        "digits",
        "--steps",
        "5",
        "--warmup",
        "0",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "r"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done: 5 steps") == 1
    assert torch.isfinite(torch.tensor(RunFolder.open(tmp_path / "r").metrics()[-1]["loss"]))
