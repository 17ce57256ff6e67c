""" "None of these": fitted by the probe, kept in the checkpoint, said by predict and by the server."""

from __future__ import annotations

import csv
import json
import logging

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitkit
from tests.features.samples import photos, saved, tiny
from tests.features.test_labels import blobs
from vitkit import InputSpec
from vitkit.cli import app
from vitkit.errors import ConfigError, UnreadableFile
from vitkit.features import unknown
from vitkit.model.known import Known


def test_the_distance_is_mahalanobis_with_the_stated_covariance():
    X, y = blobs(90, 3, 12)
    found = unknown.fit(X, y, InputSpec(), 0.9)
    F, r = 12, len(found.spread)
    assert r == 11
    rest = np.eye(F) - found.axes.numpy().T @ found.axes.numpy()
    S = found.axes.numpy().T @ np.diag(found.spread.numpy()) @ found.axes.numpy() + found.rest * rest
    Z = (X - found.centre.numpy()) / found.scale.numpy()
    d = Z[:, None] - found.means.numpy()
    expected = np.einsum("nkf,fg,nkg->nk", d, np.linalg.inv(S), d).min(1)
    assert np.allclose(unknown.distances(found, X), expected, rtol=1e-3)


@pytest.mark.parametrize("accept", [0.5, 0.8, 0.95])
def test_the_limit_accepts_the_share_that_was_asked_for(accept):
    X, y = blobs(900, 3, 16)
    new, _ = blobs(900, 3, 16, seed=0)
    rng = np.random.default_rng(1)
    means = np.stack([X[y == k].mean(0) for k in range(3)])
    new = means[np.arange(900) % 3] + rng.normal(size=(900, 16))
    found = unknown.fit(X, y, InputSpec(), accept)
    assert abs((unknown.distances(found, new) <= found.limit).mean() - accept) < 0.04
    far = means.mean(0) + 8 * rng.normal(size=(200, 16))
    assert (unknown.distances(found, far) <= found.limit).mean() < 0.02


@pytest.mark.parametrize("accept", [0.0, 1.5, -1])
def test_a_share_that_cannot_be(accept):
    with pytest.raises(ConfigError, match="accept"):
        unknown.fit(*blobs(), InputSpec(), accept)


def test_it_travels_as_text():
    found = unknown.fit(*blobs(), InputSpec(), 0.9)
    again = Known.from_text(found.to_text())
    for name, value in vars(found).items():
        other = getattr(again, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"means": 3}'])
def test_another_text_is_refused(text):
    with pytest.raises(UnreadableFile, match="vitkit probe --accept"):
        Known.from_text(text)


