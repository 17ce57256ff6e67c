"""Real weights and real photos: the predictions are timm's own, before and after a tour through the dialects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import tiny
from tests.peers import peer
from vitkit import ViT
from vitkit.checkpoints import convert, inspect, load
from vitkit.checkpoints.verify import BAR

TI16 = "vit_tiny_patch16_224.augreg_in21k_ft_in1k.timm.pth"
TOUR = {"native": "a.safetensors", "google": "b.npz", "huggingface": "hf", "torchvision": "d.pth", "timm": "e.pth"}


@pytest.fixture(scope="module")
def ti16(shared_data: Path) -> Path:
    return shared_data / "weights" / TI16


@pytest.fixture(scope="module")
def theirs(ti16: Path) -> Any:
    model = peer("timm").create_model("vit_tiny_patch16_224", checkpoint_path=str(ti16))
    return model.eval()


@pytest.fixture(scope="module")
def tour(ti16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, here = tmp_path_factory.mktemp("tour"), ti16
    for dialect, name in TOUR.items():
        convert(here, folder / name, dialect)
        here = folder / name
    return folder


def photos(folder: Path, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` validation photos as timm's own transform prepares them, and their classes."""
    timm, image = peer("timm"), peer("PIL.Image")
    transform = timm.data.create_transform(
        (3, 224, 224), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic", crop_pct=0.9
    )
    files = sorted((folder / "imagenet_val_500").glob("*/*.jpg"))
    files = files[:: len(files) // count][:count]
    return (
        torch.stack([transform(image.open(file).convert("RGB")) for file in files]),
        torch.tensor([int(file.parent.name) for file in files]),
    )


@torch.inference_mode()
def logits(model: Any, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.split(50)])


def agree(model: ViT, expected: Tensor, x: Tensor) -> Tensor:
    ours = logits(model, x)
    assert torch.equal(ours.argmax(1), expected.argmax(1))
    assert tiny.difference(ours, expected) <= BAR
    return ours


def test_fifty_photos(ti16: Path, theirs: Any, tour: Path, shared_data: Path) -> None:
    x, _ = photos(shared_data, 50)
    agree(load(ti16), logits(theirs, x), x)
    assert torch.equal(logits(load(tour / "e.pth"), x[:10]), logits(load(ti16), x[:10]))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_photos(ti16: Path, theirs: Any, tour: Path, shared_data: Path) -> None:
    x, y = photos(shared_data, 500)
    expected = logits(theirs, x)
    for path in (ti16, tour / "e.pth"):
        best = agree(load(path), expected, x).topk(5).indices
        assert (best[:, 0] == y).float().mean().item() == pytest.approx(0.742)
        assert (best == y[:, None]).any(1).float().mean().item() == pytest.approx(0.936)


def test_the_tour_loses_nothing(ti16: Path, tour: Path) -> None:
    first = load(ti16)
    for name in TOUR.values():
        found = load(tour / name)
        assert tiny.same_tensors(found, first), name
        assert (found.config, found.input_spec) == (first.config, first.input_spec), name


def test_without_sidecars_the_tensors_are_still_equal(ti16: Path, tmp_path: Path) -> None:
    first = here = ti16
    for dialect, name in TOUR.items():
        convert(here, tmp_path / name, dialect)
        here = tmp_path / name
        for beside in (*tmp_path.glob("*.vitkit.json"), *tmp_path.glob("hf/*.json")):
            beside.unlink()
    assert tiny.same_tensors(load(here), load(first))


def test_the_google_file_in_timms_own_reader(theirs: Any, tour: Path, shared_data: Path) -> None:
    model = peer("timm").create_model("vit_tiny_patch16_224")
    model.load_pretrained(str(tour / "b.npz"))
    for (name, mine), (_, expected) in zip(model.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert torch.equal(mine, expected), name


def test_transformers_reads_the_folder(theirs: Any, tour: Path, shared_data: Path) -> None:
    model = peer("transformers").AutoModelForImageClassification.from_pretrained(tour / "hf").eval()
    x, _ = photos(shared_data, 10)
    with torch.inference_mode():
        assert tiny.difference(theirs(x), model(x).logits) <= BAR


def test_torchvision_reads_the_file(theirs: Any, tour: Path, shared_data: Path) -> None:
    library = peer("torchvision")
    model = library.models.VisionTransformer(
        image_size=224, patch_size=16, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768
    ).eval()
    model.load_state_dict(torch.load(tour / "d.pth", weights_only=True))
    x, _ = photos(shared_data, 10)
    with torch.inference_mode():
        assert tiny.difference(theirs(x), model(x)) <= BAR


def test_inspect(ti16: Path) -> None:
    found = inspect(ti16)
    assert (found["dialect"], found["variant"], found["tensors"]) == ("timm", "vit-ti/16", 152)
    assert found["parameters"] == 5_717_416
    assert found["classes"] == 1000
    assert (found["input_spec"]["mean"], found["input_spec"]["crop"]) == ([0.5, 0.5, 0.5], 0.9)
    assert found["sha256"].startswith("4615f31e")
    json.dumps(found)


def test_hugging_face_spelling(shared_data: Path) -> None:
    model = load(shared_data / "weights" / "vit_tiny_patch16_224.hf_keys.tinyimagenet200_finetune.pth")
    assert (model.config.num_classes, model.config.num_attention_heads) == (200, 3)
    assert model.config.layer_norm_eps == 1e-12
