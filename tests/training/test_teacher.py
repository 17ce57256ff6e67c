"""Distillation: the loss by hand, what the teacher sees, exact resuming, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_loop import PLAIN, distance, first_batches, stop_at, weights, with_a_head
from tests.training.tiny import CONFIG, bytes_of, forked, run, tiny, vitkit
from vitkit import InputSpec, save
from vitkit.data.mix import Mix
from vitkit.errors import ConfigError
from vitkit.model.create import build
from vitkit.model.vit import ViT
from vitkit.training.run_folder import RunFolder
from vitkit.training.teacher import Teacher

DIGITS = tuple("0123456789")


def teacher_of(file: Path, seed: int = 1, names: tuple[str, ...] = DIGITS, **changes: Any) -> ViT:
    """A teacher with random answers, in a file."""
    torch.manual_seed(seed)
    config = replace(CONFIG, num_hidden_layers=1, num_classes=len(names) or 10, **changes)
    spec = replace(InputSpec.of(config), class_names=names, mean=(0.25,), std=(0.125,))
    model = build(config, spec)
    torch.nn.init.normal_(model.head.weight)
    save(model, file)
    return model.eval()


def distil(file: Path, **changes: Any) -> Any:
    return tiny(objective="distil", teacher=str(file), **changes)


@pytest.mark.parametrize("changes", [{}, {"mix": Mix(mixup=0.5), "label_smoothing": 0.1}])
def test_one_update_by_hand(changes: dict, tmp_path: Path) -> None:
    """(1 - s) CE + s T^2 KL(teacher || student), on the student's view with the teacher's mean and deviation."""
    teacher = teacher_of(tmp_path / "t.safetensors")
    how = {**PLAIN, "steps": 1, **changes}
    model = with_a_head(tiny(**how), tmp_path / "w.safetensors").train()
    recipe = distil(tmp_path / "t.safetensors", **how, teacher_share=0.7, teacher_temperature=3.0)
    run(tmp_path / "r", recipe, weights=tmp_path / "w.safetensors")
    (batch,) = first_batches(tiny(**how), 1)
    logits = model(batch.pixels)
    spec = model.input_spec
    zero_to_one = batch.pixels * spec.std[0] + spec.mean[0]
    p = (teacher((zero_to_one - 0.25) / 0.125) / 3).softmax(1).detach()
    q = (logits / 3).softmax(1)
    soft = 9 * (p * (p.log() - q.log())).sum(1)
    target = batch.targets(10, changes.get("label_smoothing", 0.0))
    hard = -(target * logits.log_softmax(1)).sum(1)
    (0.3 * hard + 0.7 * soft).mean().backward()
    trained = weights(tmp_path / "r")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach() - 0.1 * parameter.grad, rtol=1e-4, atol=5e-6)
    assert set(trained) == {name for name, _ in model.named_parameters()}  # nothing of the teacher is saved


def test_what_the_teacher_sees(tmp_path: Path) -> None:
    teacher_of(tmp_path / "t.safetensors", image_size=16)
    taught = Teacher(str(tmp_path / "t.safetensors"), DIGITS)
    student = build(CONFIG)
    taught.follow(student)
    spec = student.input_spec
    grey = torch.full((2, 1, 8, 8), (0.5 - spec.mean[0]) / spec.std[0])
    torch.testing.assert_close(taught.view(grey), torch.full((2, 1, 16, 16), (0.5 - 0.25) / 0.125))
    assert taught(grey).shape == (2, 10)
    assert not any(p.requires_grad for p in taught.model.parameters())


def test_the_same_preprocessing_changes_nothing(tmp_path: Path) -> None:
    teacher_of(tmp_path / "t.safetensors")
    taught = Teacher(str(tmp_path / "t.safetensors"), DIGITS)
    student = build(CONFIG, taught.model.input_spec)
    taught.follow(student)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(taught.view(x), x)


def test_classes_in_another_order(tmp_path: Path) -> None:
    teacher = teacher_of(tmp_path / "t.safetensors", names=DIGITS[::-1])
    taught = Teacher(str(tmp_path / "t.safetensors"), DIGITS)
    taught.follow(build(CONFIG, teacher.input_spec))
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(taught(x), teacher(x).flip(1))


def test_a_share_of_one_ends_at_the_teacher(tmp_path: Path) -> None:
    """Nothing but the teacher's answers: the student comes to agree with them, and not with the labels."""
    teacher_of(tmp_path / "t.safetensors")
    file = tmp_path / "t.safetensors"
    how = {"steps": 250, "warmup": 0, "lr": 3e-3, "weight_decay": 0.0, "val": 0.0}
    run(tmp_path / "r", distil(file, **how, teacher_share=1.0), settings={"log_every": 50})
    rows = [row["loss"] for row in RunFolder.open(tmp_path / "r").metrics() if row["event"] == "train"]
    assert rows[-1] < 0.5 * rows[0]
    from vitkit.checkpoints import load

    student, taught = load(tmp_path / "r").eval(), Teacher(str(file), DIGITS)
    taught.follow(student)
    (batch,) = first_batches(tiny(), 1)
    with torch.no_grad():
        agreed = (student(batch.pixels).argmax(1) == taught(batch.pixels).argmax(1)).float().mean()
    assert agreed > 0.6


