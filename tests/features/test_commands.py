"""probe, eval, embed and predict from the command line, with the same numbers from each and from Python."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import vitkit
from tests.features.samples import COLOURS, photos, saved
from vitkit.cli import app
from vitkit.errors import BadImage, ConfigError, DataError, InputError, OutputError, VitkitError
from vitkit.jobs.evaluate import part_of, run_of
from vitkit.training.run_folder import RunFolder


def call(*args: object, error: type[VitkitError] | None = None, stdin: bytes | None = None):
    words = [str(arg) for arg in args]
    if words[0] in ("probe", "eval"):
        words.append("--no-report")  # the page has tests of its own
    result = CliRunner().invoke(app, words, input=stdin)
    if error is not None:
        assert isinstance(result.exception, error), result.output
    elif result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Weights, data, and one probe of them."""
    folder = tmp_path_factory.mktemp("probe")
    saved(folder)
    photos(folder / "photos", {"train": 8, "test": 5})
    result = call(
        "probe",
        folder / "photos",
        "--from",
        folder / "tiny.safetensors",
        "--out",
        folder / "run",
        "--cache",
        folder / "cache",
        "--workers",
        0,
        "--method",
        "logistic,ridge,knn,sgd",
    )
    assert result.exit_code == 0
    (folder / "said.txt").write_text(result.stdout)
    return folder


def test_probe_leaves_a_run_folder(place) -> None:
    said = (place / "said.txt").read_text()
    for words in (
        "24 training images, 15 to evaluate on (the test part)",
        "feature cls: 39 computed, 0 from the cache",
        "s, not counting imports and loading",
        "k-NN, k = 200",
        "ridge, 5 images per class",
        "ridge, 1 image per class",
        "folds 5",
    ):
        assert words in said
    assert "nearest" not in said  # logistic is saved, so k-NN needs no substitute
    run = RunFolder.open(place / "run")
    assert run.info["kind"] == "probe"
    assert run.info["features"] == "cls"
    assert run.info["data"]["classes"] == sorted(COLOURS)
    events = [row["event"] for row in run.metrics()]
    assert events == ["probe"] * 4 + ["val"]
    found = json.loads((place / "run" / "evaluation.json").read_text())
    assert found["n"] == 15
    assert found["top1"] > 0.9
    assert [row["method"] for row in found["methods"]] == ["logistic", "ridge", "knn", "sgd"]
    assert {"few_shot", "neighbours"} <= {key for row in found["methods"] for key in row}


def test_the_same_accuracy_through_every_door(place) -> None:
    expected = json.loads((place / "run" / "evaluation.json").read_text())
    result = call("eval", place / "run", place / "photos", "--json", "--workers", 0, "--out", place / "again")
    found = json.loads(result.stdout)  # one object and nothing else
    assert {"top1", "top5", "n", "per_class", "confusion", "ece", "ci95"} <= set(found)
    assert found["confusion"] == expected["confusion"]
    assert found["ece"] == pytest.approx(expected["ece"], abs=1e-4)

    rows = list(
        csv.DictReader(
            io.StringIO(call("predict", place / "run", place / "photos" / "test", "--top", 1, "--csv").stdout)
        )
    )
    right = [Path(row["image"]).parent.name == row["class"] for row in rows]
    assert (len(right), np.mean(right)) == (15, expected["top1"])

    model = vitkit.load(place / "run")
    answers = vitkit.predict(model, place / "photos" / "test")
    assert [p.name for p in answers] == [row["class"] for row in rows]

    tables = {
        name: list(csv.DictReader((place / "again" / f"{name}.csv").read_text().splitlines()))
        for name in ("predictions", "per_class", "confusion")
    }
    assert [line["predicted"] for line in tables["predictions"]] == [row["class"] for row in rows]
    assert [row["support"] for row in tables["per_class"]] == ["5"] * 3
    assert sum(int(row[name]) for row in tables["confusion"] for name in COLOURS) == 15


def test_eval_prints_tables_and_writes_into_the_run(place) -> None:
    before = json.loads((place / "run" / "evaluation.json").read_text())
    result = call("eval", place / "run", place / "photos", "--workers", 0)
    for words in (
        "top-1",
        "95% interval",
        "(15 of 15)" if before["top1"] == 1 else "of 15)",
        "macro F1",
        "ECE",
        "true \\ predicted",
        "precision",
        "evaluation.json",
    ):
        assert words in result.stdout
    train = json.loads(
        call(
            "eval",
            place / "run",
            place / "photos",
            "--split",
            "train",
            "--json",
            "--out",
            place / "train",
            "--workers",
            0,
        ).stdout
    )
    assert (train["n"], train["part"]) == (24, "the train part")
    call("eval", place / "run", place / "photos", "--split", "val", error=DataError)