def test_parts_that_do_not_fit_are_refused():
    values = json.loads(unknown.fit(*blobs(), InputSpec(), 0.9).to_text())
    values["centre"] = values["spread"]
    with pytest.raises(UnreadableFile, match="cannot be read"):
        Known.from_text(json.dumps(values))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A probe that knows three colours, and photos of a fourth."""
    root = tmp_path_factory.mktemp("unknown")
    photos(root / "set", {"train": 20, "test": 10})
    run = CliRunner().invoke(
        app,
        ["probe", str(root / "set"), "--from", str(saved(root)), "--out", str(root / "run"), "--no-report",
         "--cache", str(root / "cache"), "--workers", "0", "--accept", "0.9"],
    )  # fmt: skip
    assert run.exit_code == 0, run.stdout
    assert "(asked for 90.0%)" in run.stdout
    rng = np.random.default_rng(5)
    (root / "other").mkdir()
    for i in range(6):  # stripes, which no class has
        pixels = np.zeros((36, 40, 3), np.uint8)
        pixels[:: 2 + i % 3] = 255
        Image.fromarray(pixels ^ rng.integers(0, 9, pixels.shape, np.uint8)).save(root / "other" / f"{i}.png")
    return root


def test_predict_says_none_of_these(place):
    model = vitkit.load(place / "run")
    assert model.known.accept == 0.9
    far = vitkit.predict(model, place / "other")
    assert all(one.none_of_these and one.name == "none of these" for one in far)
    assert far[0].guesses[0].name in ("blue", "green", "red")
    near = vitkit.predict(model, place / "set/test")
    assert sum(not one.none_of_these for one in near) >= 24
    plain = vitkit.load(place / "run")
    plain.known = None
    assert [one.guesses for one in vitkit.predict(plain, place / "other")] == [one.guesses for one in far]
    assert vitkit.predict(plain, place / "other")[0].distance is None


def test_the_command_says_it_in_every_form(place):
    def said(*options):
        run = CliRunner().invoke(app, ["predict", str(place / "run"), str(place / "other/0.png"), *options])
        assert run.exit_code == 0
        return run.stdout

    assert ": none of these (nearest: " in said()
    assert json.loads(said("--json"))["predictions"][0]["none_of_these"] is True
    assert said("--csv").splitlines()[1].endswith(",1,none of these,-1,")


def test_a_file_keeps_it_and_a_change_of_preprocessing_ends_it(place, caplog, tmp_path):
    model = vitkit.load(place / "run")
    vitkit.save(model, tmp_path / "copy.safetensors")
    again = vitkit.load(tmp_path / "copy.safetensors")
    assert torch.equal(again.known.means, model.known.means)
    assert vitkit.load(place / "run", num_classes=5).known is None
    with caplog.at_level(logging.WARNING, "vitkit"):
        assert vitkit.load(place / "run", mean=0.3).known is None
    assert 'cannot answer "none of these" with this preprocessing' in caplog.text
    assert vitkit.load(place / "run", class_names=("a", "b", "c")).known is not None


def test_training_on_ends_it(place, tmp_path):
    run = vitkit.train(
        place / "set", tmp_path / "run", weights=place / "run", steps=1, batch_size=4, workers=0, report=False
    )
    assert run.model().known is None


def test_a_new_probe_does_not_inherit_it(place, tmp_path):
    found = vitkit.probe(place / "run", place / "set", tmp_path / "run", cache=place / "cache", workers=0)
    assert found.model.known is None


def test_features_before_the_head_are_those_that_were_fitted(tmp_path):
    """With pre-logits the head sees tanh(dense(y)); so must the distance."""
    photos(tmp_path / "set", {"train": 12, "test": 6})
    backbone = tiny(pre_logits=True)
    found = vitkit.probe(
        backbone, tmp_path / "set", tmp_path / "run", cache=tmp_path / "cache", workers=0, features="pre-logits",
        accept=0.9,
    )  # fmt: skip
    told = vitkit.predict(vitkit.load(tmp_path / "run"), tmp_path / "set/test")
    assert np.mean([not one.none_of_these for one in told]) == pytest.approx(found.run.info["accepted"])


def test_the_server_says_it_too(place):
    from starlette.testclient import TestClient

    from vitkit.server.app import create_app
    from vitkit.server.service import Service, load_service

    with pytest.raises(ConfigError, match="--engine torch"):
        Service(vitkit.load(place / "run"), engine="cpu-fused")
    service = load_service(place / "run", device="cpu")
    service.warm()
    with TestClient(create_app(service)) as client:
        for name, expected in (("other/0.png", True), ("set/test/red/0.png", False)):
            data = (place / name).read_bytes()
            answer = client.post("/v1/predict?top=2", files={"files": ("x.png", data)}).json()["results"][0]
            direct = vitkit.predict(vitkit.load(place / "run"), place / name, top=2)[0]
            assert answer["none_of_these"] is direct.none_of_these is expected
            assert [one["class"] for one in answer["top"]] == [one.name for one in direct.guesses]
            assert [one["p"] for one in answer["top"]] == pytest.approx(
                [g.probability for g in direct.guesses], abs=1e-5
            )


# one row per image


def test_answers_are_one_row_per_image(place, tmp_path):
    (tmp_path / "=1+1.png").write_bytes((place / "set/test/red/1.png").read_bytes())
    (tmp_path / "broken.png").write_bytes(b"")
    images = [str(place / "other/0.png"), "broken.png", "=1+1.png", str(place / "set/test/blue/0.png")]
    import os

    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        run = CliRunner().invoke(app, ["predict", str(place / "run"), *images, "--out", "answers.csv"])
    finally:
        os.chdir(before)
    assert run.exit_code == 1
    assert "wrote answers.csv: 4 rows, 1 none of these, 1 could not be read" in run.stdout
    with open(tmp_path / "answers.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == [images[0], "broken.png", "'=1+1.png", images[3]]
    assert [row["class"] for row in rows] == ["none of these", "", "red", "blue"]
    assert "0 bytes" in rows[1]["error"]
    assert float(rows[0]["distance"]) > 1 > float(rows[3]["distance"])


def test_answers_go_to_a_csv_file_only(place, tmp_path):
    for words in (["--out", "a.txt"], ["--out", "a.csv", "--json"]):
        run = CliRunner().invoke(app, ["predict", str(place / "run"), str(place / "other/0.png"), *words])
        assert isinstance(run.exception, ConfigError)


def test_real_photos_of_other_things_are_refused(shared_data, tmp_path):
    """The 500 photos of ImageNet against FoodVision Mini; one in five of them, to be quick."""
    weights = shared_data / "weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.timm.pth"
    backbone = vitkit.load(weights, num_attention_heads=3)
    found = vitkit.probe(
        backbone, shared_data / "pizza_steak_sushi", tmp_path / "run", accept=0.95, cache=tmp_path / "c", workers=0
    )
    assert abs(found.run.info["accepted"] - 0.95) <= 0.05
    others = sorted((shared_data / "imagenet_val_500").rglob("*.jpg"))[::5]
    told = vitkit.predict(found.model, others)
    assert np.mean([not one.none_of_these for one in told]) <= 0.03
