"""`vitkit export`, its report, and exported files in place of weights: predict, eval, serve."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitkit
from tests.speed.exports import model, need
from vitkit.cli import app
from vitkit.data.folder import Files
from vitkit.errors import ConfigError, DataError, InputError, OutputError
from vitkit.jobs.export import default_place, export_file, images_for
from vitkit.jobs.open_model import open_model
from vitkit.speed.accuracy import compare
from vitkit.speed.exported import EXPORTS, Exported, open_exported

CLASSES = ("pizza", "steak", "sushi")


def run(*args: object) -> tuple[int, str]:
    """Exit code and standard output; errors of ours are raised, as `main` would print them."""
    done = CliRunner().invoke(app, [str(one) for one in args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 photos of noise in three classes."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for k, name in enumerate(CLASSES):
        (folder / name).mkdir()
        for i in range(8):
            pixels = rng.integers(0, 256, (40, 36, 3)) // 2 + 40 * k
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "food.safetensors"
    vitkit.save(model(num_classes=3), path)
    return path


@pytest.fixture(scope="module")
def int8(weights: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    need()
    out = tmp_path_factory.mktemp("int8") / "food.xml"
    code, text = run(
        "export",
        weights,
        "--to",
        "openvino-int8",
        "--images",
        photos,
        "--out",
        out,
        "--calibrate",
        10,
        "--workers",
        0,
        "--json",
    )
    assert code == 0
    return out, json.loads(text)


def test_the_report_is_about_images_that_were_not_calibrated_on(int8, photos: Path) -> None:
    out, report = int8
    assert report["calibrated_on"] == 10
    assert report["images"] == 14
    assert "none of them calibrated on" in report["report_on"]
    assert 0 <= report["agreement"] <= 1
    assert 0 < report["difference"] < 1
    assert report["tolerance"] is None
    assert {"plain", "fast"} <= set(report)
    assert report["plain"] is not None  # the classes are the model's: top-1 is known
    assert json.loads(out.with_name(f"{out.name}.report.json").read_text(encoding="utf-8")) == report


def test_predict_and_eval_take_the_file(int8, weights: Path, photos: Path) -> None:
    out, _ = int8
    code, text = run("predict", out, photos / "pizza" / "0.png", "--json")
    assert code == 0
    guesses = json.loads(text)["predictions"][0]["guesses"]
    assert {guess["name"] for guess in guesses} == set(CLASSES)
    code, text = run("eval", out, photos, "--json", "--workers", 0)
    fast = json.loads(text)
    plain = json.loads(run("eval", weights, photos, "--json", "--workers", 0)[1])
    assert code == 0
    assert fast["n"] == plain["n"] == 24
    assert abs(fast["top1"] - plain["top1"]) <= 0.25


def test_predict_answers_the_same_from_python_and_the_command_line(int8, photos: Path) -> None:
    found = vitkit.predict(open_exported(int8[0]), photos / "steak" / "3.png")
    code, text = run("predict", int8[0], photos / "steak" / "3.png", "--json")
    assert code == 0
    assert json.loads(text)["predictions"][0]["guesses"][0]["probability"] == pytest.approx(found[0].probability)


def test_serve_takes_the_file(int8, photos: Path) -> None:
    from starlette.testclient import TestClient

    from vitkit.server.app import create_app
    from vitkit.server.service import load_service

    service = load_service(int8[0])
    service.warm()
    with TestClient(create_app(service)) as client:
        photo = {"files": ("x.png", (photos / "sushi" / "1.png").read_bytes())}
        found = client.post("/v1/predict", files=photo).json()["results"][0]["top"]
        expected = vitkit.predict(open_exported(int8[0]), photos / "sushi" / "1.png")[0]
        assert found[0]["class"] == expected.name
        assert found[0]["p"] == pytest.approx(expected.probability, abs=1e-5)
        card = client.get("/v1/model").json()
        assert (card["engine"], card["explanations"], card["pictures"]) == ("openvino-int8", {}, {})
        assert card["classes"] == list(CLASSES)
        for path in ("/v1/embed", "/v1/explain"):
            refused = client.post(path, files=photo)
            assert 400 <= refused.status_code < 500
            assert "exported file" in refused.text


def test_a_promise_is_checked_and_a_broken_one_is_an_exit_code(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need()
    plain = vitkit.load(weights)
    shown = images_for(None, weights, plain, 0, 10)
    done = export_file(plain, "openvino", tmp_path / "food.xml", shown)
    assert done.report.within
    assert done.report.tolerance == 1e-5
    assert "random pixels" in done.on
    assert done.card.any_size
    assert any("kept" in line for line in done.report.sentences())
    written = (tmp_path / "food.xml").read_bytes(), (tmp_path / "food.bin").read_bytes()

    def again(graph: object, path: Path, card: str, pixels: object) -> None:  # the exporter takes seconds
        path.write_bytes(written[0])
        path.with_suffix(".bin").write_bytes(written[1])

    monkeypatch.setitem(EXPORTS, "openvino", dataclasses.replace(EXPORTS["openvino"], write=again))
    monkeypatch.setattr(Exported, "__call__", lambda self, x: torch.zeros(len(x), 3))
    code, text = run("export", weights, "--to", "openvino", "--out", tmp_path / "broken.xml")
    assert code == 1
    assert "NOT KEPT" in text


def test_images_without_classes_are_enough(tmp_path: Path, photos: Path, weights: Path) -> None:
    for i, path in enumerate(sorted(photos.rglob("*.png"))[:5]):
        (tmp_path / f"{i}.png").write_bytes(path.read_bytes())
    shown = images_for(tmp_path, weights, vitkit.load(weights), 100, 100)
    assert (len(shown.calibration), len(shown.report), shown.labelled) == (2, 3, False)
    assert not set(shown.calibration.names) & set(shown.report.names)


def test_a_training_part_is_calibrated_on_and_the_test_part_reported(
    tmp_path: Path, photos: Path, weights: Path
) -> None:
    for part in ("train", "test"):
        (tmp_path / part).symlink_to(photos)
    shown = images_for(tmp_path, weights, vitkit.load(weights), 5, 100)
    assert (len(shown.calibration), len(shown.report), shown.labelled) == (5, 24, True)
    assert isinstance(shown.report.source, Files)


def test_other_classes_have_no_top1(photos: Path) -> None:
    other = model(num_classes=3)
    other.input_spec = dataclasses.replace(other.input_spec, class_names=("cat", "dog", "elk"))
    shown = images_for(photos, "other.safetensors", other, 0, 4)
    assert (shown.calibration, len(shown.report), shown.labelled) == (None, 4, False)


def test_mistakes(tmp_path: Path, weights: Path, photos: Path) -> None:
    plain = vitkit.load(weights)
    with pytest.raises(DataError, match="--images DATA"):
        images_for(None, weights, plain, 10, 10)
    with pytest.raises(ConfigError, match="Unknown export 'onyx', did you mean 'onnx'"):
        run("export", weights, "--to", "onyx")
    with pytest.raises(ConfigError, match="is an exported file"):
        run("export", "food.onnx", "--to", "onnx")
    headless = model(num_classes=0)
    with pytest.raises(ConfigError, match="Expected weights with a classification head"):
        export_file(headless, "onnx", tmp_path / "x.onnx", images_for(None, weights, plain, 0, 1))
    with pytest.raises(ConfigError, match=r"file must end in \.xml"):
        export_file(plain, "openvino", tmp_path / "x.onnx", images_for(None, weights, plain, 0, 1))
    assert not list(tmp_path.iterdir())  # nothing half-written stays
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="part of the path is a file"):
        export_file(plain, "openvino", tmp_path / "file" / "x.xml", images_for(None, weights, plain, 0, 1))
    with pytest.raises(InputError, match="of the same images"):
        compare(np.zeros((2, 3)), np.zeros((2, 4)))


def test_default_path_of_a_file(tmp_path: Path) -> None:
    assert default_place("a/food.safetensors", "onnx") == Path("food.onnx")
    assert default_place("google/vit-base-patch16-224", "openvino-int8", 8) == Path(
        "vit-base-patch16-224-int8-merge8.xml"
    )
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    assert default_place(f"{tmp_path}@ema", "openvino") == tmp_path / "model.xml"


def test_the_numbers_of_a_report() -> None:
    plain = np.array([[4.0, 0.0], [0.0, 2.0], [1.0, 0.0], [0.0, 1.0]])
    fast = plain + np.array([[0.0, 0.0], [0.0, 0.0], [-1.0, 1.0], [0.0, 0.0]])
    found = compare(plain, fast, np.array([0, 1, 1, 0]), tolerance=0.1)
    assert (found.images, found.agreement, found.difference, found.within) == (4, 0.75, 0.25, False)
    assert (found.plain, found.fast) == (0.5, 0.75)
    assert compare(plain, plain, tolerance=0.0).within


def test_open_predictor_takes_weights_too(weights: Path) -> None:
    found = open_model(weights, image_size=48, mean=None, std=None)
    assert found.input_spec.size == (48, 48)
    assert found(torch.zeros(1, 3, 48, 48)).shape == (1, 3)


@pytest.mark.slow
def test_int8_on_the_real_model(shared_data: Path, tmp_path: Path) -> None:
    """Real Ti/16, real photos: agreement of at least 95% on photos it was not calibrated on, under a point lost."""
    need()
    plain = vitkit.load(shared_data / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.timm.pth")
    shown = images_for(shared_data / "imagenet_val_500", "", plain, 128, 500)
    done = export_file(plain, "openvino-int8", tmp_path / "ti.xml", shown)
    assert done.report.images == 500 - 128
    assert done.report.agreement >= 0.95
    assert done.report.fast > done.report.plain - 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("r", "points"), [(8, 2.5), (13, 4.0), (16, 7.0)])
def test_merging_on_the_real_model(shared_data: Path, r: int, points: float) -> None:
    """The curve of the trade: points of top-1 that merging may cost on real photos."""
    from vitkit.data.sources import open_splits
    from vitkit.evaluation import class_names, logits_of, match_classes
    from vitkit.speed.graph import Graph

    plain = vitkit.load(shared_data / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.timm.pth")
    source = open_splits(shared_data / "imagenet_val_500")["all"]()
    outputs = match_classes(source.class_names, class_names(plain))
    first, second = (logits_of(one, source) for one in (plain, Graph(plain, r)))
    found = compare(first.logits, second.logits, outputs[first.labels])
    assert found.fast >= found.plain - points / 100