def test_eval_by_an_engine_says_how_far_it_is_from_the_plain_model(place) -> None:
    result = call(
        "eval", place / "run", place / "photos", "--workers", 0, "--engine", "cpu-fused", "--out", place / "fused"
    )
    assert result.exit_code == 0
    assert "agreement with the plain model: 100.0% of 15 images" in result.stdout
    assert "promised 5e-06: kept" in result.stdout
    found = json.loads((place / "fused" / "evaluation.json").read_text())
    assert (found["engine"], found["against_plain"]["images"]) == ("cpu-fused", 15)
    assert found["against_plain"]["plain"] == found["against_plain"]["fast"] == found["top1"]
    call("eval", place / "run", place / "photos", "--engine", "warp", error=VitkitError)
    call("eval", place / "run", place / "photos", "--engine", "cpu-fused", "--precision", "bf16", error=ConfigError)


def test_bf16_on_the_cpu_asks_first_what_the_cpu_can_do(place, monkeypatch) -> None:
    from vitkit.jobs.bench import Options, bench
    from vitkit.jobs.train import prepare
    from vitkit.server.service import load_service

    class Asked(Exception):
        pass

    def ask() -> None:
        raise Asked

    monkeypatch.setattr("vitkit.cpu_features.check_instructions", ask)
    weights = place / "tiny.safetensors"
    for command in (
        ["eval", place / "run", place / "photos"],
        ["embed", place / "photos", "--from", weights, "--out", place / "e.npz"],
        ["predict", weights, place / "photos"],
    ):
        words = [*map(str, command), "--device", "cpu", "--precision", "bf16"]
        assert isinstance(CliRunner().invoke(app, words).exception, Asked), command
    with pytest.raises(Asked):
        prepare("digits", place / "new", recipe="digits", settings={"device": "cpu", "precision": "bf16"})
    with pytest.raises(Asked):
        load_service(weights, device="cpu", dtype="bfloat16")
    with pytest.raises(Asked):
        bench(["inference"], Options(model="vit-ti/16", dtype="bfloat16"))


def test_a_second_probe_computes_nothing(place) -> None:
    result = call(
        "probe",
        place / "photos",
        "--from",
        place / "tiny.safetensors",
        "--out",
        place / "second",
        "--cache",
        place / "cache",
        "--workers",
        0,
        "--json",
        "--method",
        "knn",
    )
    found = json.loads(result.stdout)
    assert found["computed"] == 0
    assert found["work_seconds"] > 0
    assert found["methods"][0]["head_top1"] == found["top1"]  # what is saved is the head, not the neighbours
    assert "nearest-class-mean classifier is saved instead" in RunFolder.open(place / "second").info["notes"][0]
    assert vitkit.load(place / "second").input_spec.class_names == tuple(sorted(COLOURS))


def test_embed_reports_and_exports(place) -> None:
    npz, parquet = place / "f.npz", place / "f.parquet"
    args = ("embed", place / "photos", "--from", place / "tiny.safetensors", "--cache", place / "cache", "--workers", 0)
    found = json.loads(call(*args, "--json", "--out", npz).stdout)
    expected = {"images": 24, "computed": 0, "reused": 24, "precision": "fp32", "decode": "cpu", "seconds": 0}
    assert found["parts"]["train"] | {"seconds": 0} == expected
    with np.load(npz, allow_pickle=False) as arrays:
        assert arrays["features"].shape == (39, 32)
        assert arrays["features"].dtype == np.float32
        assert arrays["parts"].tolist() == ["train"] * 24 + ["test"] * 15
        assert arrays["class_names"].tolist() == sorted(COLOURS)
        said = call(*args, "--split", "test", "--out", parquet).stdout
        assert "test: 15 images, 0 computed, 15 from the cache" in said
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(parquet).to_pylist()
        assert np.allclose([row["feature"] for row in rows], arrays["features"][24:])
        assert [row["name"] for row in rows] == arrays["names"][24:].tolist()
        assert {row["class"] for row in rows} == set(COLOURS)
    call(*args, "--out", place / "f.txt", error=ConfigError)
    mean = json.loads(call(*args, "--json", "--features", "layers:0,1", "--split", "test").stdout)
    assert (mean["features"], mean["width"], mean["parts"]["test"]["computed"]) == ("layers:0,1", 64, 15)


