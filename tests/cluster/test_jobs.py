"""Jobs without Ray: the same numbers as one machine, rows with errors, folders that resume, and what is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests import s3
from tests.cluster.samples import here, model, place  # noqa: F401
from vitkit.cli import app
from vitkit.cluster import on_ray, plan, results
from vitkit.cluster.results import Entry, Folder, Manifest
from vitkit.cluster.work import Decoder
from vitkit.data import open_source
from vitkit.data.base import Subset
from vitkit.errors import BadImage, ConfigError, DataError, InputError, OutputError, VitkitError
from vitkit.evaluation.logits import logits_of
from vitkit.evaluation.predict import predict
from vitkit.features import unknown
from vitkit.features.cache import FeatureCache
from vitkit.features.embed import embed
from vitkit.jobs import on_ray as job
from vitkit.jobs.embed import parts_of
from vitkit.jobs.evaluate import evaluate

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return place(tmp_path_factory.mktemp("cluster"))


def call(*words: object, error: type[VitkitError] | None = None) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if error is not None:
        assert isinstance(result.exception, error), result.output
    elif result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize(("fewest", "shards"), [(64, 8), (2, 3)])  # one batch per shard, and three
def test_embed_gives_the_features_of_one_machine_to_the_bit(
    at: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fewest: int, shards: int
) -> None:
    monkeypatch.setattr(plan, "FEWEST", fewest)
    source = open_source(at / "photos", "all")
    done = job.run("embed", model(), {"all": source}, tmp_path / "out", batch_size=4)
    one = embed(model(), source, FeatureCache(tmp_path), batch_size=4, workers=0, bad_images="skip")
    found = rows(tmp_path / "out")
    assert [row["name"] for row in found] == list(source.names)
    assert np.array_equal(np.array([r["feature"] for r in found if r["feature"]], np.float32), one.features)
    assert [row["class"] for row in found] == [source.said(i) for i in range(len(source))]
    assert [row["label"] for row in found] == source.labels.tolist()
    for row in found:
        assert row["sha256"] == hashlib.sha256((at / "photos" / row["name"]).read_bytes()).hexdigest()
        assert (row["error"] is None) == (row["feature"] is not None) == (row["name"] != "bee/003.jpg")
    assert "not an image" in next(row["error"] for row in found if row["error"])
    assert [name for name, _ in done.skipped] == ["bee/003.jpg"]
    assert (done.images, done.computed, len(done.shards)) == (30, 30, shards)


def test_eval_prints_and_writes_what_one_machine_does(at: Path, tmp_path: Path) -> None:
    words = ("eval", at / "tiny.safetensors", at / "photos", "--batch-size", 4, "--no-report", "--json")
    one = call(*words, "--bad-images", "skip", "--workers", 0, "--out", tmp_path / "one")
    many = call(*words, "--on", "ray", "--out", tmp_path / "many")
    assert one.exit_code == many.exit_code == 1  # an image could not be read
    one_said, many_said = json.loads(one.stdout), json.loads(many.stdout)
    assert many_said.pop("precision") == "fp32 on Ray"
    assert one_said.pop("precision") == "fp32"
    assert one_said.pop("seconds") > 0 < many_said.pop("seconds")
    assert one_said == many_said
    assert "bee/003.jpg" in many.stderr
    for name in ("predictions.csv", "per_class.csv", "confusion.csv"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()
    logits = np.array([row["logits"] for row in rows(tmp_path / "many") if row["logits"]], np.float32)
    source = open_source(at / "photos", "all")
    assert np.array_equal(logits, logits_of(model(), source, batch_size=4, bad_images="skip").logits)
    text = call(*words[:-1], "--on", "ray", "--out", tmp_path / "many").stdout
    assert "top-1" in text
    assert "Most confident errors" in text


def test_predict_gives_the_answers_of_one_machine(at: Path, tmp_path: Path) -> None:
    words = ("predict", at / "tiny.safetensors", at / "photos", "--batch-size", 4)
    one = json.loads(call(*words, "--json", "--workers", 0, "--top", 1).stdout)
    many = call(*words, "--on", "ray", "--out", tmp_path / "out")
    assert many.exit_code == 1
    assert "30 images, 30 computed now" in many.stdout
    assert "1 of 30 images could not be read" in many.stderr
    found = [row for row in rows(tmp_path / "out") if row["answer"]]
    best = [(p["image"], p["guesses"][0]) for p in one["predictions"]]
    assert [row["name"] for row in found] == [image for image, _ in best]
    for row, (_, guess) in zip(found, best, strict=True):
        assert (row["answer"], row["index"], row["probability"]) == tuple(guess.values())
    assert "label" not in found[0]  # nobody said what the photos show


def test_predict_says_none_of_these_as_one_machine_does(at: Path, tmp_path: Path) -> None:
    source = open_source(at / "photos", "all")
    judge, one = model(), embed(model(), source, FeatureCache(tmp_path), workers=0, bad_images="skip")
    known = unknown.fit(one.features, one.labels, judge.input_spec)
    judge.known = replace(known, limit=float(np.median(unknown.distances(known, one.features))))
    job.run("predict", judge, job.images_of([str(at / "photos")]), tmp_path / "out", batch_size=4)
    expected = predict(judge, at / "photos", top=1, batch_size=4, bad_images="skip")
    found = [row for row in rows(tmp_path / "out") if row["error"] is None]
    assert [(row["answer"], row["distance"]) for row in found] == [(one.name, one.distance) for one in expected]
    none = [row["index"] is None for row in found]
    assert none == [one.none_of_these for one in expected]
    assert 0 < sum(none) < len(none)


def test_an_unreadable_image_fails_the_job_if_you_say_so(at: Path, tmp_path: Path) -> None:
    out, words = tmp_path / "out", ("embed", at / "photos", "--from", at / "tiny.safetensors", "--batch-size", 4)
    words += ("--on", "ray", "--out", out)
    stopped = str(call(*words, "--bad-images", "fail", error=BadImage).exception)
    assert "003.jpg" in stopped
    assert "--bad-images skip" in stopped
    kept = (out / "manifest.jsonl").read_bytes()
    assert 0 < len(kept.splitlines()) < 8
    again = call(*words, "--bad-images", "fail", error=BadImage)  # at once: the manifest knows
    assert (str(again.exception), (out / "manifest.jsonl").read_bytes()) == (stopped, kept)
    done = call(*words, "--bad-images", "skip")
    assert done.exit_code == 1
    assert len(rows(out)) == 30
    call(*words, "--bad-images", "maybe", error=ConfigError)
    evaluated = ("eval", at / "tiny.safetensors", at / "photos", "--on", "ray", "--out", tmp_path / "eval")
    call(*evaluated, "--bad-images", "fail", error=BadImage)
    assert not (tmp_path / "eval" / "evaluation.json").exists()


def test_what_predict_takes(at: Path, tmp_path: Path) -> None:
    def names(*given: object) -> dict[str, list[str]]:
        return {part: list(source.names) for part, source in job.images_of([str(one) for one in given]).items()}

    photos = at / "photos"
    assert names(photos / "ant/000.jpg", photos / "cat") == {
        "all": [str(photos / "ant/000.jpg"), *(str(photos / f"cat/{n:03d}.jpg") for n in range(10))]
    }
    (tmp_path / "table.csv").write_text("path,label,split\na.jpg,x,train\nb.jpg,y,val\n")
    assert names(tmp_path / "table.csv") == {"train": ["a.jpg"], "val": ["b.jpg"]}
    labelled = job.images_of([str(tmp_path / "table.csv")])["val"]
    assert (labelled.class_names, labelled.labels.tolist()) == (("x", "y"), [1])
    assert job.images_of([str(photos)])["all"].class_names == ()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="it has none"):
        names(tmp_path / "empty")


def test_a_killed_job_does_what_its_manifest_lacks(at: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out, sources = tmp_path / "whole", tmp_path / "out", parts_of(at / "photos")
    job.run("embed", model(), sources, whole, batch_size=4)
    engine = on_ray.run

    def killed(*given: Any, **how: Any) -> Any:
        for number, entry in enumerate(engine(*given, **how)):
            if number == 3:  # written, but not listed
                raise KeyboardInterrupt
            yield entry

    monkeypatch.setattr(on_ray, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        job.run("embed", model(), sources, out, batch_size=4)
    monkeypatch.setattr(on_ray, "run", engine)
    lines = (out / results.MANIFEST).read_bytes()
    assert lines.count(b"\n") == 3
    (out / results.MANIFEST).write_bytes(lines[:-20])  # the machine lost power in the middle of a line
    (out / "all-00000.parquet").write_bytes(b"changed")
    (out / ".vitkit-left").mkdir()
    ticks: list[int] = []
    done = job.run("embed", model(), sources, out, batch_size=4, progress=ticks.append)
    assert (done.computed, ticks[0]) == (26, 4)  # only the second shard was whole and listed
    assert sum(ticks) == 30
    assert not (out / ".vitkit-left").exists()
    for file in whole.glob("*.parquet"):
        assert (out / file.name).read_bytes() == file.read_bytes()
    again = job.run("embed", model(), sources, out, batch_size=4)
    assert again.computed == 0
    entries = [json.loads(line) for line in (out / results.MANIFEST).read_text().splitlines() if line.endswith("}")]
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in out.glob("*.parquet")}
    assert {entry["shard"]: entry["sha256"] for entry in entries} == hashes
    assert sum({entry["shard"]: entry["rows"] for entry in entries}.values()) == 30


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"batch_size": 8}, "batch_size: 4 there, 8 here"),
        ({"features": "mean"}, "features: cls there, mean here"),
        ({"precision": "bf16"}, "precision: fp32 there, bf16 here"),
        ({"model": model(hidden_act="relu")}, "weights: "),
        ({"images": 29}, "images, all: 30 there, 29 here"),
    ],
)
def test_a_folder_of_another_job_is_refused(at: Path, tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    job.run("embed", model(), parts_of(at / "photos"), tmp_path, batch_size=4)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    data = {"all": Subset(open_source(at / "photos", "all"), range(changed.pop("images", 30)))}
    other = changed.pop("model", model())
    with pytest.raises(OutputError, match=f"holds others \\({says}"):
        job.run("embed", other, data, tmp_path, **({"batch_size": 4} | changed))
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


def test_a_folder_with_another_job_json_is_refused(at: Path, tmp_path: Path) -> None:
    (tmp_path / results.JOB).write_text("[]")
    with pytest.raises(OutputError, match=r"Expected a job\.json of vitkit"):
        job.run("embed", model(), parts_of(at / "photos"), tmp_path)


def test_a_shard_that_was_changed_is_not_measured(at: Path, tmp_path: Path) -> None:
    source = open_source(at / "photos", "all")
    done = job.run("eval", model(), {"all": source}, tmp_path, batch_size=4)
    (tmp_path / "all-00001.parquet").write_bytes((tmp_path / "all-00000.parquet").read_bytes())
    with pytest.raises(DataError, match=r"all-00001\.parquet .* is missing or was changed"):
        list(done.manifest.read(shard.name for shard in done.shards))


def test_several_labels_and_data_in_memory(tmp_path: Path) -> None:
    digits = parts_of("digit-pairs", "test")
    names = next(iter(digits.values())).class_names
    several = model(num_classes=len(names))
    several.input_spec = replace(several.input_spec, class_names=names, thresholds=(0.5,) * len(names))
    source = Subset(digits["test"], range(70))
    found = evaluate(several, source, elsewhere=partial(job.logits, several, source, tmp_path / "out", batch_size=64))
    one = logits_of(several, source, batch_size=64)
    assert np.array_equal(found.outputs.logits, one.logits)
    assert np.array_equal(found.outputs.labels, source.labels)
    row = rows(tmp_path / "out")[0]
    assert row["labels"] == source.said(0).replace("no label", "").split("|") or row["labels"] == []
    assert len(row["answers"]) == len(row["probabilities"])


def test_nothing_readable_is_an_error_and_its_shards_are_valid(tmp_path: Path) -> None:
    for n in range(5):
        (tmp_path / "bad/ant").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"bad/ant/{n}.jpg").write_bytes(b"")
    sources = {"all": open_source(tmp_path / "bad", "all")}
    assert len(job.run("embed", model(), sources, tmp_path / "out", batch_size=2).skipped) == 5
    assert [row["feature"] for row in rows(tmp_path / "out")] == [None] * 5
    with pytest.raises(DataError, match="Expected at least one readable image"):
        job.logits(model(), sources["all"], tmp_path / "eval", batch_size=2)


def test_nan_is_an_error_that_names_the_image(at: Path, tmp_path: Path) -> None:
    import torch

    broken = model()
    torch.nn.init.constant_(broken.norm.weight, float("nan"))
    for task in ("embed", "eval"):
        with pytest.raises(InputError, match=r"Expected finite .*; ant/000\.jpg gave NaN"):
            job.run(task, broken, parts_of(at / "photos"), tmp_path / task)


def test_storage_that_does_not_answer_stops_the_job_and_makes_no_row(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.cluster.plan import Shard
    from vitkit.errors import BadImage, Unreachable

    source = open_source(at / "photos", "all")

    def raw(i: int) -> bytes:
        raise Unreachable("ant/000.jpg: could not be fetched (timeout).")

    monkeypatch.setattr(source, "raw", raw)
    with pytest.raises(DataError, match="could not be fetched") as stopped:
        Decoder({"all": source}, model().input_spec)(Shard("all", 0, 0, 2))
    assert not isinstance(stopped.value, BadImage)


def test_a_machine_without_the_data_stops_the_job_and_makes_no_rows(at: Path) -> None:
    from vitkit.cluster.plan import Shard

    source = open_source(at / "photos", "all")
    decode = Decoder({"all": source}, model().input_spec)
    (at / "photos/ant/005.jpg").rename(at / "photos/ant/aside")  # one file is gone: a bad image
    try:
        assert [bool(error) for error in decode(Shard("all", 0, 4, 7)).errors] == [False, True, False]
    finally:
        (at / "photos/ant/aside").rename(at / "photos/ant/005.jpg")
    (at / "photos").rename(at / "elsewhere")  # all of them: not mounted on this machine
    try:
        with pytest.raises(DataError, match=r"Expected the data on every machine; .* has no folder .*photos"):
            decode(Shard("all", 0, 0, 2))
    finally:
        (at / "elsewhere").rename(at / "photos")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("embed {d} --from {w} --on spark --out {o}", "Expected --on ray; got --on spark"),
        ("embed {d} --from {w} --on ray", "--on ray needs --out FOLDER"),
        ("embed {d} --from {w} --on ray --out {o} --cache {o}", "--cache has no meaning with --on ray"),
        ("embed {d} --from {w} --on ray --out {o} --device cuda", "a cluster with GPUs for --device cuda; it has none"),
        ("embed {d} --from {w} --on ray --out {o} --device cuda:1", "--device is one of auto, cpu, cuda"),
        ("predict {w} {d} --on ray --out {o} --precision bf16", "predict computes in fp32; got --precision bf16"),
        ("embed {d} --from {w} --on ray --out {o} --precision fp16", "fp16 runs on GPUs only"),
        ("predict {w} {d} --on ray --out {o} --csv", "--csv has no meaning with --on ray"),
        ("predict {w} - --on ray --out {o}", "--on ray does not read standard input"),
        ("eval {w} {d} --on ray --out {o} --engine onnx", "--engine has no meaning with --on ray"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(at: Path, tmp_path: Path, words: str, says: str) -> None:
    filled = words.format(d=at / "photos", w=at / "tiny.safetensors", o=tmp_path / "out").split()
    assert says in str(call(*filled, error=ConfigError).exception)
    assert not (tmp_path / "out").exists()


def test_ray_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match="ray job submit"):
        on_ray.connect()


def test_data_and_results_at_s3_addresses(at: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3.store() as bucket:
        data = s3.upload(at / "photos", f"{bucket}/photos")
        out = f"{bucket}/results/here"
        done = job.run("embed", model(), parts_of(data), out, batch_size=4)
        job.run("embed", model(), parts_of(at / "photos"), tmp_path / "disk", batch_size=4)
        for shard in done.shards:
            assert Folder(out).read(shard.name) == (tmp_path / "disk" / shard.name).read_bytes()
        assert len((Folder(out).read(results.MANIFEST) or b"").splitlines()) == len(done.shards)
        assert job.run("embed", model(), parts_of(data), out, batch_size=4).computed == 0
        Folder(out).write("all-00002.parquet", b"changed")
        assert job.run("embed", model(), parts_of(data), out, batch_size=4).computed == 4
        said = call("predict", at / "tiny.safetensors", data, "--on", "ray", "--out", f"{bucket}/answers", "--json")
        assert json.loads(said.stdout)["images"] == 30
        # The manifest on S3 is written every few seconds, and at the end.
        manifest = Manifest(Folder(f"{bucket}/m"), {}, {})
        monkeypatch.setattr(results, "SECONDS", float("inf"))
        manifest.add(Entry("a", 1, 0, ""))
        assert Folder(f"{bucket}/m").read(results.MANIFEST) is None
        monkeypatch.setattr(results, "SECONDS", -1.0)
        manifest.add(Entry("b", 1, 0, ""))
        assert [*Manifest(Folder(f"{bucket}/m"), {}, {}).entries] == ["a", "b"]
