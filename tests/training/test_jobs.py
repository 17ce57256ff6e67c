"""`train` as a user meets it: mistakes refused before any work, the parts of the data, the dry run."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.training.test_loop import stop_at
from tests.training.tiny import CONFIG, SETTINGS, bytes_of, run, tiny, vitkit
from vitkit import ViT, ViTConfig, save
from vitkit.data.sources import open_source
from vitkit.errors import ConfigError, DataError, OutputError
from vitkit.jobs.dry_run import dry_run
from vitkit.jobs.splits import train_and_val
from vitkit.jobs.train import prepare
from vitkit.speed import choices
from vitkit.training.memory import kept_bytes
from vitkit.training.run_folder import RunFolder


def photos(folder: Path, **classes: int) -> Path:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.new("RGB", (12, 10), (20 * i % 255, 50, 100)).save(folder / name / f"{i}.png")
    return folder


TINY = ["--recipe", "digits", "--device", "cpu", "--tracker", "none"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["digits", "--recipe", "digit", "--out", "r"], "did you mean 'digits'"),
        (["digits", *TINY], "Give --out"),
        (["--out", "r", *TINY], "Give the data"),
        (["nowhere", "--out", "r", *TINY], "no data at 'nowhere'"),
        (
            ["digits", "--out", "r", *TINY, "--epochs", "60", "--warmup", "5000"],
            "got 5,000 of 3,034 steps. Use --warmup 337 ",
        ),
        (
            ["digits", "--out", "r", *TINY, "--accumulate", "20"],
            "The 32 images of each process cannot be divided evenly into --accumulate 20 parts. Use --accumulate 16.",
        ),
        (["digits", "--out", "r", *TINY, "--accumulate", "2", "--micro-batch", "2"], "got both"),
        (["digits", "--out", "r", *TINY, "--epochs", "2", "--steps", "3"], "either epochs or steps; got both"),
        (["digits", "--out", "r", *TINY, "--lr", "nan"], "lr must be a finite number"),
        (["digits", "--out", "r", *TINY, "--optimizer", "sgd"], "decoupled"),
        (["digits", "--out", "r", *TINY, "--model", "vit-x/16"], "Unknown variant"),
        (["digits", "--out", "r", *TINY, "--model", "vit-ti/16", "--from", "x.pth"], "got both"),
        (["digits", "--out", "r", *TINY, "--from", "nothing.pth"], "nothing.pth"),
        (["digits", "--out", "r", *TINY, "--image-size", "9"], "multiple of"),
        (["digits", "--out", "r", *TINY, "--freeze", "blokcs.*"], "matches none"),
        (["digits", "--out", "r", *TINY, "--precision", "fp16"], "fp16 runs on accelerators only"),
        (["digits", "--out", "r", *TINY, "--precision", "int3"], "Unknown precision"),
        (["digits", "--out", "r", *TINY, "--seed", "-1"], "seed must be"),
        (["digits", "--out", "r", *TINY, "--val", "1"], "something to train on"),
        (["digits", "--out", "r", *TINY, "--bad-images", "eat"], "bad_images must be one of"),
        (["digits", "--out", "r", "--recipe", "digits", "--tracker", "abacus"], "Unknown tracker"),
        (["digits", "--out", "/dev/null/r", *TINY, "--steps", "1", "--warmup", "0"], "/dev/null/r"),
        (["digits", "--out", "r", "--recipe", "deit", "--batch-size", "8"], "Give --final-lr"),
        (["digits", "--out", "r", "--recipe", "pretrain-imagenet"], "needs a model: give --model"),
    ],
)
def test_mistakes(
    args: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = vitkit(monkeypatch, capsys, "train", *args)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())  # nothing was begun


def test_no_space_left_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 2**20 * 5 // 8  # must not be rounded up to the number that is needed
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(free))
    with pytest.raises(OutputError, match=r"needs about 1 MiB .* only 0 MiB are free"):
        run(tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file.*choose another"):
        run(tmp_path / "file" / "r")


def test_a_resumed_run_must_be_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "r", watch=stop_at(3))
    for how, words in [
        ({"recipe": tiny(lr=1.0)}, "another recipe .lr 0.001, not 1.0"),
        ({"recipe": tiny(steps=99)}, "steps 12, not 99"),
        ({"settings": {"seed": 5}}, "seed 0, not 5"),
        ({"recipe": tiny(), "model": "vit-ti/16"}, "another config"),
        ({"recipe": tiny(val=0.3)}, "data"),
        ({"data": str(photos(tmp_path / "p", a=12, b=12))}, "classes|data"),
    ]:
        with pytest.raises(ConfigError, match=words):
            run(tmp_path / "r", how.pop("recipe", tiny()), resume=True, **how)
    # a run.json that was written before configurations left out defaults
    file = tmp_path / "r" / "run.json"
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert stored["same"]["config"]["format"] == 1
    stored["same"]["config"] = ViTConfig.from_dict(stored["same"]["config"]).to_dict(whole=True)
    file.write_text(json.dumps(stored), encoding="utf-8")
    monkeypatch.setattr("vitkit.training.run_folder._copied_info", lambda state: None)
    # and what was not given is remembered
    from vitkit.jobs.train import train

    _, outcome = train(None, tmp_path / "r", resume=True)
    assert outcome.step == 12
    run(tmp_path / "whole")
    assert bytes_of(tmp_path / "r") == bytes_of(tmp_path / "whole")


def test_images_replaced_by_others_of_the_same_size_are_not_resumed_on(tmp_path: Path) -> None:
    data = photos(tmp_path / "p", a=12, b=12)
    recipe = tiny(config=dataclasses.replace(tiny().config, num_channels=3, num_classes=2))
    run(tmp_path / "r", recipe, data=str(data), watch=stop_at(3))
    run(tmp_path / "whole", recipe, data=str(data), watch=stop_at(3), verify_data=True)
    moved = shutil.copytree(data, tmp_path / "copy", copy_function=shutil.copyfile)  # other times, the same content
    prepare(str(moved), tmp_path / "r", recipe=recipe, resume=True, settings=SETTINGS)
    ready = prepare(str(moved), tmp_path / "r", recipe=recipe, resume=True, settings=SETTINGS, verify_data=True)
    assert "without --verify-data" in ready.notes[0]
    assert not prepare(
        str(moved), tmp_path / "whole", recipe=recipe, resume=True, settings=SETTINGS, verify_data=True
    ).notes
    for file in data.rglob("*.*"):
        stat = file.stat()
        file.write_bytes(bytes(255 - byte for byte in file.read_bytes()))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for out, words in (("r", "started with other data .images, names or labels differ"), ("whole", "other data")):
        with pytest.raises(ConfigError, match=words):
            run(tmp_path / out, recipe, data=str(data), resume=True)


def test_verifying_compares_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = photos(tmp_path / "p", a=12, b=12)
    recipe = tiny(config=dataclasses.replace(tiny().config, num_channels=3, num_classes=2))
    monkeypatch.setattr("vitkit.data.base.EXCERPT", 4)  # so that these small files have bytes between the parts
    run(tmp_path / "r", recipe, data=str(data), watch=stop_at(3), verify_data=True)
    file = next(data.rglob("*.*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2 - 2] ^= 1
    file.write_bytes(content)
    how = {"recipe": recipe, "resume": True, "settings": SETTINGS}
    prepare(str(data), tmp_path / "r", **how)
    with pytest.raises(ConfigError, match="started with other verified data"):
        prepare(str(data), tmp_path / "r", **how, verify_data=True)


def test_a_run_with_other_random_numbers_is_not_resumed(tmp_path: Path) -> None:
    run(tmp_path / "r", watch=stop_at(3))
    shutil.rmtree(tmp_path / "r/state")  # its copy of run.json would be used instead of the edited one
    record = tmp_path / "r/run.json"
    info = json.loads(record.read_text(encoding="utf-8"))
    for before in (1, None):
        info["same"]["random numbers"] = before  # None: as in runs from before there was a version
        record.write_text(json.dumps(info), encoding="utf-8")
        with pytest.raises(ConfigError, match=r"draws other random numbers.*another --out\.$"):
            run(tmp_path / "r", resume=True)


def test_a_run_finds_its_data_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.jobs.train import train

    photos(tmp_path / "here" / "p", a=12, b=12)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run(tmp_path / "r", data="p", watch=stop_at(3))
    monkeypatch.chdir(tmp_path / "there")
    folder, outcome = train(None, tmp_path / "r", resume=True)
    assert outcome.step == 12
    assert folder.info["data"]["spec"] == "p"
    assert folder.data == f"folder:{tmp_path / 'here' / 'p'}"
    (tmp_path / "here" / "p").rename(tmp_path / "there" / "p")  # moved along: what the user gave is tried next
    assert RunFolder.open(tmp_path / "r").data == "p"
    run(tmp_path / "d", tiny(steps=1, warmup=0))
    assert RunFolder.open(tmp_path / "d").data == "digits"


def test_parts(tmp_path: Path) -> None:
    both = photos(tmp_path / "d" / "train", a=20, b=30)
    train, val, notes = train_and_val(tmp_path / "d" / "train", 0.1, 0)
    assert (len(train), len(val), notes) == (45, 5, [])
    # no parts of its own: what eval measures on by itself was never trained on, whatever the run's seed
    train, val, _ = train_and_val(both, 0.1, 7)
    assert list(val.names) == list(open_source(both, "test").names)
    photos(tmp_path / "d" / "test", a=4, b=4)
    train, val, _ = train_and_val(tmp_path / "d", 0.2, 0)
    assert (len(train), len(val)) == (40, 10)
    assert not set(val.names) & set(train.names)
    assert not any("test" in name.split(os.sep)[:-2] for name in [*train.names, *val.names])
    assert set(val.names) != set(train_and_val(tmp_path / "d", 0.2, 1)[1].names)
    assert train_and_val(tmp_path / "d", 0.0, 0)[1] is None
    assert "only measure memorisation" in train_and_val("digits", 0.0, 0)[2][0]
    photos(tmp_path / "d" / "val", a=3, b=2)
    train, val, _ = train_and_val(tmp_path / "d", 0.2, 0)
    assert (len(train), len(val)) == (50, 5)
    assert len(train_and_val(tmp_path / "d", 0.0, 0)[0]) == 50


def test_classes_that_a_part_lacks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Class 'rare' has no images to validate on .1 image in total.*--val 0"):
        train_and_val(photos(tmp_path / "one", a=10, b=10, rare=1), 0.1, 0)
    with pytest.raises(DataError, match=r"Class 'a' has no images to validate on .1 image in total"):
        train_and_val(photos(tmp_path / "one each", a=1, b=1), 0.1, 0)
    with pytest.raises(DataError, match=r"at least two classes; .* has only 'a'"):
        train_and_val(photos(tmp_path / "single", a=10), 0.1, 0)
    photos(tmp_path / "three" / "train", a=5, b=5, c=5)
    photos(tmp_path / "three" / "val", a=5, b=5)
    with pytest.raises(DataError, match=r"validation part|val"):
        train_and_val(tmp_path / "three", 0.1, 0)


def test_small_data_is_warned_of(tmp_path: Path) -> None:
    data = photos(tmp_path / "p", a=30, b=30)
    how = {"settings": SETTINGS, "changes": {"steps": 2, "warmup": 0, "batch_size": 4}}
    (note,) = prepare(data, tmp_path / "r", model="vit-ti/16", recipe="pretrain-imagenet", **how).notes
    assert "58 images are too few" in note
    assert "probe" in note
    assert "--from" in note
    assert prepare(data, tmp_path / "r", model="vit-ti/16", recipe="small-data", **how).notes == ()
    save(ViT(CONFIG), tmp_path / "w.safetensors")
    assert prepare(data, tmp_path / "r", weights=tmp_path / "w.safetensors", recipe="finetune", **how).notes == ()
    notes = prepare(data, tmp_path / "r", model="vit-ti/16", recipe="pretrain-jft-h14", **how).notes
    assert any("published for vit-h/14" in note for note in notes)
    notes = prepare(data, tmp_path / "r", model="vit-ti/16", recipe="finetune-pets", **how).notes
    assert any("pre-trained weights" in note for note in notes)


def test_fine_tuning_replaces_the_head_by_zeros_and_keeps_what_fits(tmp_path: Path) -> None:
    model = ViT(CONFIG)
    torch.nn.init.normal_(model.head.weight)
    save(model, tmp_path / "w.safetensors")
    ready = prepare(
        photos(tmp_path / "p", a=30, b=30),
        tmp_path / "r",
        weights=tmp_path / "w.safetensors",
        recipe=tiny(),
        image_size=16,
        settings=SETTINGS,
    )
    assert ready.model.head.weight.shape == (2, 32)
    assert not ready.model.head.weight.any()
    assert not ready.model.head.bias.any()
    assert ready.model.config.grid == (4, 4)
    assert ready.model.input_spec.class_names == ("a", "b")
    assert torch.equal(ready.model.blocks[1].mlp.fc1.weight, model.blocks[1].mlp.fc1.weight)
    # weights whose classes are these go on with their own head
    run(tmp_path / "first", tiny(steps=3, warmup=0))
    ready = prepare(
        "digits", tmp_path / "second", weights=f"{tmp_path / 'first'}@last", recipe=tiny(), settings=SETTINGS
    )
    assert ready.model.head.weight.any()
    # the file is not touched by training
    before = (tmp_path / "w.safetensors").read_bytes()
    run(tmp_path / "third", tiny(steps=2, warmup=0), weights=tmp_path / "w.safetensors")
    assert (tmp_path / "w.safetensors").read_bytes() == before


def test_a_resumed_run_keeps_the_algorithms_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    took, found = {"a": 1.0, "b": 2.0}, []

    def watch(event: dict) -> None:
        if event["event"] == "step":
            ways = {name: lambda name=name: name for name in took}
            found.append(choices.fastest("a product", ways, lambda work: took[work()]))

    run(tmp_path / "r", tiny(steps=4, warmup=0), watch=lambda event: (watch(event), stop_at(2)(event)))
    assert not choices.pinning()
    took["b"] = 0.5
    monkeypatch.setattr(choices, "_known", dict)  # the cache is gone
    run(tmp_path / "r", tiny(steps=4, warmup=0), watch=watch, resume=True)
    run(tmp_path / "other", tiny(steps=1, warmup=0), watch=watch)
    assert set(found[:-1]) == {"a"}
    assert found[-1] == "b"


def test_a_run_cut_before_its_first_save_starts_from_the_same_weights(tmp_path: Path) -> None:
    save(ViT(CONFIG), tmp_path / "w.safetensors")

    class Cut(Exception):
        pass

    def cut(event: dict) -> None:
        if event["event"] == "step" and event["step"] == 2:
            raise Cut

    for name in ("cut", "whole"):
        if name == "cut":
            with pytest.raises(Cut):
                run(tmp_path / name, weights=tmp_path / "w.safetensors", watch=cut)
        run(tmp_path / name, weights=tmp_path / "w.safetensors", resume=True)
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")


def test_a_plan_computes_a_few_images_of_a_large_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch of the paper's 4096 images would take more memory than a laptop has."""
    sizes = []

    def count(objective, learner, batch, runtime):
        sizes.append(len(batch))
        return kept_bytes(objective, learner, batch, runtime)

    monkeypatch.setattr("vitkit.jobs.dry_run.kept_bytes", count)
    settings = {name: value for name, value in SETTINGS.items() if name != "micro_batch"}
    plans = []
    for images in (16, 1024):
        ready = prepare("digits", tmp_path / "r", recipe=tiny(batch_size=images, warmup=0), settings=settings)
        plans.append(dry_run(ready))
    assert sizes == [16, 16]
    assert [plan["measured_images"] for plan in plans] == [16, 16]
    assert [plan["batch"]["micro"] for plan in plans] == [16, 1024]
    kept = [plan["memory"]["activations"] for plan in plans]
    assert kept[1] == pytest.approx(64 * kept[0], rel=0.01)