def test_predict_prints_lines_json_and_skips(place, tmp_path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    good = place / "photos" / "test" / "red" / "0.png"
    result = call("predict", place / "run", good, tmp_path, "--json", "--top", 2)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert len(found["predictions"][0]["guesses"]) == 2
    assert found["precision"] == "fp32"
    assert [skipped["image"] for skipped in found["skipped"]] == [str(tmp_path / "bad.jpg")]
    assert "bad.jpg" in result.stderr
    assert "1 of 2 images could not be read" in result.stderr
    line = call("predict", place / "run", good).stdout
    assert line.startswith(f"{good}: ")
    assert line.count("%") == 3
    assert call("predict", place / "run", "-", stdin=good.read_bytes()).stdout.split(": ")[1] == line.split(": ")[1]
    assert call("predict", place / "run", "-", stdin=f"{good}\n{good}\n".encode()).stdout == line * 2
    call("predict", place / "run", good, "--json", "--csv", error=ConfigError)
    call("predict", place / "run", "-", stdin=b"", error=DataError)


def test_eval_names_and_skips_bad_images(place, tmp_path) -> None:
    folder = photos(tmp_path / "photos", {"test": 2, "train": 1})
    (folder / "test" / "red" / "0.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"red/0\.png"):
        call("eval", place / "run", folder, "--workers", 0)
    result = call("eval", place / "run", folder, "--workers", 0, "--bad-images", "skip", "--json", "--out", tmp_path)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["n"] == 5
    assert "red/0.png" in result.stderr


def test_a_probe_counts_the_images_that_it_could_read(place, tmp_path) -> None:
    folder = photos(tmp_path / "photos", {"train": 3, "test": 2})
    (folder / "train" / "red" / "0.png").write_bytes(b"")
    how = (
        "--from",
        place / "tiny.safetensors",
        "--out",
        tmp_path / "run",
        "--cache",
        tmp_path / "cache",
        "--workers",
        0,
    )
    call("probe", folder, *how, "--bad-images", "skip")
    data = RunFolder.open(tmp_path / "run").info["data"]
    assert data["counts"] == {name: 3 - (name == "red") for name in sorted(COLOURS)}
    assert sum(data["counts"].values()) == data["train"]
    page = vitkit.report(tmp_path / "run").read_text(encoding="utf-8")
    listed = page[page.index("Images that could not be read") :]
    assert listed[: listed.index("</ul>")].count("red/0.png") == 1


def test_advice_about_a_bad_image_fits_the_command(place, tmp_path) -> None:
    (folder := tmp_path / "photos" / "red").mkdir(parents=True)
    (folder / "broken.png").write_bytes(b"not an image")
    repair = "Repair or remove it; `vitkit doctor` finds all such files."
    weights = place / "tiny.safetensors"
    stopped = call("embed", tmp_path / "photos", "--from", weights, "--workers", 0, error=BadImage).exception
    assert str(stopped).endswith(f"{repair} Or leave out all such images with --bad-images skip.")
    assert str(call("walk", folder / "broken.png", "--from", weights, error=BadImage).exception).endswith(repair)


def test_classes_that_do_not_match_stop_the_evaluation(place, tmp_path) -> None:
    folder = photos(tmp_path / "photos", {"": 2}, {"red": (200, 0, 0), "violet": (150, 0, 150), "blue": (0, 0, 200)})
    with pytest.raises(DataError, match=r"2 of the data's 3 classes match by name, but 'violet'"):
        call("eval", place / "run", folder, "--workers", 0)
    found = json.loads(
        call("eval", place / "run", folder, "--workers", 0, "--in-order", "--json", "--out", tmp_path / "o").stdout
    )
    assert found["n"] == 6


def test_data_without_parts_is_judged_on_what_was_held_out(place, tmp_path) -> None:
    folder = photos(tmp_path / "photos", {"": 10})
    call(
        "probe",
        folder,
        "--from",
        place / "tiny.safetensors",
        "--out",
        tmp_path / "run",
        "--cache",
        place / "cache",
        "--workers",
        0,
        "--method",
        "ridge",
        "--seed",
        3,
    )
    before = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert before["n"] == 3
    found = json.loads(call("eval", tmp_path / "run", folder, "--workers", 0, "--json").stdout)
    assert found["part"] == "the 10% that the run held out"
    assert found["confusion"] == before["confusion"]
    assert len(part_of(folder, "all", run_of(tmp_path / "run"))[0]) == 30
    assert len(part_of(folder, None, run_of(place / "tiny.safetensors"))[0]) == 30  # other weights: all of it


def test_probe_refuses_in_one_sentence(place, tmp_path) -> None:
    def refused(error: type[VitkitError], folder: Path, *more: object) -> str:
        result = call(
            "probe",
            folder,
            "--from",
            place / "tiny.safetensors",
            "--out",
            tmp_path / "no",
            "--cache",
            tmp_path / "cache",
            "--workers",
            0,
            *more,
            error=error,
        )
        assert not (tmp_path / "no").exists()
        return str(result.exception)

    one = photos(tmp_path / "one", {"train": 3, "test": 2}, {"red": (200, 0, 0)})
    assert "at least two classes; all 3 are 'red'" in refused(DataError, one)
    only = photos(tmp_path / "only", {"train": 3, "test": 2})
    for image in (only / "train" / "red").iterdir():
        image.unlink()
    assert "every class of the test part; 'red' has none, but 2 images in test" in refused(DataError, only)
    few = photos(tmp_path / "few", {"train": 1, "test": 1})
    assert "--strength" in refused(DataError, few)
    lone = photos(tmp_path / "lone", {"": 1})
    assert "so that one can be held out" in refused(DataError, lone)
    assert "Unknown method 'svm'" in refused(ConfigError, only, "--method", "svm")
    assert "cls, mean or pre-logits; got layers:0,1" in refused(
        ConfigError, place / "photos", "--features", "layers:0,1"
    )
    result = call(
        "probe", place / "photos", "--from", place / "tiny.safetensors", "--out", place / "run", error=OutputError
    )
    assert "holds a run" in str(result.exception)


def test_a_headless_backbone_can_be_probed_but_not_evaluated(place, tmp_path) -> None:
    saved(tmp_path, num_classes=0)
    for command, what in (("eval", "."), ("predict", "test/red/0.png")):
        with pytest.raises(InputError, match=r"no head.*vitkit probe"):
            call(command, tmp_path / "tiny.safetensors", place / "photos" / what, "--workers", 0)
    call(
        "probe",
        place / "photos",
        "--from",
        tmp_path / "tiny.safetensors",
        "--out",
        tmp_path / "run",
        "--cache",
        place / "cache",
        "--workers",
        0,
        "--features",
        "mean",
    )
    assert vitkit.load(tmp_path / "run").config.pool == "mean"
    found = json.loads(call("eval", tmp_path / "run", place / "photos", "--workers", 0, "--json").stdout)
    assert found["confusion"] == json.loads((tmp_path / "run" / "evaluation.json").read_text())["confusion"]


def test_a_damaged_cache_is_said(place, tmp_path) -> None:
    (tmp_path / "features.sqlite").write_bytes(b"nonsense" * 1000)
    result = call("embed", place / "photos", "--from", place / "tiny.safetensors", "--cache", tmp_path, "--workers", 0)
    assert "damaged" in result.stderr
    with sqlite3.connect(tmp_path / "features.sqlite") as db:
        assert db.execute("SELECT COUNT(*) FROM features").fetchone() == (39,)
    db.close()


def test_json_is_alone_on_standard_output(place) -> None:
    """In a process of its own: libraries may write to the file descriptor past Python."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "vitkit",
            "eval",
            place / "run",
            place / "photos",
            "--json",
            "--workers",
            "1",
            "--out",
            place / "own",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n"] == 15


def test_a_class_called_none_survives_every_file(place, tmp_path) -> None:
    """Names that some readers take for missing values: through embed, probe, eval and predict."""
    names = ["NA", "None", "nan"]
    folder = photos(tmp_path / "photos", {"train": 4, "test": 2}, dict(zip(names, COLOURS.values())))
    how = ("--from", place / "tiny.safetensors", "--cache", tmp_path / "cache", "--workers", 0)
    call("embed", folder, *how, "--out", tmp_path / "f.parquet")
    call("embed", folder, *how, "--out", tmp_path / "f.npz")
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(tmp_path / "f.parquet").to_pylist()
    assert sorted({row["class"] for row in rows}) == names
    with np.load(tmp_path / "f.npz", allow_pickle=False) as arrays:
        assert arrays["class_names"].tolist() == names
    call("probe", folder, *how, "--out", tmp_path / "run")
    assert vitkit.load(tmp_path / "run").input_spec.class_names == tuple(names)
    said = call("predict", tmp_path / "run", folder / "test", "--top", 1, "--csv").stdout
    predicted = [row["class"] for row in csv.DictReader(io.StringIO(said))]
    assert set(predicted) == set(names)
    as_json = json.loads(call("predict", tmp_path / "run", folder / "test", "--top", 1, "--json").stdout)
    assert [row["guesses"][0]["name"] for row in as_json["predictions"]] == predicted

    call("eval", tmp_path / "run", folder, "--workers", 0, "--out", tmp_path / "numbers")
    for file, column in (("predictions", "truth"), ("predictions", "predicted"), ("per_class", "class")):
        table = csv.DictReader((tmp_path / "numbers" / f"{file}.csv").read_text(encoding="utf-8").splitlines())
        assert sorted({row[column] for row in table}) == names
    table = csv.DictReader((tmp_path / "numbers" / "confusion.csv").read_text(encoding="utf-8").splitlines())
    assert table.fieldnames == ["truth", *names]
