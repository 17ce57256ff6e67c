"""`--shard`: equal to plain training on several processes, and a state that any number of processes can load."""

from __future__ import annotations

import importlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.tiny import CONFIG, SETTINGS, apart, extra_of, forked, run, tiny
from vitkit.checkpoints import containers, load
from vitkit.data.mix import Mix
from vitkit.errors import ConfigError
from vitkit.jobs.train import prepare
from vitkit.training.run_folder import RunFolder
from vitkit.training.shard import ALONE, step_device

RECIPE = tiny(steps=8, lr=1e-3, warmup=0, ema=0.9, clip=0.5, mix=Mix(mixup=0.5, probability=0.5))
SHARD: dict[str, Any] = {"shard": True, "micro_batch": 2}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import once what every process would import."""
    for name in ("accelerate", "sklearn.datasets", "torch.distributed.fsdp", "torch.distributed.checkpoint.hf_storage"):
        importlib.import_module(name)


def train(out: Path, ranks: int, recipe: Any = RECIPE, until: int | None = None, **settings: Any) -> None:
    """Train on so many processes; `until` stops the run after that step, by a signal."""

    def work(rank: int) -> None:
        def watch(event: dict) -> None:
            if event["event"] == "step" and event["step"] == until:
                os.kill(os.getpid(), signal.SIGTERM)

        run(out, recipe, watch=watch, settings=settings, resume=True)

    assert forked(work, ranks) == [0] * ranks


def logits_apart(a: Path, b: Path, which: str = "last") -> float:
    x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = [load(folder / f"{which}.safetensors").eval()(x) for folder in (a, b)]
    return float((logits[0] - logits[1]).abs().max())


def parts_of(out: Path) -> dict[str, list[Path]]:
    """The parts of each state: its step -> files."""
    found: dict[str, list[Path]] = {}
    for file in sorted((out / "state").glob("step-*-*/*")):
        found.setdefault(file.parent.name.split("-")[1], []).append(file)
    return found


def check_equal(a: Path, b: Path) -> None:
    for which in ("last", "ema"):
        assert apart(a, b, which) < 1e-6
        assert logits_apart(a, b, which) < 1e-5


def test_two_processes_shard_as_they_train_and_one_resumes(tmp_path: Path) -> None:
    plain, sharded = tmp_path / "plain", tmp_path / "sharded"
    train(plain, 2)
    train(sharded, 2, until=5, **SHARD)
    state = RunFolder.open(sharded).latest()
    assert state is not None
    assert (state.stem, containers.read(state)[0]) == ("step-000000000006", {})
    parts = parts_of(sharded)
    assert {step: len(files) for step, files in parts.items()} == {"000000000004": 2, "000000000006": 2}
    damaged = parts["000000000006"][1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    (sharded / "state" / "step-000000000007-killed").mkdir()  # what a kill in the middle of a save leaves
    train(sharded, 1)  # from step 4, whole again
    check_equal(plain, sharded)
    assert (state.parent / f"{state.name}.damaged").is_file()
    assert extra_of(sharded / "last.safetensors")["step"] == "8"
    assert parts_of(sharded) == parts  # of the state before the last, and of the one that was set aside
    assert not (sharded / "state" / "step-000000000007-killed").exists()


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ({}, {"compile": True}, r"--shard does not work with --compile; leave it out\."),
        ({}, {"precision": "fp16", "device": "cpu"}, "fp16"),
        ({"objective": "masked-patch"}, {}, r"--shard is for classification"),
        ({"optimizer": "muon"}, {}, r"--shard divides the matrices that Muon needs whole; use --optimizer adamw\."),
    ],
)
def test_what_cannot_be_sharded_is_refused(tmp_path: Path, recipe: Any, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "r", tiny(**recipe), settings={"shard": True, **settings})
    assert not (tmp_path / "r").exists()


def test_one_process_shards_nothing(tmp_path: Path) -> None:
    ready = prepare("digits", tmp_path / "r", recipe=tiny(), settings={**SETTINGS, "shard": True})
    assert ALONE in ready.notes
    assert not ready.runtime.sharded
    assert ready.settings.checkpointing is True
    again = prepare(
        "digits", tmp_path / "r", recipe=tiny(), settings={**SETTINGS, "shard": True, "checkpointing": False}
    )
    assert again.settings.checkpointing is False


def test_steps_are_counted_where_the_optimizer_reads_them() -> None:
    """A fused kernel reads them on the device; a run on CUDA could not be resumed with them on the CPU."""
    there = torch.nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.AdamW([there])
    assert step_device(optimizer, there).type == "cpu"
    for name in ("fused", "capturable"):
        optimizer.defaults = {**optimizer.defaults, "fused": False, "capturable": False, name: True}
        assert step_device(optimizer, there).type == "meta"


@pytest.mark.slow
def test_four_two_and_one(tmp_path: Path) -> None:
    plain, sharded = tmp_path / "plain", tmp_path / "sharded"
    train(plain, 4)
    train(tmp_path / "four", 4, **SHARD)
    check_equal(plain, tmp_path / "four")
    train(sharded, 4, until=1, **SHARD)
    assert [len(files) for files in parts_of(sharded).values()] == [4]
    train(sharded, 2, until=3)
    assert len(parts_of(sharded)["000000000004"]) == 2
    train(sharded, 1, until=4)
    assert len(containers.read(sharded / "state" / "step-000000000005.safetensors")[0]) > 0
    train(sharded, 4)  # from the state of one process, which is whole
    assert len(parts_of(sharded)["000000000008"]) == 4
    check_equal(plain, sharded)


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path) -> None:
    def killed(rank: int) -> None:
        def watch(event: dict) -> None:
            if event["event"] == "step" and event["step"] == 6:
                os.kill(os.getpid(), signal.SIGKILL)

        run(tmp_path / "killed", RECIPE, watch=watch, settings=SHARD)

    assert forked(killed, 2) == [-signal.SIGKILL, 1]
    assert list(parts_of(tmp_path / "killed")) == ["000000000004"]
    train(tmp_path / "killed", 2)
    train(tmp_path / "whole", 2, **SHARD)
    for which in ("last", "ema", "best"):  # to the bit
        a, b = (containers.read(tmp_path / name / f"{which}.safetensors")[0] for name in ("killed", "whole"))
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ({"optimizer": "sgd", "weight_decay": 0.0, "momentum": 0.9, "lr": 0.03}, {}),
        ({"freeze": ("blocks.0.*", "class_token")}, {}),
        ({"dropout": 0.1, "drop_path": 0.1}, {"micro_batch": None}),
        ({"config": replace(CONFIG, positions_in="shared", pool="mean", class_token=False)}, {}),
    ],
    ids=["sgd", "frozen", "dropout", "shared positions"],
)
def test_two_processes_shard_other_recipes(tmp_path: Path, recipe: Any, settings: Any) -> None:
    recipe = replace(RECIPE, **recipe)
    train(tmp_path / "plain", 2, recipe, **settings)
    train(tmp_path / "sharded", 2, recipe, until=4, **{**SHARD, **settings})
    train(tmp_path / "sharded", 2, recipe)
    check_equal(tmp_path / "plain", tmp_path / "sharded")


@pytest.mark.slow
def test_three_processes_share_a_batch_that_does_not_divide(tmp_path: Path) -> None:
    train(tmp_path / "plain", 3)
    train(tmp_path / "sharded", 3, **SHARD)
    check_equal(tmp_path / "plain", tmp_path / "sharded")


@pytest.mark.slow
def test_two_processes_shard_in_bf16(tmp_path: Path) -> None:
    train(tmp_path / "plain", 2, precision="bf16")
    train(tmp_path / "sharded", 2, **SHARD, precision="bf16")
    losses = [
        [row["loss"] for row in RunFolder.open(tmp_path / name).metrics() if row["event"] == "val"]
        for name in ("plain", "sharded")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
