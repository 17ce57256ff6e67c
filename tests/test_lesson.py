"""The lesson, all the way in Python: typed from docs/lesson.md, with vitkit.paper's classes, and with the twelve."""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vitkit
from tests.peers import peer
from tests.test_docs import ROOT, blocks
from vitkit import huggingface, paper

SMALL = {
    "img_size": 8,
    "in_channels": 1,
    "patch_size": 2,
    "num_transformer_layers": 2,
    "embedding_dim": 32,
    "mlp_size": 64,
    "num_heads": 4,
    "num_classes": 10,
}


def typed() -> dict[str, Any]:
    """The classes of the page, from nothing but its text."""
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "lesson.md"):
        if block.language == "python" and "\nclass " in f"\n{block.code}":
            exec(compile(block.code, f"lesson.md, line {block.line}", "exec"), names)
    return names


def twelve() -> nn.Module:
    return huggingface.ViTForImageClassification(
        huggingface.ViTConfig(
            image_size=8,
            num_channels=1,
            patch_size=2,
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_labels=10,
        )
    )


MODELS = {"typed": lambda: typed()["ViT"](**SMALL), "paper": lambda: paper.ViT(**SMALL), "twelve": twelve}


def test_the_page_uses_torch_alone_until_the_model_is_built() -> None:
    names = typed()
    assert "vitkit" not in names
    five = ["PatchEmbedding", "MultiheadSelfAttentionBlock", "MLPBlock", "TransformerEncoderBlock", "ViT"]
    assert [name for name, value in names.items() if isinstance(value, type)] == five


@torch.no_grad()
def test_what_is_typed_is_vitkits_paper() -> None:
    """The same names and shapes of parameters, and the same numbers."""
    mine, ours = typed()["ViT"](**SMALL).eval(), paper.ViT(**SMALL).eval()
    ours.load_state_dict(mine.state_dict())
    x = torch.randn(2, 1, 8, 8)
    assert torch.allclose(mine(x), ours(x), atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_all_the_way(kind: str, tmp_path: Path) -> None:
    timm = peer("timm")
    model = MODELS[kind]()
    before = model.state_dict()["classifier.1.weight" if kind != "twelve" else "classifier.weight"].clone()
    run = vitkit.train(
        "digits", tmp_path / "run", model=model, recipe="digits", steps=20, workers=0, report=False, progress=False
    )
    after = model.state_dict()["classifier.1.weight" if kind != "twelve" else "classifier.weight"]
    assert not torch.equal(before, after)
    assert min(Image.open(io.BytesIO(run._repr_png_())).size) > 200

    photo = tmp_path / "digit.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8), np.uint8)).save(photo)
    loaded = vitkit.load(vitkit.save(model, tmp_path / "mine.safetensors"))
    answer = vitkit.predict(loaded, photo, top=10)[0]
    pixels = torch.from_numpy(np.asarray(Image.open(photo)) / 255).float()[None, None] * 2 - 1
    with torch.no_grad():
        logits = model.eval()(pixels)
    own = getattr(logits, "logits", logits)[0].softmax(-1)
    assert [g.probability for g in answer.guesses] == pytest.approx(
        [float(own[g.index]) for g in answer.guesses], abs=1e-5
    )
    assert answer.plot().axes[0].get_title() == f"{answer.name} {answer.probability:.1%}"

    looks = vitkit.explain(model, photo, tmp_path / "looks")[0]
    assert looks.target == answer.name
    assert {"rollout.png", "attention.png", "overview.png"} <= {file.name for file in looks.folder.iterdir()}
    assert min(Image.open(io.BytesIO(looks._repr_png_())).size) > 100

    body = {"images": [{"name": "digit.png", "data": base64.b64encode(photo.read_bytes()).decode()}]}
    with vitkit.serve(model, port=0, wait=False) as server:
        request = urllib.request.Request(
            f"{server.url}/v1/predict", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            top = json.load(response)["results"][0]["top"]
    assert (top[0]["class"], top[0]["p"]) == (answer.name, pytest.approx(answer.probability, abs=1e-4))
    assert "stopped" in repr(server)

    vitkit.save(model, tmp_path / "mine.pth", "timm")
    theirs = timm.create_model(
        "vit_base_patch16_224",
        img_size=8,
        in_chans=1,
        patch_size=2,
        embed_dim=32,
        depth=2,
        num_heads=4,
        mlp_ratio=2,
        num_classes=10,
        norm_layer=partial(nn.LayerNorm, eps=loaded.config.layer_norm_eps),
    ).eval()
    theirs.load_state_dict(torch.load(tmp_path / "mine.pth", weights_only=True))
    with torch.no_grad():
        assert torch.allclose(theirs(pixels)[0].softmax(-1), own, atol=1e-5)
