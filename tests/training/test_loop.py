"""The loop: one step by hand, the same result however a run is divided, divergence, what a run leaves behind."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.training.tiny import CONFIG, SETTINGS, bytes_of, extra_of, run, tiny
from vitkit import ViT, load, save
from vitkit.checkpoints import containers
from vitkit.data.batch import Batch
from vitkit.data.mix import Mix
from vitkit.data.train_loader import TrainLoader
from vitkit.errors import Diverged, OutputError, UnreadableFile
from vitkit.evaluation.logits import logits_of
from vitkit.jobs.splits import train_and_val
from vitkit.jobs.train import prepare
from vitkit.model.config import InputSpec
from vitkit.training.build import new_model
from vitkit.training.gradients import step_seed
from vitkit.training.recipe import Recipe
from vitkit.training.run_folder import RunFolder, environment


def weights(folder: Path, which: str = "last") -> dict[str, torch.Tensor]:
    return containers.read(folder / f"{which}.safetensors")[0]


def distance(a: Path, b: Path, which: str = "last") -> float:
    one, two = weights(a, which), weights(b, which)
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def test_what_a_run_leaves_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, outcome = run(tmp_path / "r", tiny(ema=0.9))
    assert outcome.step == outcome.total == 12
    assert not outcome.stopped
    info = json.loads((tmp_path / "r" / "run.json").read_text())
    assert info["data"]["train"] == 1618
    assert info["data"]["val"] == 179
    assert len(info["same"]["data"]) == 64
    assert info["environment"]["packages"]["torch"] == torch.__version__
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")  # the metadata of that build says 2.13.0
    assert environment()["packages"]["torch"] == "2.13.0+cu130"
    rows = folder.metrics()
    assert [r["step"] for r in rows if r["event"] == "train"] == [5, 10, 12]
    assert [(r["step"], r["weights"]) for r in rows if r["event"] == "val"] == [
        (step, which) for step in (4, 8, 12) for which in ("last", "ema")
    ]
    assert all(set(r["time"]) for r in rows)
    assert max(r["top1"] for r in rows if r["event"] == "val") == outcome.best
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == [
        ".lock",
        "best.safetensors",
        "config.toml",
        "ema.safetensors",
        "last.safetensors",
        "metrics.jsonl",
        "run.json",
        "state",
    ]
    states = sorted(p.name for p in (tmp_path / "r" / "state").iterdir())
    assert states == ["step-000000000008.safetensors", "step-000000000012.safetensors"]
    for source in (str(tmp_path / "r"), f"{tmp_path / 'r'}@ema", f"{tmp_path / 'r'}@last"):
        assert load(source).input_spec.class_names == tuple("0123456789")
    assert torch.equal(load(f"{tmp_path / 'r'}@ema").head.weight, weights(tmp_path / "r", "ema")["head.weight"])
    assert torch.equal(load(tmp_path / "r").head.weight, weights(tmp_path / "r", "best")["head.weight"])
    with pytest.raises(UnreadableFile, match="no worst weights; it has: best, last, ema"):
        load(f"{tmp_path / 'r'}@worst")


def test_deterministic_algorithms_are_on_during_the_run_only(tmp_path: Path) -> None:
    """They matter on CUDA; on the CPU, they change no weights."""
    during: dict[bool, set[bool]] = {}
    for wanted in (True, False):
        seen: set[bool] = set()
        during[wanted] = seen

        def watch(event: dict[str, object], seen: set[bool] = seen) -> None:
            if event["event"] in ("train", "val"):
                seen.add(torch.are_deterministic_algorithms_enabled())

        run(tmp_path / f"{wanted}", tiny(steps=2, warmup=0), settings={"deterministic": wanted}, watch=watch)
        assert not torch.are_deterministic_algorithms_enabled()
    assert during == {True: {True}, False: {False}}
    assert distance(tmp_path / "True", tmp_path / "False") == 0
    with pytest.raises(Diverged):
        run(tmp_path / "diverged", tiny(lr=1e30, clip=None, warmup=0), settings={"deterministic": True})
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_average_is_the_formula(tmp_path: Path) -> None:
    """ema.safetensors against weights saved after each step."""
    recipe = tiny(steps=3, ema=0.5, warmup=0)
    for steps in (1, 2, 3):
        run(tmp_path / f"s{steps}", recipe, watch=stop_at(steps))
    run(tmp_path / "whole", recipe)
    start = {n: p.detach() for n, p in first_model(recipe).named_parameters()}
    kept = dict(start)
    for steps in (1, 2, 3):
        now = weights(tmp_path / f"s{steps}")
        kept = {name: 0.5 * kept[name] + 0.5 * now[name] for name in kept}
    ema = weights(tmp_path / "whole", "ema")
    for name in kept:
        torch.testing.assert_close(ema[name], kept[name], rtol=1e-5, atol=1e-6)


def stop_at(step: int):
    """Ask the run to stop, as Ctrl-C does, so that `step` updates are done."""

    def watch(event: dict) -> None:
        if (event["event"] == "step" and event["step"] == step - 1) or (event["event"] == "start" and step == 1):
            os.kill(os.getpid(), signal.SIGINT)

    return watch


def test_ctrl_c_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored where a shell started us in the background
    # The signal comes during step 6; that update is finished and saved.
    _, outcome = run(tmp_path / "cut", watch=stop_at(6))
    assert (outcome.stopped, outcome.step) == (True, 6)
    assert RunFolder.open(tmp_path / "cut").latest().name == "step-000000000006.safetensors"
    _, outcome = run(tmp_path / "cut", resume=True)
    assert (outcome.stopped, outcome.step) == (False, 12)
    run(tmp_path / "whole")
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.2, "drop_path": 0.2, "ema": 0.9},
        {"mix": Mix(mixup=0.8, cutmix=1.0), "label_smoothing": 0.1},
        {"optimizer": "sgd", "weight_decay": 0.0, "layer_decay": 0.7},
        {"loss": "sigmoid", "decay": "linear"},
        {"optimizer": "muon", "layer_decay": 0.7, "ema": 0.9, "mix": Mix(cutmix=1.0), "augment_on": "device"},
    ],
)
def test_resume_is_exact_at_every_step(changes: dict, tmp_path: Path) -> None:
    recipe = tiny(steps=5, warmup=1, **changes)
    run(tmp_path / "whole", recipe)
    run(tmp_path / "cut", recipe, watch=stop_at(1))
    for step in (2, 3, 4, 5):
        run(tmp_path / "cut", recipe, watch=stop_at(step), resume=True, settings={"workers": step % 2})
    assert RunFolder.open(tmp_path / "cut").latest().name == "step-000000000005.safetensors"
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")


def test_resume_with_nothing_there_starts_at_zero_and_a_finished_run_says_so(tmp_path: Path) -> None:
    said: list[dict] = []
    run(tmp_path / "r", resume=True)
    before = bytes_of(tmp_path / "r")
    run(tmp_path / "r", resume=True, watch=said.append)
    assert bytes_of(tmp_path / "r") == before
    assert any("finished" in event.get("text", "") for event in said)


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "r", tiny(steps=1, warmup=0))
    with pytest.raises(OutputError, match=r"holds a run.*--resume"):
        run(tmp_path / "r")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("x")
    with pytest.raises(OutputError, match="is not a run"):
        run(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    run(tmp_path / "empty", tiny(steps=1, warmup=0))


def test_seeds_decide(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tmp_path / name, tiny(steps=2, warmup=0, dropout=0.1), settings={"seed": seed})
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    assert distance(tmp_path / "a", tmp_path / "c") > 1e-3
    found = {step_seed(s, t, r) for s in range(3) for t in range(30) for r in range(3)}
    assert len(found) == 3 * 30 * 3
    assert all(0 <= seed < 2**63 for seed in found)


def first_batches(recipe: Recipe, steps: int) -> list[Batch]:
    """The batches of a run's first steps, and nothing else of the run."""
    train, _, _ = train_and_val("digits", recipe.val, 0)
    spec = dataclasses.replace(InputSpec.of(CONFIG), class_names=train.class_names)
    loader = TrainLoader(
        train, spec, recipe.augment, batch_size=recipe.batch_size, seed=0, mix=recipe.mix, workers=0, device="cpu"
    )
    return list(loader.batches(0, steps))