def test_resume_is_exact_and_another_teacher_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"
    teacher_of(file)
    recipe = distil(file, steps=5, warmup=1, ema=0.9)
    run(tmp_path / "whole", recipe)
    run(tmp_path / "cut", recipe, watch=stop_at(2))
    run(tmp_path / "cut", recipe, resume=True)
    assert bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")
    run(tmp_path / "other", recipe, watch=stop_at(2))
    teacher_of(file, seed=2)
    with pytest.raises(ConfigError, match="was started with teacher"):
        run(tmp_path / "other", recipe, resume=True)


def test_two_processes_end_where_one_does(tmp_path: Path) -> None:
    teacher_of(tmp_path / "t.safetensors")
    recipe = distil(tmp_path / "t.safetensors", steps=5, warmup=0)
    run(tmp_path / "one", recipe)
    assert forked(lambda rank: run(tmp_path / "two", recipe), ranks=2) == [0, 0]
    assert distance(tmp_path / "one", tmp_path / "two") < 1e-4


def test_what_cannot_teach(tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"
    teacher_of(file, names=("a", "b", "c"))
    with pytest.raises(ConfigError, match=r"must know the 10 classes of the data; .* has 3\. Fine-tune it"):
        run(tmp_path / "r", distil(file))
    teacher_of(file, names=(*DIGITS[:-1], "ten"))
    with pytest.raises(ConfigError, match="does not have '9' among its 10"):
        run(tmp_path / "r", distil(file))
    with pytest.raises(ConfigError, match="The objective distil needs a teacher"):
        tiny(objective="distil")
    with pytest.raises(ConfigError, match="no other has one; got objective='masked-patch'"):
        tiny(objective="masked-patch", teacher="x")
    with pytest.raises(ConfigError, match="Use --loss softmax"):
        distil(file, loss="sigmoid")
    with pytest.raises(ConfigError, match="teacher_share is for a run with a teacher"):
        tiny().change(teacher_share=0.3)
    assert (distil(file).teacher_share, distil(file).teacher_temperature) == (0.9, 4.0)
    with pytest.raises(ConfigError, match="teacher_temperature must be a finite number over 0"):
        distil(file, teacher_temperature=0.0)
    assert not (tmp_path / "r").exists()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    teacher_of(tmp_path / "t.safetensors")
    monkeypatch.chdir(tmp_path)
    how = ["--device", "cpu", "--workers", "0", "--tracker", "none", "--no-report"]
    options = ["digits", "--recipe", "digits", "--steps", "2", "--warmup", "0", "--teacher", "t.safetensors"]
    code, _, err = vitkit(monkeypatch, capsys, "train", *options, *how, "--out", "a")
    assert code == 0, err
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")  # the file names the teacher by its absolute path
    code, _, err = vitkit(monkeypatch, capsys, "train", "--config", "../a/config.toml", "--no-report", "--out", "b")
    assert code == 0, err
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "sub/b")
