"""`--batch-size auto`: a step without memory is computed again with fewer images at a time, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_loop import PLAIN, distance, stop_at, with_a_head
from tests.training.tiny import SETTINGS, bytes_of, forked, run, tiny, vitkit
from vitkit.data.batch import Batch
from vitkit.errors import ConfigError, OutOfMemory
from vitkit.model.create import build
from vitkit.runtime import Runtime, find_device
from vitkit.training import gradients, memory
from vitkit.training.objectives import Classify
from vitkit.training.run_folder import RunFolder
from vitkit.training.settings import BatchSplit, Settings

AUTO = {**SETTINGS, "micro_batch": "auto"}
RECIPE = tiny(**PLAIN | {"steps": 8})


def plant(monkeypatch: pytest.MonkeyPatch, most: int, first: int = 0, error: type[Exception] | None = None) -> None:
    """Let forward passes of more than `most` images run out of memory from step `first` on."""
    whole = Classify.loss

    def loss(self: Classify, forward: Any, batch: Batch, step: int, runtime: Runtime) -> Any:
        if step >= first and len(batch) > most:
            raise (error or torch.OutOfMemoryError)("planted")
        return whole(self, forward, batch, step, runtime)

    monkeypatch.setattr(Classify, "loss", loss)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_step_without_memory_is_computed_again(error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_a_head(RECIPE, tmp_path / "w.safetensors")
    how = {"weights": tmp_path / "w.safetensors"}
    run(tmp_path / "plain", RECIPE, **how)
    run(tmp_path / "roomy", RECIPE, **how, settings=AUTO)
    assert bytes_of(tmp_path / "plain") == bytes_of(tmp_path / "roomy")  # enough memory: nothing changes
    said: list[dict] = []
    plant(monkeypatch, 5, first=3, error=error)
    _, outcome = run(tmp_path / "tight", RECIPE, **how, settings=AUTO, watch=said.append)
    assert outcome.step == 8
    assert distance(tmp_path / "plain", tmp_path / "tight") < 5e-6
    notes = [event["text"] for event in said if event["event"] == "note"]
    assert [note.partition(". The")[0] for note in notes] == [
        f"No memory was left at step 3: the 16 images of an update are now computed {micro} at a time"
        for micro in (8, 4)
    ]
    lines = [RunFolder.open(tmp_path / name).metrics() for name in ("plain", "tight")]
    assert [row["step"] for row in lines[0]] == [row["step"] for row in lines[1]]
    assert [row["loss"] for row in lines[0]] == pytest.approx([row["loss"] for row in lines[1]], rel=1e-5)


def test_a_resumed_run_starts_with_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, 5, first=3)
    run(tmp_path / "whole", tiny(dropout=0.1), settings=AUTO)
    run(tmp_path / "cut", tiny(dropout=0.1), settings=AUTO, watch=stop_at(6))
    said: list[dict] = []
    run(tmp_path / "cut", tiny(dropout=0.1), settings=AUTO, resume=True, watch=said.append)
    assert not any("No memory" in event.get("text", "") for event in said)
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")


def test_one_image_that_does_not_fit_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, 0, first=2)
    with pytest.raises(OutOfMemory, match=r"No memory was left at step 2.*Everything up to step 2 is saved"):
        run(tmp_path / "r", RECIPE, settings=AUTO)


def test_without_auto_nothing_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, 5)
    with pytest.raises(OutOfMemory, match="Use --batch-size auto"):
        run(tmp_path / "r", RECIPE)


def test_other_errors_are_not_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, 5, error=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "r", RECIPE, settings=AUTO)


def test_the_split_divides_the_batch() -> None:
    whole = BatchSplit(24, 24, 1)
    assert [whole.at_most(n).micro for n in (24, 23, 11, 5, 1, 0)] == [24, 12, 8, 5, 1, 1]
    assert whole.at_most(7).count == 4
    assert BatchSplit(7, 7, 1).at_most(3) == BatchSplit(7, 3, 3)
    assert BatchSplit.among(32, 3).at_most(6) == BatchSplit(11, 6, 2)
    for images in range(1, 40):  # a resumed run, which knows the micro-batch alone, computes what the first one did
        for n in range(1, 40):
            split = BatchSplit.among(images, 1).at_most(n)
            assert split.micro <= n
            assert split.at_most(split.micro) == split


def test_the_estimate_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny()
    model = build(recipe.config).train()
    objective, runtime = object.__new__(Classify), Runtime("cpu")
    objective.recipe, objective.weights = recipe, None
    spec = model.input_spec
    few, many = (memory.images_that_fit(objective, model, spec, runtime, free=n << 20) for n in (2, 20))
    assert 1 <= few < many
    assert memory.images_that_fit(objective, model, spec, runtime, free=0) == 1
    assert (memory.free_bytes() or 1) > 0
    monkeypatch.setattr(gradients, "images_that_fit", lambda *args: 6)
    said: list[dict] = []
    run(tmp_path / "r", RECIPE, settings=AUTO, watch=said.append)
    assert any("There is memory for about 6 images at once" in event.get("text", "") for event in said)
    assert any("computed 6 at a time" in event.get("text", "") for event in said)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plant(monkeypatch, 9)
    how = [
        "train",
        "digits",
        "--recipe",
        "digits",
        "--steps",
        "2",
        "--warmup",
        "0",
        "--device",
        "cpu",
        "--workers",
        "0",
        "--tracker",
        "none",
        "--no-report",
    ]
    code, out, err = vitkit(monkeypatch, capsys, *how, "--batch-size", "auto", "--out", str(tmp_path / "r"))
    assert code == 0, err
    assert "computed 8 at a time" in out
    info = RunFolder.open(tmp_path / "r").info
    assert (info["recipe"]["batch_size"], info["settings"]["micro_batch"]) == (32, "auto")
    for wrong, words in (("many", "--batch-size must be a whole number or auto; got 'many'."), ("0", "batch_size")):
        code, out, err = vitkit(monkeypatch, capsys, *how, "--batch-size", wrong, "--out", str(tmp_path / "s"))
        assert (code, words in err) == (2, True), err
    both = ["--batch-size", "auto", "--micro-batch", "8", "--out", str(tmp_path / "s")]
    code, out, err = vitkit(monkeypatch, capsys, *how, *both)
    assert code == 2
    assert "--batch-size auto chooses the micro-batch" in err


def test_several_processes_are_refused(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with pytest.raises(ConfigError, match="--batch-size auto is for one process; got 2"):
            run(tmp_path / "r", tiny(), settings=AUTO)

    assert forked(work, ranks=2) == [0, 0]


def test_settings() -> None:
    assert Settings(micro_batch="auto").to_dict()["micro_batch"] == "auto"
    with pytest.raises(ConfigError, match="micro_batch"):
        Settings(micro_batch="much")  # type: ignore[arg-type]


# Devices


def test_devices_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert str(find_device("auto")) == "cuda"
    assert str(find_device("cuda:1")) == "cuda:1"
    with pytest.raises(ConfigError, match=r"no device 'cuda:2'; of this kind it has cuda:0 to cuda:1\."):
        find_device("cuda:2")
    with pytest.raises(ConfigError, match=r"no device 'cpu:3'; of this kind it has one, cpu\."):
        find_device("cpu:3")
    with pytest.raises(ConfigError, match="Expected a device such as auto, cpu, cuda, cuda:1 or mps; got 'gpu'"):
        find_device("gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"no device 'cuda:1'; use --device auto \(here: (cpu|mps)\)"):
        find_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="Each of the 2 processes has a device of its own; got --device cuda:1"):
        Runtime("cuda:1")