def first_model(recipe: Recipe) -> ViT:
    return new_model(None, recipe, tuple("0123456789"), 0)


def with_a_head(recipe: Recipe, file: Path) -> ViT:
    """A new model whose head is not zero, so that gradients reach every layer; saved for a run to start from."""
    model = first_model(recipe)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    save(model, file)
    return model


# SGD without clipping: AdamW and clipping both hide a gradient of the wrong scale.
PLAIN = {"optimizer": "sgd", "weight_decay": 0.0, "clip": None, "warmup": 0, "lr": 0.1}


@pytest.mark.parametrize("micro", [1, 4, 8, 16])
def test_one_update_is_the_mean_gradient_of_the_batch(micro: int, tmp_path: Path) -> None:
    recipe = tiny(**PLAIN | {"steps": 1})
    model = with_a_head(recipe, tmp_path / "w.safetensors").train()
    run(tmp_path / "r", recipe, weights=tmp_path / "w.safetensors", settings={"micro_batch": micro})
    (batch,) = first_batches(recipe, 1)
    F.cross_entropy(model(batch.pixels), batch.labels).backward()
    trained = weights(tmp_path / "r")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach() - 0.1 * parameter.grad, rtol=1e-5, atol=2e-6)
        assert parameter.grad.abs().max() > 1e-3, name


