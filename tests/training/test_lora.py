"""Low-rank adapters: an exact start, what is trained, resuming, merging, and the small file over a backbone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import vitkit
from tests.training.test_loop import stop_at, weights
from tests.training.tiny import CONFIG, SETTINGS, bytes_of, run, tiny
from tests.training.tiny import vitkit as command
from vitkit.checkpoints import containers
from vitkit.data.augment import Augment
from vitkit.errors import CheckpointError, ConfigError, TensorMismatch, UnreadableFile
from vitkit.jobs.train import prepare
from vitkit.training.lora import LAYERS, adapt, adapters, merge
from vitkit.training.optim import groups

LORA = tiny(config=None, lora=3, lr=1e-2, drop_path=0.2, ema=0.9, layer_decay=0.5, augment=Augment(scale=(0.9, 1.0)))


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return vitkit.save(vitkit.ViT(CONFIG), tmp_path / "backbone.safetensors")


def pixels() -> torch.Tensor:
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_an_adapted_model_starts_as_its_backbone_exactly(backbone: Path) -> None:
    model, plain = vitkit.load(backbone), vitkit.load(backbone)
    adapt(model, 4, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(model.hidden_states(pixels()), plain.hidden_states(pixels())))
    assert torch.equal(model(pixels()), plain(pixels()))
    assert len(adapters(model)) == 2 * 2 * len(LAYERS)
    merge(model)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


def test_the_product_is_added_to_the_weight(backbone: Path) -> None:
    model, plain = vitkit.load(backbone), vitkit.load(backbone)
    adapt(model, 4, seed=0)
    for name, value in model.named_parameters():
        if name.endswith(".B"):
            torch.nn.init.normal_(value)
    found = adapters(model)
    for name, W in plain.state_dict().items():
        if f"{name}.A" in found:
            W += found[f"{name}.B"] @ found[f"{name}.A"]  # in place: `plain` becomes the merged model
    torch.testing.assert_close(model(pixels()), plain(pixels()), rtol=1e-5, atol=1e-5)


def test_only_adapters_and_head_are_trained_and_they_decay(tmp_path: Path, backbone: Path) -> None:
    ready = prepare("digits", tmp_path / "r", recipe=LORA, weights=backbone, settings=SETTINGS)
    trained = {name for name, p in ready.model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"A", "B", "weight", "bias"}
    assert {name for name in trained if not name.endswith((".A", ".B"))} == {"head.weight", "head.bias"}
    assert ready.info["trained"] == sum(
        p.numel() for name, p in ready.model.named_parameters() if name.startswith("head") or name[-2:] in (".A", ".B")
    )
    assert ready.info["parameters"] == sum(p.numel() for p in vitkit.load(backbone).parameters())
    decays = {id(p): group["weight_decay"] for group in groups(ready.model, LORA) for p in group["params"]}
    scales = {id(p): group["scale"] for group in groups(ready.model, LORA) for p in group["params"]}
    for name, p in ready.model.named_parameters():
        if name in trained:
            assert decays[id(p)] == (0.0 if name == "head.bias" else 0.1), name
            assert scales[id(p)] == {"blocks.0": 0.25, "blocks.1": 0.5}.get(name[:8], 1.0), name


def test_frozen_layers_get_no_adapter(tmp_path: Path, backbone: Path) -> None:
    changes: dict[str, Any] = {"freeze": ("blocks.0.*",)}
    ready = prepare("digits", tmp_path / "r", recipe=LORA, weights=backbone, settings=SETTINGS, changes=changes)
    assert {name[:8] for name in adapters(ready.model)} == {"blocks.1"}


def test_a_killed_run_resumes_to_the_bit_and_is_merged(tmp_path: Path, backbone: Path) -> None:
    run(tmp_path / "whole", LORA, weights=backbone)
    run(tmp_path / "cut", LORA, weights=backbone, watch=stop_at(5))
    moved = backbone.rename(tmp_path / "moved.safetensors")  # a resumed run does not need it
    run(tmp_path / "cut", LORA, weights=backbone, resume=True)
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "cut")
    before = containers.read(moved)[0]
    for which in ("best", "last", "ema"):
        after = weights(tmp_path / "whole", which)
        assert set(after) == set(before)
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        assert changed == {f"blocks.{i}.{name}.weight" for i in range(2) for name in LAYERS} | {
            "head.weight",
            "head.bias",
        }
        difference = after["blocks.0.msa.qkv.weight"] - before["blocks.0.msa.qkv.weight"]
        assert int(torch.linalg.matrix_rank(difference.double(), rtol=1e-4)) == 3


def test_the_small_file_is_the_run_over_its_backbone(
    tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "r", LORA, weights=backbone)
    lora = tmp_path / "r" / "lora.safetensors"
    assert lora.stat().st_size < 0.5 * (tmp_path / "r" / "best.safetensors").stat().st_size
    merged, whole = vitkit.load(lora), vitkit.load(tmp_path / "r")
    assert merged.config == whole.config
    assert merged.input_spec == whole.input_spec
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in merged.state_dict().items())
    # the same backbone in another place and another dialect
    vitkit.save(vitkit.load(backbone), tmp_path / "timm.pth", "timm")
    backbone.unlink()
    with pytest.raises(
        UnreadableFile, match=r"adapters for .*backbone.safetensors, which could not be read: .*--backb"
    ):
        vitkit.load(lora)
    again = vitkit.load(lora, backbone=tmp_path / "timm.pth")
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in again.state_dict().items())
    code, out, _ = command(
        monkeypatch, capsys, "inspect", str(lora), "--backbone", str(tmp_path / "timm.pth"), "--json"
    )
    assert code == 0
    assert json.loads(out)["classes"] == 10


def test_another_backbone_is_refused(tmp_path: Path, backbone: Path) -> None:
    run(tmp_path / "r", LORA, weights=backbone)
    model = vitkit.load(backbone)
    with torch.no_grad():
        model.norm.bias[0] += 1e-3
    other = vitkit.save(model, tmp_path / "other.safetensors")
    with pytest.raises(TensorMismatch, match=r"other.safetensors has other weights. Give the backbone"):
        vitkit.load(tmp_path / "r" / "lora.safetensors", backbone=other)
    with pytest.raises(ConfigError, match=r"backbone= .* is for LoRA files; .* is not one"):
        vitkit.load(other, backbone=backbone)
    damaged = tmp_path / "damaged.safetensors"
    tensors, metadata = containers.read(tmp_path / "r" / "lora.safetensors")
    containers.write(tensors | {"blocks.0.msa.qkv.weight.A": torch.zeros(3, 7)}, damaged, metadata)
    with pytest.raises(CheckpointError, match=r"an adapter for 'blocks.0.msa.qkv.weight' that does not fit"):
        vitkit.load(damaged)
    containers.write(tensors, damaged, {next(iter(metadata)): "{}"})
    with pytest.raises(UnreadableFile, match="a LoRA file that this version of vitkit cannot read"):
        vitkit.load(damaged)


def test_another_image_size_and_a_model_of_ones_own(tmp_path: Path, backbone: Path) -> None:
    run(tmp_path / "r", LORA, weights=backbone, image_size=16)
    merged, whole = vitkit.load(tmp_path / "r" / "lora.safetensors"), vitkit.load(tmp_path / "r")
    assert merged.config.image_size == 16
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in merged.state_dict().items())
    model = vitkit.load(backbone)
    vitkit.train("digits", tmp_path / "own", model=model, recipe=LORA, report=False, progress=False, **SETTINGS)
    assert set(model.state_dict()) == set(vitkit.load(backbone).state_dict())
    last = vitkit.load(f"{tmp_path / 'own'}@last").state_dict()
    assert all(torch.equal(value, last[name]) for name, value in model.state_dict().items())
    assert not (tmp_path / "own" / "lora.safetensors").exists()  # its backbone has no name


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--from", "backbone.safetensors", "--lora", "32"], "--lora must be below 32"),
        (["--from", "backbone.safetensors", "--lora", "0"], "lora must be"),
        (["--model", "vit-ti/16", "--lora", "4"], "--lora is for pre-trained weights; got a new model"),
        (["--model", "vit-ti/16", "--from-probe"], "--from-probe is for pre-trained weights; got a new model"),
        (["--from", "resnet.safetensors", "--lora", "4"], "ResNet"),
    ],
)
def test_what_does_not_fit_is_refused(
    args: list[str],
    words: str,
    tmp_path: Path,
    backbone: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if "resnet.safetensors" in args:
        vitkit.save(vitkit.create("r50x1", num_classes=10), "resnet.safetensors")
    code, _, err = command(monkeypatch, capsys, "train", "digits", "--out", "r", "--device", "cpu", *args)
    assert code == 2
    assert words in err
    assert not (tmp_path / "r").exists()


def test_the_fused_training_forward_reaches_the_adapters(backbone: Path) -> None:
    from vitkit.speed.training import fused_forward

    found = []
    for forward in (lambda model: model(pixels()), lambda model: fused_forward(model, pixels())):
        model = vitkit.load(backbone)
        adapt(model, 4, seed=0)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if name.endswith(".B"):
                    value.copy_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))))
        forward(model).square().sum().backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-4)
