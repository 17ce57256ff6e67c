"""Real weights on real photos: image by image what timm says, and FoodVision Mini."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import vitkit
from tests.peers import peer
from vitkit.data import Source, open_source
from vitkit.data.base import Subset
from vitkit.evaluation import class_names, logits_of, match_classes, measure
from vitkit.evaluation.logits import Outputs

TI = "weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.timm.pth"
BAR = 5e-6  # of the largest logit: what two orders of the same sums may differ by


@pytest.fixture(scope="module")
def model(shared_data) -> vitkit.ViT:
    return vitkit.load(shared_data / TI)


def timms(shared_data, source: Source) -> np.ndarray:
    """timm's model, timm's transform, timm's numbers."""
    timm, data = peer("timm"), peer("timm.data")
    theirs = timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", pretrained=False).eval()
    theirs.load_state_dict(torch.load(shared_data / TI, weights_only=True), strict=True)
    transform = data.create_transform(**data.resolve_data_config({}, model=theirs), is_training=False)
    images = [transform(source.read(i)[0].convert("RGB")) for i in range(len(source))]
    with torch.inference_mode():
        return torch.cat([theirs(torch.stack(images[i : i + 32])) for i in range(0, len(images), 32)]).numpy()


def compare(shared_data, model, source: Source) -> Outputs:
    found = logits_of(model, source, batch_size=32, workers=0)
    expected = timms(shared_data, source)
    assert np.abs(found.logits - expected).max() <= BAR * np.abs(expected).max()
    assert (found.logits.argmax(1) == expected.argmax(1)).all()
    assert (np.sort(np.argsort(-found.logits)[:, :5]) == np.sort(np.argsort(-expected)[:, :5])).all()
    labels = match_classes(source.class_names, class_names(model))[found.labels]
    return Outputs(found.logits, labels, found.index, found.names)


def test_sixty_photos_image_by_image(shared_data, model) -> None:
    source = open_source(shared_data / "imagenet_val_500", "all")
    found = compare(shared_data, model, Subset(source, range(0, 500, 9)))
    assert len(found) == 56
    assert 0.6 < measure(found).top1 < 0.9


@pytest.mark.slow
def test_five_hundred_photos_image_by_image(shared_data, model) -> None:
    m = measure(compare(shared_data, model, open_source(shared_data / "imagenet_val_500", "all")))
    assert (m.n, m.top1, m.top5) == (500, 0.742, 0.936)
    assert m.ci95[0] < 0.742 < m.ci95[1]


@pytest.mark.slow
def test_foodvision_mini_and_again_from_the_cache(shared_data, model, tmp_path, monkeypatch) -> None:
    from vitkit.jobs.embed import open_cache
    from vitkit.jobs.probe import probe

    data, cache = shared_data / "pizza_steak_sushi", open_cache(tmp_path / "cache")
    first = probe(model, data, tmp_path / "run", cache, methods=["logistic", "ridge", "knn", "sgd"], workers=0)
    right = {result.fitted.method: result.correct for result in first.results}
    assert right["logistic"] >= 72
    assert min(right.values()) >= 70
    monkeypatch.setattr(sys.modules["vitkit.features.embed"], "forward", None)  # all features are in the cache
    second = probe(model, data, tmp_path / "second", cache, workers=0)
    assert second.train.computed + second.held.computed == 0

    again = vitkit.load(tmp_path / "run")
    outputs = logits_of(again, open_source(data, "test"), workers=0)
    assert measure(outputs).top1 == first.evaluation.measures.top1 == right["logistic"] / 75
    said = vitkit.predict(again, [data / "test" / name for name in again.input_spec.class_names], workers=0)
    assert sum(p.name == Path(p.image).parent.name for p in said) == right["logistic"]
    stored = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert stored["top1"] == measure(outputs).top1