@pytest.mark.parametrize("micro", [1, 4, 8])
def test_accumulation_is_the_big_batch(micro: int, tmp_path: Path) -> None:
    recipe = tiny(**PLAIN | {"steps": 4, "mix": Mix(mixup=0.5)})
    with_a_head(recipe, tmp_path / "w.safetensors")
    run(tmp_path / "big", recipe, weights=tmp_path / "w.safetensors")
    run(tmp_path / "small", recipe, weights=tmp_path / "w.safetensors", settings={"micro_batch": micro})
    assert distance(tmp_path / "big", tmp_path / "small") < 5e-6


def test_training_metrics_under_mixing(tmp_path: Path) -> None:
    """Loss and accuracy of each step, from a model that does not change; a mixed image counts as its larger part."""
    recipe = tiny(**PLAIN | {"steps": 6, "lr": 1e-30, "batch_size": 200, "mix": Mix(mixup=1.0)})
    model = with_a_head(recipe, tmp_path / "w.safetensors")
    how = {"weights": tmp_path / "w.safetensors", "settings": {"log_every": 1, "evaluate_every": 6}}
    folder, _ = run(tmp_path / "r", recipe, **how)
    batches = first_batches(recipe, 6)
    shares = [float(batch.weight[0]) for batch in batches]
    assert min(shares) < 0.4
    assert max(shares) > 0.6
    rows, told_apart = [row for row in folder.metrics() if row["event"] == "train"], 0
    for row, batch, share in zip(rows, batches, shares, strict=True):
        logits = model(batch.pixels).detach()
        own, other = (logits.argmax(1) == batch.labels).sum().item(), (logits.argmax(1) == batch.others).sum().item()
        assert row["accuracy"] == (own if share > 0.5 else other) / 200
        told_apart += (own != other) and share < 0.5
        each = [F.cross_entropy(logits, labels).item() for labels in (batch.labels, batch.others)]
        assert row["loss"] == pytest.approx(share * each[0] + (1 - share) * each[1], rel=1e-5)
    assert told_apart