def test_a_dry_run_says_that_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = []
    for free, micro in ((2**10, None), (2**40, None), (None, None), (2**10, "auto")):
        monkeypatch.setattr("vitkit.training.memory.free_bytes", lambda free=free: free)
        settings = {**SETTINGS, "micro_batch": micro}
        notes.append(dry_run(prepare("digits", tmp_path / "r", recipe=tiny(), settings=settings))["notes"])
    assert [len(found) for found in notes] == [1, 0, 0, 0]
    assert "cpu has 0.0. Use --micro-batch auto." in notes[0][0]


def test_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny(ema=0.9, steps=100, warmup=10)
    ready = prepare("digits", tmp_path / "r", recipe=recipe, settings={**SETTINGS, "micro_batch": 4})
    plan = dry_run(ready)
    assert plan["steps"] == 100
    assert plan["batch"] == {"images": 16, "processes": 1, "each": 16, "micro": 4, "accumulated": 4, "even": True}
    assert plan["lr"] == {step: recipe.lr_at(step, 100) for step in (0, 10, 50, 99, 100)}
    count = sum(p.numel() for p in ready.model.parameters())
    assert plan["parameters"] == plan["trained"] == count
    memory = plan["memory"]
    assert (memory["weights"], memory["moments"], memory["average"]) == (4 * count, 8 * count, 4 * count)
    # what a micro-batch keeps grows with it
    twice = dry_run(prepare("digits", tmp_path / "r", recipe=recipe, settings={**SETTINGS, "micro_batch": 8}))
    assert twice["memory"]["activations"] == pytest.approx(2 * plan["memory"]["activations"], rel=0.1)
    assert not (tmp_path / "r").exists()
    code, out, _ = vitkit(
        monkeypatch, capsys, "train", "digits", *TINY, "--out", str(tmp_path / "r"), "--dry-run", "--json"
    )
    assert code == 0
    assert json.loads(out)["data"]["train"] == 1618
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    small = ["--model", "vit-ti/16", "--image-size", "32", "--steps", "9", "--warmup", "1", "--device", "cpu"]
    for command, how in (("train", TINY), ("pretrain", small)):  # a plan needs no folder, and makes none
        assert vitkit(monkeypatch, capsys, command, "digits", *how, "--dry-run")[0] == 0
        code, _, err = vitkit(monkeypatch, capsys, command, "digits", "--dry-run", "--resume")
        assert code == 2
        assert f"got none. To continue a run: vitkit {command} --resume --out RUN" in " ".join(err.split())
    assert not list(Path().iterdir())
    code, out, _ = vitkit(
        monkeypatch,
        capsys,
        "train",
        "digits",
        *TINY,
        "--out",
        str(tmp_path / "r"),
        "--dry-run",
        "--batch-size",
        "4096",
        "--accumulate",
        "64",
        "--warmup",
        "1",
    )
    assert code == 0
    assert "64 micro-batches x 64" in out
    uneven = ["--batch-size", "32", "--micro-batch", "7", "--warmup", "1"]
    code, out, _ = vitkit(
        monkeypatch, capsys, "train", "digits", *TINY, "--out", str(tmp_path / "r"), "--dry-run", *uneven
    )
    assert "32 = 1 processes x 5 micro-batches x at most 7" in out
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_from_outside(tmp_path: Path, number: int) -> None:
    """In a process of its own: a signal saves the run, says how to resume, and decides the exit code."""
    command = [
        sys.executable,
        "-m",
        "vitkit",
        "train",
        "digits",
        *TINY,
        "--out",
        str(tmp_path / "r"),
        "--epochs",
        "100000",
        "--save-every",
        "100000",
        "--evaluate-every",
        "100000",
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "r" / "metrics.jsonl").exists() and child.poll() is None:
            time.sleep(0.05)
        child.send_signal(number)
        out, err = child.communicate()
    finally:
        child.kill()
    assert child.returncode == 128 + number, err
    assert f"vitkit train --out {tmp_path / 'r'} --resume" in out
    assert "Traceback" not in err
    state = RunFolder.open(tmp_path / "r").latest()
    assert state is not None
    assert int(state.stem.rpartition("-")[2]) >= 10
    assert (tmp_path / "r" / "last.safetensors").is_file()


