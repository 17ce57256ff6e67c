"""The plan for many GPUs: counts by hand, limits where they belong, and the tables of docs/scale.md."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scale import JOBS, figures, table
from tests.training.tiny import vitkit
from vitkit.model.config import variant
from vitkit.model.count import parameters
from vitkit.training.plan import BANDWIDTH, FIGURES, UPDATE, Job, Machine, images_per_second, memory, plan

B16 = variant("vit-b/16")
JOB = Job(config=B16, batch=4096, steps=1000, images=1_000_000, micro=256)


def test_the_measured_models_get_their_measured_speed() -> None:
    assert images_per_second(JOB) == pytest.approx(FIGURES["fused b/16"].value)
    assert images_per_second(replace(JOB, config=variant("vit-l/16"))) == pytest.approx(FIGURES["fused l/16"].value)
    plain = images_per_second(replace(JOB, fused=False))
    assert plain == pytest.approx(FIGURES["plain b/16"].value)
    assert images_per_second(replace(JOB, checkpointing=True)) == pytest.approx(0.75 * plain)


def test_two_gpus_by_hand() -> None:
    P, machine = parameters(B16), Machine(images_per_second=1000.0, decode=100.0, image_bytes=1e5, link=1e9)
    found = plan(JOB, 2, machine)
    assert found["sent_per_step"] == P * 4  # half of the gradients, twice, 4 bytes each
    assert found["seconds_per_step"] == pytest.approx(2.048 + UPDATE * P / BANDWIDTH)  # hidden: 0.35 s of 1.37 s
    assert found["waiting"] == 0
    assert found["link_needed"] == pytest.approx(4 * P / (2 / 3 * 2.048))
    assert (found["cores"], found["cores_per_gpu"]) == (20, 10)
    assert found["data"] == 1e11
    assert found["state"] == 12 * P


def test_a_slow_link_is_waited_for() -> None:
    machine = Machine(images_per_second=1000.0, fixed=0.0, link=1e8)
    found = plan(JOB, 4, machine)
    sent = parameters(B16) * 8 * 3 / 4 / 1e8
    assert found["seconds_per_step"] == pytest.approx(1.024 + sent - 2 / 3 * 1.024)
    assert found["waiting"] == pytest.approx((sent - 2 / 3 * 1.024) / found["seconds_per_step"])
    assert (found["limit"], found["most_gpus"]) == ("link", 1)
    assert plan(JOB, 4, replace(machine, link=1e15))["limit"] == "images"
    assert plan(JOB, 4, replace(machine, link=1e15))["most_gpus"] == 4096 // 32


def test_sharding_divides_what_adam_holds_and_sends_for_every_micro_batch() -> None:
    P, shard = parameters(B16), replace(JOB, shard=True, ema=True)
    assert memory(replace(JOB, ema=True), 8)["moments"] == 8 * P
    for name, size in {"weights": 4, "gradients": 4, "moments": 8, "average": 4}.items():
        assert memory(shard, 8)[name] == size * P / 8
    assert plan(shard, 8)["sent_per_step"] == 7 / 8 * 8 * P * 2  # 512 images are two micro-batches


def test_the_documented_tables_are_the_plan() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    assert figures() in page
    assert table() in page
    page = " ".join(page.split())
    b, G = plan(JOBS["ViT-B/16, 7 epochs"][0], 8), plan(JOBS["ViT-G/14, 14 epochs, --shard"][0], 8)
    assert f"what {plan(JOBS['ViT-B/16, 7 epochs'][0], 1)['cores']} cores decode" in page
    assert f"need {b['cores']} cores" in page
    assert f"about {b['most_gpus']} GPUs" in page
    assert f"waits {plan(JOBS['ViT-G/14, 14 epochs, --shard'][0], 512)['waiting']:.0%}" in page
    assert f"scales to {G['most_gpus']} GPUs" in page
    assert f"A save writes {G['state'] / 1e9:.0f} GB" in page
    assert f"images are {b['data'] / 1e12:.0f} TB" in page


def test_the_command_prints_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("train", "digits", "--recipe", "digits", "--device", "cpu", "--out", str(tmp_path / "r"))
    code, out, _ = vitkit(monkeypatch, capsys, *run, "--dry-run", "--gpus", "8")
    assert code == 0
    for text in ("8 GPUs", "H200", "memory of each", "cores", "scales to about"):
        assert text in " ".join(out.split())
    code, out, _ = vitkit(monkeypatch, capsys, *run, "--dry-run", "--gpus", "8", "--json")
    found = json.loads(out)["scale"]
    assert (found["gpus"], found["measured_here"]) == (8, False)
    assert found["data"] == json.loads(out)["data"]["train"] * 64  # 8 x 8 pixels
    assert not (tmp_path / "r").exists()
    code, _, err = vitkit(monkeypatch, capsys, *run, "--gpus", "8")
    assert code == 2
    assert "--gpus must be a positive whole number, and needs --dry-run; got 8." in " ".join(err.split())