def test_validation_metrics(tmp_path: Path) -> None:
    folder, _ = run(tmp_path / "r", tiny(steps=4, warmup=1))
    row = next(row for row in folder.metrics() if row["event"] == "val")
    _, val, _ = train_and_val("digits", 0.1, 0)
    outputs = logits_of(load(tmp_path / "r"), val)
    logits, labels = torch.as_tensor(outputs.logits), torch.as_tensor(outputs.labels)
    for k in (1, 5):
        found = (logits.topk(k).indices == labels[:, None]).any(1).float().mean().item()
        assert row[f"top{k}"] == pytest.approx(found, abs=1e-6)
    assert row["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert row["images"] == 179


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    run(tmp_path / "r", tiny(freeze=("blocks.0.*", "patch_embedding")))
    start = dict(first_model(tiny()).named_parameters())
    end = weights(tmp_path / "r")
    for name in end:
        frozen = name.startswith(("blocks.0.", "patch_embedding"))
        assert torch.equal(end[name], start[name]) == frozen, name


def test_val_0_keeps_the_last(tmp_path: Path) -> None:
    folder, outcome = run(tmp_path / "r", tiny(val=0.0))
    assert outcome.best is None
    assert folder.info["data"]["train"] == 1797
    assert folder.weights().name == "last.safetensors"
    assert not (tmp_path / "r" / "best.safetensors").exists()


def test_bf16_trains_with_a_loss_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.training import objectives

    plain, types = objectives.LOSSES["softmax"], set()

    def spy(logits, *args):
        types.add(logits.dtype)
        return plain(logits, *args)

    monkeypatch.setitem(objectives.LOSSES, "softmax", spy)
    torch._C._set_mkldnn_enabled(False)  # some virtual CPUs advertise bf16 instructions that they do not have
    try:
        folder, _ = run(tmp_path / "r", tiny(steps=30, lr=3e-3), settings={"precision": "bf16"})
    finally:
        torch._C._set_mkldnn_enabled(True)
    losses = [row["loss"] for row in folder.metrics() if row["event"] == "train"]
    assert losses[-1] < losses[0]
    assert weights(tmp_path / "r")["head.weight"].dtype == torch.float32
    assert types == {torch.float32}


def test_broken_numbers_stop_the_run_and_keep_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.training import objectives

    plain = objectives.LOSSES["softmax"]
    calls = {"n": 0}

    def broken(logits, batch, smoothing, mixed):
        calls["n"] += 1
        return plain(logits, batch, smoothing, mixed) * (float("nan") if calls["n"] == 7 else 1.0)

    monkeypatch.setitem(objectives.LOSSES, "softmax", broken)
    with pytest.raises(Diverged, match=r"loss became nan at step 6.*batch of digit \d+.*state of step 4 is kept.*--lr"):
        run(tmp_path / "r")
    assert all(torch.isfinite(t).all() for t in weights(tmp_path / "r").values())
    monkeypatch.setitem(objectives.LOSSES, "softmax", plain)
    run(tmp_path / "r", resume=True)  # the trouble was not the run's
    run(tmp_path / "whole")
    assert bytes_of(tmp_path / "r") == bytes_of(tmp_path / "whole")


def test_a_gradient_that_overflows_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.training import objectives

    plain = objectives.LOSSES["softmax"]

    class Break(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * float("inf")

    monkeypatch.setitem(objectives.LOSSES, "softmax", lambda *a: Break.apply(plain(*a)))
    with pytest.raises(Diverged, match=r"gradient became (inf|nan) at step 0.*nothing was saved yet"):
        run(tmp_path / "r")


def test_a_high_learning_rate_is_stopped_not_saved(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"learning rate of 9.97e\+29"):
        run(tmp_path / "r", tiny(lr=1e30, warmup=0, clip=None, steps=30))


def test_training_learns(tmp_path: Path) -> None:
    _, outcome = run(tmp_path / "r", tiny(steps=150, lr=5e-3), settings={"evaluate_every": 150})
    assert outcome.best > 0.6


def test_tensorboard_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = run(tmp_path / "r", settings={"trackers": ("tensorboard",)})
    events = EventAccumulator(str(tmp_path / "r" / "tb"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [5, 10, 12]
    logged = [row["top1"] for row in folder.metrics() if row["event"] == "val"]
    assert [e.value for e in events.Scalars("val/top1")] == pytest.approx(logged)


def test_unreadable_images_fail_or_are_skipped_and_named_once(tmp_path: Path) -> None:
    from PIL import Image

    from vitkit.errors import BadImage

    for name in ("a", "b"):
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        for i in range(10):
            Image.new("L", (8, 8), 20 * i).save(tmp_path / "data" / "train" / name / f"{i}.png")
    bad = tmp_path / "data" / "train" / "a" / "3.png"
    bad.write_bytes(b"\x89PNG nothing")
    data, recipe = str(tmp_path / "data"), tiny(steps=6, batch_size=8, warmup=0, val=0.0)
    with pytest.raises(BadImage, match=r"3\.png") as stopped:
        run(tmp_path / "fail", recipe, data=data)
    said, resume = str(stopped.value), f"vitkit train --out {tmp_path / 'fail'} --resume --bad-images skip"
    assert "Repair or remove" not in said  # a resumed run would refuse the data without the image
    assert said.endswith(f" Leave it out: {resume}; or repair it and start again with a new --out.")
    run(tmp_path / "fail", recipe, data=data, settings={"bad_images": "skip"}, resume=True)
    (tmp_path / "whole.png").write_bytes(bad.read_bytes())
    Image.new("L", (8, 8), 60).save(bad)
    run(tmp_path / "repaired", recipe, data=data)
    bad.write_bytes((tmp_path / "whole.png").read_bytes())
    run(tmp_path / "whole", recipe, data=data, settings={"bad_images": "skip", "save_every": 1})
    rows = [r for r in RunFolder.open(tmp_path / "whole").metrics() if r["event"] == "skipped"]
    assert len(rows) == 1
    assert rows[0]["name"].endswith("3.png")
    run(tmp_path / "cut", recipe, data=data, settings={"bad_images": "skip", "save_every": 1}, watch=stop_at(5))
    run(tmp_path / "cut", recipe, data=data, settings={"bad_images": "skip", "save_every": 1}, resume=True)
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")


def test_settings_of_the_machine_may_change(tmp_path: Path) -> None:
    """A run may be resumed with other workers and micro-batches."""
    run(tmp_path / "r", watch=stop_at(3))
    _, outcome = run(tmp_path / "r", resume=True, settings={**SETTINGS, "micro_batch": 8, "workers": 1})
    assert outcome.step == 12


@pytest.mark.parametrize("changes", [{}, {"dropout": 0.2}, {"drop_path": 0.2}])
def test_only_without_dropout_does_the_micro_batch_not_matter(changes: dict, tmp_path: Path) -> None:
    recipe = tiny(**PLAIN | {"steps": 4} | changes)
    with_a_head(recipe, tmp_path / "w.safetensors")
    run(tmp_path / "big", recipe, weights=tmp_path / "w.safetensors")
    run(tmp_path / "cut", recipe, weights=tmp_path / "w.safetensors", watch=stop_at(1))
    assert prepare(None, tmp_path / "cut", resume=True).notes == ()
    (*notes,) = prepare(None, tmp_path / "cut", resume=True, settings={"micro_batch": 8}).notes
    assert ["16 to 8" in note and "dropout" in note for note in notes] == ([True] if changes else [])
    run(tmp_path / "cut", recipe, weights=tmp_path / "w.safetensors", resume=True, settings={"micro_batch": 8})
    assert (distance(tmp_path / "big", tmp_path / "cut") > 1e-3) == bool(changes)


def test_validations_are_once_an_epoch_but_not_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.training import calendar

    for epochs, expected in ((2, [9, 17]), (0.5, [5])):
        folder, _ = run(
            tmp_path / f"{epochs}",
            tiny(steps=None, epochs=epochs, warmup=0, batch_size=200),
            settings={"evaluate_every": None},
        )
        assert [row["step"] for row in folder.metrics() if row["event"] == "val"] == expected
    monkeypatch.setattr(calendar, "MOST_VALIDATIONS", 2)
    folder, _ = run(
        tmp_path / "many", tiny(steps=None, epochs=3, warmup=0, batch_size=200), settings={"evaluate_every": None}
    )
    assert [row["step"] for row in folder.metrics() if row["event"] == "val"] == [17, 25]


def scripted(monkeypatch: pytest.MonkeyPatch, scores: dict[int, tuple[int, float]]) -> None:
    """Make the validation after each step measure what `scores` says: {step: (correct answers of 4, loss)}."""
    from vitkit.training import objectives

    steps = iter(sorted(scores))

    def answers(logits: object, labels: object) -> tuple[None, np.ndarray, None, np.ndarray]:
        correct, loss = scores[next(steps)]
        return None, np.where(np.arange(4) < correct, 0, 9), None, np.full(4, -loss)

    monkeypatch.setattr(objectives, "answers", answers)


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ({4: (2, 1.0), 8: (3, 9.0), 12: (1, 0.5)}, 8),  # the higher accuracy
        ({4: (3, 1.0), 8: (3, 0.5), 12: (3, 0.7)}, 8),  # then the lower loss
        ({4: (3, 0.5), 8: (3, 0.5), 12: (2, 0.1)}, 8),  # then the later step
    ],
)
def test_best_by_accuracy_then_loss_then_step(
    scores: dict[int, tuple[int, float]], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, scores)
    _, outcome = run(tmp_path / "r")
    assert extra_of(tmp_path / "r" / "best.safetensors")["step"] == str(best)
    assert outcome.best == scores[best][0] / 4


def test_best_is_written_when_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves that are rarer than validations do not lose it, and neither does a run that is cut after it."""
    scores = {4: (1, 1.0), 8: (3, 1.0), 12: (2, 1.0)}
    scripted(monkeypatch, scores)
    run(tmp_path / "often")
    for name in ("rare", "cut"):
        scripted(monkeypatch, scores)
        run(tmp_path / name, settings={"save_every": 100}, watch=stop_at(10) if name == "cut" else None)
        assert extra_of(tmp_path / name / "best.safetensors")["step"] == "8"
        assert distance(tmp_path / name, tmp_path / "often", "best") == 0
    scripted(monkeypatch, {12: scores[12]})
    run(tmp_path / "cut", resume=True, settings={"save_every": 100})
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "rare") == bytes_of(tmp_path / "often")


def test_best_is_what_the_metrics_say(tmp_path: Path) -> None:
    folder, outcome = run(tmp_path / "r", tiny(steps=30, lr=5e-3, ema=0.8), settings={"save_every": 100})
    rows = [row for row in folder.metrics() if row["event"] == "val"]
    best = max(rows, key=lambda row: (row["top1"], -row["loss"], row["step"]))
    found = extra_of(tmp_path / "r" / "best.safetensors")
    assert (found["step"], float(found["top1"]), outcome.best) == (str(best["step"]), best["top1"], best["top1"])
    _, val, _ = train_and_val("digits", 0.1, 0)
    outputs = logits_of(load(tmp_path / "r"), val)
    assert (outputs.logits.argmax(1) == outputs.labels).mean() == pytest.approx(best["top1"])


def test_a_stop_request_during_the_last_step_comes_too_late(tmp_path: Path) -> None:
    _, outcome = run(tmp_path / "r", watch=stop_at(12))
    assert (outcome.step, outcome.stopped, outcome.interrupted) == (12, False, True)
    assert outcome.best is not None
