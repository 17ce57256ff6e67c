"""ResNets and hybrids through everything that takes a model: train, resume, probe, evaluate, explain, export, serve.

One small model of each kind: one unit per stage, one block.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

import vitkit
from tests.model.test_resnet import difference, filled
from tests.peers import peer
from tests.training.test_loop import stop_at
from tests.training.tiny import bytes_of, run, tiny
from vitkit.errors import ConfigError
from vitkit.explanations.attention import rollout
from vitkit.explanations.common import PlotOptions
from vitkit.explanations.plots import PLOTS
from vitkit.features.choice import choose
from vitkit.jobs.listing import diff
from vitkit.model.backbone import Backbone
from vitkit.model.config import InputSpec, ViTConfig
from vitkit.model.create import build
from vitkit.model.resnet import ResNet
from vitkit.model.resnet_config import ResNetConfig
from vitkit.server.app import create_app
from vitkit.server.service import Service
from vitkit.speed.engines import ENGINES, chosen, usual
from vitkit.speed.exported import export, open_exported

RESNET = ResNetConfig(
    depths=(1, 1, 1, 1), hidden_sizes=(32, 32, 64, 64), embedding_size=8, num_groups=8, image_size=64, num_channels=1
)
HYBRID = ViTConfig(
    stem="r14/32",
    patch_size=32,
    image_size=64,
    num_channels=1,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=64,
    layer_norm_eps=1e-6,
)
KINDS = {"resnet": RESNET, "hybrid": HYBRID}


def small(kind: str, classes: int = 5) -> Backbone:
    c = type(KINDS[kind])(**{**vars(KINDS[kind]), "num_classes": classes})
    model = filled(build(c, InputSpec(size=(64, 64), channels="gray", mean=(0.5,), std=(0.5,))))
    if kind == "hybrid":
        with torch.no_grad():
            model.patch_embedding.projection.weight.mul_(0.05)
    return model


def photo(side: int = 80) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (side, side), np.uint8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve bright and twelve dark images."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for name, low in (("bright", 128), ("dark", 0)):
        (folder / name).mkdir()
        for i in range(12):
            Image.fromarray(rng.integers(low, low + 128, (40, 40), np.uint8)).save(folder / name / f"{i}.png")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_stops_resumes_bit_identically(kind: str, data: Path, tmp_path: Path) -> None:
    how = {"recipe": tiny(steps=3, batch_size=4, warmup=1, drop_path=0.1), "model": KINDS[kind], "data": data}
    run(tmp_path / "whole", **how)
    _, outcome = run(tmp_path / "part", watch=stop_at(1), **how)
    assert (outcome.stopped, outcome.step) == (True, 1)
    run(tmp_path / "part", resume=True, **how)
    assert diff(tmp_path / "whole", tmp_path / "part").same
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "part")
    trained = vitkit.load(tmp_path / "whole")
    assert trained.config.num_classes == 2
    assert type(trained.config) is type(KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_probe_fine_tune_and_evaluate(kind: str, data: Path, tmp_path: Path) -> None:
    model = small(kind, 0)
    found = vitkit.probe(model, data, tmp_path / "probe", methods=["ridge"], cache=tmp_path / "cache", workers=0)
    assert found.model.config.num_classes == 2
    again = vitkit.evaluate(tmp_path / "probe", data, workers=0)
    assert again.measures.top1 == found.evaluation.measures.top1
    tuned, _ = run(tmp_path / "tuned", tiny(steps=2, batch_size=4, warmup=0), weights=tmp_path / "probe", data=data)
    assert vitkit.load(tuned.path).input_spec.class_names == ("bright", "dark")


@pytest.mark.parametrize("kind", ["resnet", pytest.param("hybrid", marks=pytest.mark.slow)])
@torch.no_grad()
def test_onnx_gives_the_same_logits_at_any_size(kind: str, tmp_path: Path) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        peer(name)
    model = small(kind)
    export(model, "onnx", tmp_path / "model.onnx")
    opened = open_exported(tmp_path / "model.onnx")
    assert opened.config == model.config
    for size in ((64, 64), (96, 128)):
        x = torch.randn(3, 1, *size, generator=torch.Generator().manual_seed(2))
        assert difference(model(x), opened(x)) < 1e-5
    flat = torch.full((1, 1, 64, 64), 0.3)  # constant areas show how the border of the max-pool is padded
    assert difference(model(flat), opened(flat)) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_explaining(kind: str, tmp_path: Path) -> None:
    (found,) = vitkit.explain(small(kind), photo(), tmp_path, occlusion=True)
    there = {path.name for path in found.folder.iterdir()}
    expected = {"resnet": {"activation.png", "occlusion.png"}, "hybrid": {"rollout.png", "attention.png"}}
    assert expected[kind] <= there
    assert ("rollout.png" in there) == (kind == "hybrid")


@torch.no_grad()
def test_a_class_activation_map_adds_up_to_the_logit() -> None:
    model, x = small("resnet"), torch.randn(1, 1, 64, 96, generator=torch.Generator().manual_seed(3))
    found = PLOTS["activation"].arrays(model, x, PlotOptions(target=2))
    assert found["activation"].shape == (2, 3)
    assert float(found["activation"].mean() + model.head.bias[2]) == pytest.approx(float(model(x)[0, 2]), rel=1e-5)


def test_attention_of_a_hybrid_is_on_its_grid() -> None:
    x = torch.randn(1, 1, 64, 96, generator=torch.Generator().manual_seed(3))
    assert rollout(small("hybrid"), x).shape == (1, 1 + 2 * 3)


@pytest.mark.parametrize("kind", KINDS)
def test_serving(kind: str) -> None:
    service = Service(small(kind))
    service.warm()
    raw = io.BytesIO()
    Image.fromarray(photo()).save(raw, "PNG")
    files = [("files", ("photo.png", raw.getvalue()))]
    try:
        with TestClient(create_app(service)) as client:
            assert len(client.post("/v1/predict", files=files).json()["results"][0]["top"]) == 5
            assert client.post("/v1/embed", files=files).status_code == 200
            card = client.get("/v1/model").json()
            assert card["grid"] == [2, 2]
            assert ("rollout" in card["explanations"]) == (kind == "hybrid")
            assert ("activation" in card["pictures"]) == (kind == "resnet")
            answer = client.post("/v1/explain?kind=rollout", files=files)
            assert answer.status_code == (200 if kind == "hybrid" else 422)
            if kind == "resnet":
                assert "this model is a ResNet" in answer.text
    finally:
        service.close()


def test_what_a_resnet_cannot_do_says_so(tmp_path: Path) -> None:
    model = small("resnet")
    x = torch.zeros(1, 1, 64, 64)
    words = "needs a Vision Transformer; this model is a ResNet, which has no tokens or attention"
    for refused in (
        lambda: rollout(model, x),
        lambda: vitkit.walk(model),
        lambda: vitkit.patches(model=model),
        lambda: vitkit.as_paper(model),
        lambda: vitkit.as_huggingface(model),
        lambda: vitkit.explain(model, photo(), tmp_path, patch="0,0"),
        lambda: export(model, "onnx", tmp_path / "model.onnx", merge=2),
        lambda: ENGINES["cpu-fused"].build(model),
        lambda: chosen("fp8", model),
    ):
        with pytest.raises(ConfigError, match=words):
            refused()
    assert usual(model) == "torch"
    with pytest.raises(ConfigError, match="one feature, the mean of its last feature map"):
        choose("cls", model.config)


def test_names_of_resnets_and_hybrids_are_accepted_where_variants_are(data: Path, tmp_path: Path) -> None:
    assert vitkit.summary("r50x1").parameters == 25_549_352
    assert vitkit.summary("r50+vit-b/16").parameters == 98_659_112
    fields = {name: value for name, value in vars(RESNET).items() if name != "num_classes"}
    model, _ = run(tmp_path / "run", tiny(steps=1, batch_size=2, warmup=0), model="r50x1", fields=fields, data=data)
    assert isinstance(vitkit.load(model.path), ResNet)
    with pytest.raises(ConfigError, match="A model has no field 'pool'"):
        run(tmp_path / "other", tiny(steps=1, warmup=0), model="r50x1", fields={"pool": "mean"}, data=data)
