"""Several labels per image through the whole product: one run and one probe, by every door."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from typer.testing import CliRunner

import vitkit
from tests.pairs import pairs
from tests.training.tiny import CONFIG, run, tiny
from vitkit.cli import app
from vitkit.data.sources import open_source
from vitkit.errors import ConfigError, DataError, VitkitError
from vitkit.evaluation.labels import best_thresholds, sigmoid
from vitkit.evaluation.logits import logits_of
from vitkit.features.one_vs_rest import choose, one_vs_rest
from vitkit.jobs.report import report
from vitkit.jobs.share import bundle, write_card
from vitkit.model.config import InputSpec
from vitkit.server.app import create_app
from vitkit.server.service import Service

NAMES = ("0", "1", "2", "3")


def call(*args: object, error: type[VitkitError] | None = None):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if error is not None:
        assert isinstance(result.exception, error), result.output
    elif result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and a short run on it."""
    folder = tmp_path_factory.mktemp("several")
    table = pairs(folder / "data", 120, 40, classes=4)
    run(folder / "run", tiny(config=dataclasses.replace(CONFIG, image_size=(8, 16)), steps=8), data=table)
    return folder


def photo(place: Path, n: int = 3) -> Path:
    return place / "data" / f"test-{n:04d}.png"


def test_eval_says_the_same_in_text_json_and_files(place: Path) -> None:
    table = place / "data/labels.csv"
    said = call("eval", place / "run", table, "--workers", 0, "--no-report").stdout
    found = json.loads((place / "run/evaluation.json").read_text())
    assert f"mAP       {found['mean_ap']:.4f}" in said
    assert "label (worst first)" in said
    assert found == {
        **json.loads(call("eval", place / "run", table, "--workers", 0, "--json", "--no-report").stdout),
        "seconds": found["seconds"],
    }
    model, source = vitkit.load(place / "run"), open_source(table, "test")
    p = sigmoid(logits_of(model, source).logits)
    with open(place / "run/predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["truth"] for row in rows] == [source.said(i) for i in range(len(source))]
    assert np.allclose([[float(row[name]) for name in NAMES] for row in rows], p, atol=1e-6)
    there = p >= np.array(model.input_spec.thresholds)
    assert rows[0]["predicted"] == ("|".join(np.array(NAMES)[there[0]]) or "no label")
    assert not (place / "run/confusion.csv").exists()
    found = vitkit.evaluate(place / "run", table, workers=0)
    assert found.plot() is not None
    assert str(found).startswith(f"mAP {found.measures.mean_ap:.1%} of ")


def test_every_door_gives_the_same_labels(place: Path) -> None:
    model = vitkit.load(place / "run")
    limits = model.input_spec.thresholds
    answers = vitkit.predict(model, [photo(place, n) for n in range(20)], top=1)
    p = sigmoid(logits_of(model, open_source(place / "data/labels.csv", "test")).logits)
    for n, answer in enumerate(answers):
        assert answer.labels is not None
        assert {one.index for one in answer.labels} == {k for k in range(4) if p[n, k] >= limits[k]}
        probabilities = [one.probability for one in answer.labels]
        assert probabilities == sorted(probabilities, reverse=True)
        assert answer.name == ("|".join(one.name for one in answer.labels) or "no label")
        assert len(answer.guesses) == 1
        assert not answer.none_of_these
    assert len({answer.name for answer in answers}) > 1
    service = Service(model, source="run")
    service.warm()
    client = TestClient(create_app(service))
    for n in (3, 4):
        raw = photo(place, n).read_bytes()
        (result,) = client.post("/v1/predict?top=2", files=[("files", ("a.png", raw))]).json()["results"]
        assert [(one["class"], one["index"]) for one in result["labels"]] == [
            (one.name, one.index) for one in answers[n].labels
        ]
        assert len(result["top"]) == 2
        assert result["none_of_these"] is False
        assert [one["threshold"] for one in result["top"]] == [limits[one["index"]] for one in result["top"]]
    service.close()


def test_predict_prints_all_labels_or_says_that_there_is_none(place: Path, tmp_path: Path) -> None:
    model = vitkit.load(place / "run")
    for limit, says in ((0.0, "  "), (1.0, "no label (nearest: ")):
        model.input_spec = dataclasses.replace(model.input_spec, thresholds=(limit,) * 4)
        weights = vitkit.save(model, tmp_path / f"{limit}.safetensors")
        assert says in call("predict", weights, photo(place), "--top", 1).stdout
        rows = list(csv.DictReader(io.StringIO(call("predict", weights, photo(place), "--csv").stdout)))
        assert [row["index"] for row in rows] == (["-1"] if limit else [row["class"] for row in rows])
        assert len(rows) == (1 if limit else 4)
        (found,) = json.loads(call("predict", weights, photo(place), "--json").stdout)["predictions"]
        assert len(found["labels"]) == (0 if limit else 4)


def test_answers_are_a_data_set(place: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    out = tmp_path / "answers.csv"
    images = [*(photo(place, n) for n in range(10)), tmp_path / "broken.png"]
    result = call("predict", place / "run", *images, "--out", out)
    assert result.exit_code == 1
    answers = vitkit.predict(place / "run", images[:10])
    none = sum(answer.labels == () for answer in answers)
    assert f"11 rows, {none} without a label, 1 could not be read" in result.stdout
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["labels"] for row in rows[:10]] == [answer.name.replace("no label", "") for answer in answers]
    assert rows[10]["error"]
    kept = tmp_path / "kept.csv"
    kept.write_text("".join(["image,labels\n", *(f"{row['image']},{row['labels']}\n" for row in rows[:10])]))
    source = open_source(kept, "all")
    assert [set(source.said(i).split("|")) for i in range(10)] == [set(answer.name.split("|")) for answer in answers]


@pytest.mark.parametrize(
    ("dialect", "file"),
    [("native", "m.safetensors"), ("timm", "m.safetensors"), ("huggingface", "folder"), ("google", "m.npz")],
)
def test_thresholds_travel_with_the_weights(dialect: str, file: str, place: Path, tmp_path: Path) -> None:
    said = call("convert", place / "run", tmp_path / file, "--to", dialect).stdout
    own, other = vitkit.load(place / "run").input_spec, vitkit.load(tmp_path / file).input_spec
    assert other.several
    assert other.thresholds == pytest.approx(own.thresholds, abs=0)
    assert other.class_names == own.class_names
    assert ("compare the sigmoid of each output with its threshold" in said) == (dialect != "native")
    assert "any number of them per image, thresholds" in call("inspect", tmp_path / file).stdout
    if dialect == "huggingface":
        config = json.loads((tmp_path / "folder/config.json").read_text())
        assert config["problem_type"] == "multi_label_classification"
        del config["vitkit"]["thresholds"]
        (tmp_path / "folder/config.json").write_text(json.dumps(config))
        assert vitkit.load(tmp_path / "folder").input_spec.thresholds == (0.5,) * 4  # as a file of transformers itself


def test_a_changed_head_has_no_thresholds_and_one_class_models_write_none(place: Path, tmp_path: Path) -> None:
    assert vitkit.load(place / "run", num_classes=2).input_spec.thresholds == ()
    assert vitkit.load(place / "run", thresholds=(0.25,) * 4).input_spec.thresholds == (0.25,) * 4
    with pytest.raises(ConfigError, match="4 labels, but its InputSpec has 3 thresholds"):
        vitkit.load(place / "run", thresholds=(0.25,) * 3)
    with pytest.raises(ConfigError, match="thresholds must be"):
        InputSpec(thresholds=(1.5,))
    assert "thresholds" not in InputSpec().to_dict()  # earlier versions read it


def test_an_export_answers_the_same(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    out, table = tmp_path / "m.onnx", place / "data/labels.csv"
    said = call("export", place / "run", "--to", "onnx", "--out", out, "--images", table)
    assert "agreement with the plain model: 100.0%" in said.stdout
    assert "top-1" not in said.stdout
    images = [photo(place, n) for n in range(5)]
    exported = call("predict", tmp_path / "m.onnx", *images, "--json").stdout
    plain = call("predict", place / "run", *images, "--json").stdout
    for a, b in zip(json.loads(exported)["predictions"], json.loads(plain)["predictions"], strict=True):
        assert [one["name"] for one in a["labels"]] == [one["name"] for one in b["labels"]]


def test_one_question_per_label_is_scikit_learns_answer() -> None:
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    X, W = rng.normal(size=(90, 6)), rng.normal(size=(3, 6))
    y = (X @ W.T + rng.normal(size=(90, 3)) > 0.5).astype(np.int64)
    head, _ = one_vs_rest(X, np.column_stack([y, np.ones(90, int)]), 0.1)
    for k in range(3):
        theirs = LogisticRegression(C=0.1, max_iter=1000).fit(X, y[:, k])
        assert np.allclose(head.logits(X)[:, k], theirs.decision_function(X), atol=1e-3)
    assert np.allclose(head.logits(X)[:, 3], np.log(90.5 / 0.5))  # a label that every image has
    losses, best, thresholds = choose(X, y, 5, 0, (0.01, 1.0))
    assert best == min(losses, key=lambda C: losses[C])
    # The thresholds come from images that the fits did not see: not those of the fit to everything.
    assert thresholds != best_thresholds(sigmoid(one_vs_rest(X, y, best)[0].logits(X)), y)


def test_probe(place: Path, tmp_path: Path) -> None:
    how = ("--from", place / "run", "--workers", 0, "--cache", tmp_path / "cache", "--folds", 3)
    table = place / "data/labels.csv"
    said = call("probe", table, *how, "--out", tmp_path / "probe").stdout
    found = json.loads((tmp_path / "probe/evaluation.json").read_text())
    assert f"mAP {found['mean_ap']:.4f}" in said
    assert "one question per label" in said
    again = json.loads(call("eval", tmp_path / "probe", table, "--json", "--workers", 0, "--no-report").stdout)
    assert again["mean_ap"] == pytest.approx(found["mean_ap"], abs=1e-4)
    assert [row["threshold"] for row in again["per_class"]] == [row["threshold"] for row in found["per_class"]]
    assert "mAP" in call("runs", tmp_path).stdout
    page = (tmp_path / "probe/report.html").read_text()
    assert "Results per label" in page
    for more, says in (
        (("--method", "knn"), "The method knn names one class per image"),
        (("--accept", 0.95), r"needs one class per image; .* several labels"),
    ):
        result = call("probe", table, *how, "--out", tmp_path / "no", *more, error=ConfigError)
        with pytest.raises(ConfigError, match=says):
            raise result.exception  # type: ignore[misc]


def test_the_report_shows_labels_and_mistakes(place: Path) -> None:
    call("eval", place / "run", place / "data/labels.csv", "--workers", 0, "--no-report")
    page = report(place / "run").read_text()
    for words in ("What it misses", "What it invents", "Results per label", "get exactly their labels", "mAP"):
        assert words in page
    for words in ("Confusion", "top-1", "predicted as", "None%"):
        assert words not in page
    assert "mAP" in call("runs", place, "--html", place / "runs.html").stdout
    assert "Validation mAP" in (place / "runs.html").read_text()


def test_the_card(place: Path, tmp_path: Path) -> None:
    call("eval", place / "run", place / "data/labels.csv", "--workers", 0, "--no-report")
    text = write_card(place / "run", tmp_path / "README.md").read_text()
    found = json.loads((place / "run/evaluation.json").read_text())
    assert f"| mAP | {found['mean_ap']:.1%} |" in text
    assert "any number of 4 labels per image" in text
    assert "the sigmoid of the output" in text
    assert "accuracy" not in text
    bundle(place / "run", tmp_path / "push")
    assert vitkit.load(tmp_path / "push").input_spec.thresholds == vitkit.load(place / "run").input_spec.thresholds


def test_the_doctor_counts_labels_and_combinations(place: Path, tmp_path: Path) -> None:
    table = place / "data/labels.csv"
    result = call("doctor", table, "--workers", 0)
    assert "any number of 4 labels per image (column 'labels')" in result.stdout
    assert "combinations of labels; the most frequent: " in result.stdout
    found = json.loads(call("doctor", table, "--workers", 0, "--json").stdout)
    source = open_source(table, "train")
    assert found["classes"]["train"] == source.counts()
    assert found["combinations"]["train"]["no label"] == 12
    assert sum(found["combinations"]["train"].values()) == 120
    call("doctor", table, "--workers", 0, "--fix", tmp_path / "good.csv", "--page", tmp_path / "page.html")
    cleaned = open_source(tmp_path / "good.csv", "train")
    assert cleaned.several
    assert cleaned.class_names == source.class_names
    judged = open_source(tmp_path / "good.csv", "test")
    assert [(~part.labels.any(1)).sum() for part in (cleaned, judged)] == [0, 1]  # empty images are all the same one


def test_what_needs_one_class_says_so(place: Path, tmp_path: Path) -> None:
    table = place / "data/labels.csv"
    for error, says, words in (
        (ConfigError, "one class per image", ("suggest", place / "run", place / "data", "--out", tmp_path / "a.csv")),
        (DataError, "A study needs one class per image", ("study", "pooling", table, "--out", tmp_path / "study")),
        (DataError, "as the model answers", ("eval", place / "run", "digits")),
    ):
        with pytest.raises(error, match=says):
            raise call(*words, error=error).exception  # type: ignore[misc]


def test_other_doors_open(place: Path, tmp_path: Path) -> None:
    """Search, embed, walk and explain know nothing of classes, but name labels."""
    table, how = place / "data/labels.csv", ("--cache", tmp_path / "cache", "--workers", 0)
    assert call("search", table, photo(place), "--from", place / "run", *how).exit_code == 0
    call("embed", table, "--from", place / "run", "--out", tmp_path / "f.parquet", *how)
    from pyarrow import parquet

    rows = parquet.read_table(tmp_path / "f.parquet").to_pydict()
    assert rows["labels"][0] == []
    walk = vitkit.walk(vitkit.load(place / "run"), photo(place))
    logits = walk[-1].value
    assert torch.allclose(walk.probabilities, logits.sigmoid())
    found = vitkit.Run(place / "run")
    last = [row for row in found.folder.metrics() if row["event"] == "val"][-1]
    assert found.results["test_acc"][-1] == last["mean_ap"]