def test_training_needs_nothing_optional(tmp_path: Path) -> None:
    """The Fashion-MNIST benchmark runs on a machine with only torch, numpy, Pillow and safetensors."""
    import gzip
    import struct

    import numpy as np

    rng = np.random.default_rng(0)
    for part, count in (("train", 60), ("t10k", 20)):
        images, labels = rng.integers(0, 255, (count, 28, 28)), np.arange(count) % 10
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))
    code = f"""
import sys
for name in ("typer", "rich", "matplotlib", "sklearn", "accelerate", "huggingface_hub", "jinja2", "tensorboard"):
    sys.modules[name] = None
sys.argv = ["records", "fashion", "--data", {str(tmp_path)!r}, "--out", {str(tmp_path / "r")!r}, "--device", "cpu",
            "--set", "steps=2", "warmup=0", "batch_size=8", "val=0.2", "config.num_hidden_layers=1",
            "mix.mixup=0.1"]
from benchmarks.records import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "test, ema:" in done.stdout
    assert "of 20" in done.stdout
    found = json.loads((tmp_path / "r" / "record.json").read_text())
    assert found["steps"] == [2, 2]
    assert [(row["step"], row["weights"]) for row in found["curve"]] == [
        (step, which) for step in (1, 2) for which in ("last", "ema")
    ]
    assert found["test"]["ema"]["n"] == 20


def test_trackers_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb through accelerate, with a fake wandb that records its calls."""
    from importlib.machinery import ModuleSpec
    from types import ModuleType, SimpleNamespace
    from typing import Any

    heard: dict[str, Any] = {"rows": []}

    class Run:
        config = SimpleNamespace(update=lambda values, **how: heard.update(config=values))

        def log(self, values: dict, step: int | None = None, **how: Any) -> None:
            heard["rows"].append((step, values))

        def finish(self) -> None:
            heard["finished"] = True

    fake: Any = ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None)
    fake.init = lambda **how: heard.update(init=how) or Run()
    fake.config = Run.config
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run(tmp_path / "r", settings={"trackers": ("wandb",)})
    assert heard["init"]["project"] == "vitkit"
    assert heard["init"]["name"] == "r"
    assert heard["finished"]
    assert heard["config"]["lr"] == 1e-3
    assert [step for step, values in heard["rows"] if "train/loss" in values] == [5, 10, 12]
    assert {step for step, values in heard["rows"] if "val/top1" in values} == {4, 8, 12}
