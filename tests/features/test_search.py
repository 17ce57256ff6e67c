from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import vitkit
from tests.features.samples import photos, saved, tiny
from vitkit.cli import app
from vitkit.data import open_source
from vitkit.errors import ConfigError, InputError
from vitkit.features import FeatureCache, fill, search
from vitkit.features.suggest import margins, suggest


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("search")
    photos(root / "set", {"train": 8, "test": 4})
    saved(root)
    return root


def test_the_nearest_are_those_of_the_whole_product(place, monkeypatch):
    monkeypatch.setattr(search, "BLOCK", 5)
    filled = fill(tiny(), open_source(place / "set"), FeatureCache(place / "cache"), workers=0)
    X = filled.read().features
    U = X / np.linalg.norm(X, axis=1, keepdims=True)
    found = search.vectors(filled)
    places, similarity = found.search(X[:7] * 3, 6)
    expected = np.argsort(-(U[:7] @ U.T), axis=1, kind="stable")[:, :6]
    assert np.array_equal(places, expected)
    assert np.allclose(similarity, np.take_along_axis(U[:7] @ U.T, expected, 1), atol=1e-6)
    assert (places[:, 0] == np.arange(7)).all()
    assert found.search(X[:1], 99)[0].shape == (1, 24)


def test_the_file_is_used_again_and_only_for_the_same_images(place):
    cache = FeatureCache(place / "cache")
    filled = fill(tiny(), open_source(place / "set"), cache, workers=0)
    first = search.vectors(filled)
    stamp = first.path.stat().st_mtime_ns
    assert first.path.parent == cache.path.parent
    assert search.vectors(filled).path.stat().st_mtime_ns == stamp
    other = search.vectors(fill(tiny(), open_source(place / "set", "test"), cache, workers=0))
    assert other.path != first.path
    changed = search.vectors(fill(tiny(), open_source(place / "set"), cache, features="mean", workers=0))
    assert changed.path != first.path
    whole = first.path.read_bytes()
    first.path.write_bytes(whole[:100])  # as after a full disk
    assert np.array_equal(search.vectors(filled).rows(), np.frombuffer(whole, "<f4").reshape(24, -1))


def test_equal_images_come_in_the_order_of_the_data(tmp_path):
    for name in "ba":
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (40, 40), (i * 90, 0, 0)).save(tmp_path / "set" / name / f"{i}.png")
    hits = vitkit.search(tiny(), tmp_path / "set", tmp_path / "set/a/1.png", count=2, cache=tmp_path, workers=0)[0]
    assert [(hit.label, hit.rank) for hit in hits] == [("a", 1), ("b", 2)]
    assert [hit.similarity for hit in hits] == pytest.approx([1, 1])


def test_near_duplicates_are_grouped_within_and_across_parts(tmp_path):
    rng = np.random.default_rng(0)
    for n, name in enumerate(("train/a/0", "train/a/1", "train/b/2", "train/b/3", "test/a/4", "test/b/5")):
        path = tmp_path / "set" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = rng.integers(0, 255, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((40, 40), Image.Resampling.NEAREST).save(path)
        if n in (0, 4):
            with Image.open(path) as image:
                image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(path.with_name(f"{n}-flipped.png"))
    whole = Image.open(tmp_path / "set/train/a/1.png")
    whole.save(tmp_path / "set/test/b/copy.png")
    whole.save(tmp_path / "set/train/b/other-label.bmp")
    groups = vitkit.near_duplicates(tiny(), tmp_path / "set", similarity=0.99999, cache=tmp_path, workers=0)
    (found,) = groups
    assert [(hit.split, hit.label, hit.rank) for hit in found] == [
        ("train", "a", 1),
        ("train", "b", 2),
        ("test", "b", 3),
    ]
    assert {hit.query for hit in found} == {found[0].filepath}
    assert [hit.similarity for hit in found] == pytest.approx([1, 1, 1])
    with pytest.raises(ConfigError, match=r"similarity above 0 and at most 1; got 1\.5"):
        vitkit.near_duplicates(tiny(), tmp_path / "set", similarity=1.5, cache=tmp_path, workers=0)


def test_the_command_lists_near_duplicates(place, tmp_path):
    words = ["search", str(place / "set"), "--from", str(place / "tiny.safetensors"), "--workers", "0"]
    words += ["--cache", str(tmp_path)]
    near = [*words, "--near-duplicates", "--similarity", "0.5"]
    run = CliRunner().invoke(app, [*near, "--export", str(tmp_path / "g.csv")])
    assert run.exit_code == 0, run.output
    assert "among 36 images" in run.stdout
    rows = list(csv.DictReader((tmp_path / "g.csv").read_text(encoding="utf-8").splitlines()))
    groups = json.loads(CliRunner().invoke(app, [*near, "--json"]).stdout)["groups"]
    assert [len(group) for group in groups] == sorted((len(group) for group in groups), reverse=True)
    assert len(rows) == sum(map(len, groups)) > 1
    for wrong, words_of in (
        (words, "either photos to search for or --near-duplicates"),
        ([*near, str(place / "set/test/red/2.png")], "either photos to search for or --near-duplicates"),
        ([*words, str(place / "set/test/red/2.png"), "--similarity", "0.9"], "--similarity is for --near-duplicates"),
    ):
        refused = CliRunner().invoke(app, wrong)
        assert isinstance(refused.exception, InputError)
        assert words_of in str(refused.exception)


def test_the_command_searches_all_parts_and_exports(place, tmp_path):
    query = place / "set/test/red/2.png"
    words = ["search", str(place / "set"), str(query), "--from", str(place / "tiny.safetensors"), "--count", "5"]
    words += ["--cache", str(place / "cache"), "--workers", "0"]
    run = CliRunner().invoke(app, [*words, "--export", str(tmp_path / "hits.csv")])
    assert run.exit_code == 0, run.stdout
    assert run.stdout.splitlines()[1].split() == ["1.000", str(query), "(red)"]
    with open(tmp_path / "hits.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert {row["label"] for row in rows} == {"red"}
    assert {row["split"] for row in rows} == {"train", "test"}
    run = CliRunner().invoke(app, [*words, "--json", "--export", str(tmp_path / "hits.parquet")])
    pyarrow = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.read_table(tmp_path / "hits.parquet").to_pylist()
    assert table == json.loads(run.stdout)["queries"][0]
    assert [str(row["similarity"])[:5] for row in table] == [row["similarity"][:5] for row in rows]
    run = CliRunner().invoke(app, [*words, "--export", "hits.xlsx"])
    assert isinstance(run.exception, ConfigError)
    assert "embedding" not in run.stderr


def test_a_folder_without_classes_can_be_searched(place):
    folder = place / "set/train/green"
    hits = vitkit.search(tiny(), folder, folder / "3.png", count=3, cache=place / "cache", workers=0)[0]
    assert hits[0].filepath == str(folder / "3.png")
    assert hits[0].label == ""


def test_an_unreadable_photo_hides_nothing(place, tmp_path):
    photos(tmp_path / "set", {"": 2})
    (tmp_path / "set/red/0.png").write_bytes(b"")
    hits = vitkit.search(tiny(), tmp_path / "set", tmp_path / "set/red/1.png", count=9, cache=tmp_path, workers=0)[0]
    assert len(hits) == 5
    assert hits[0].filepath.endswith("red/1.png")
    words = ["search", str(tmp_path / "set"), "--from", str(place / "tiny.safetensors"), "--cache", str(tmp_path)]
    for what in ("--near-duplicates", str(tmp_path / "set/red/1.png")):
        run = CliRunner().invoke(app, [*words, what, "--workers", "0"])
        assert run.exit_code == 1, run.output
        assert run.stderr.count("vitkit: skipped red/0.png: the file is empty (0 bytes)") == 1
        assert "6 images" not in run.stdout


# what to label next


def test_margins():
    logits = np.log(np.array([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25]]))
    assert margins(logits) == pytest.approx([0.5, 0.05])
    assert margins(np.zeros((2, 1))) == pytest.approx([1, 1])


def test_suggestions_are_uncertain_and_differ_from_each_other():
    """Four unsure photos, three of them copies of one: the copies are taken last, after the sure ones."""
    X = np.array([[1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0.5, 0.5, 0]], np.float32)
    logits = np.array([[0.01, 0], [0, 0], [0.02, 0], [0.1, 0], [9, 0], [8, 0]])
    assert suggest(X, logits, 2).tolist() == [1, 3]
    assert suggest(X, logits, 1).tolist() in ([1], [3])
    assert suggest(X, logits, 99).tolist()[:2] == [1, 3]
    assert suggest(X, logits, 99).tolist()[4:] == [0, 2]
    with pytest.raises(ConfigError, match="count"):
        suggest(X, logits, 0)


def test_every_group_of_unsure_photos_is_asked_about():
    rng = np.random.default_rng(0)
    group = np.arange(90) % 3
    X = np.eye(3, 8)[group] + 0.02 * rng.normal(size=(90, 8))
    logits = np.zeros((90, 2))
    logits[group == 0, 0] = 0.001  # a little less unsure than the others, and there are enough of those
    assert set(group[suggest(X, logits, 3)]) == {0, 1, 2}
    logits[group == 0, 0] = 9
    assert (group[suggest(X, logits, 2)] > 0).all()


def test_only_the_most_uncertain_are_candidates():
    rng = np.random.default_rng(0)
    logits = np.stack([np.arange(1000.0), np.zeros(1000)], 1)
    assert suggest(rng.normal(size=(1000, 8)), logits, 3).max() < 120


def test_the_command_writes_a_list_that_becomes_a_data_set(place, tmp_path):
    vitkit.probe(tiny(), place / "set", tmp_path / "run", cache=place / "cache", workers=0)
    (tmp_path / "new").mkdir()
    for i in range(6):
        mixed = Image.blend(Image.open(place / "set/test/red/0.png"), Image.open(place / "set/test/blue/0.png"), i / 5)
        mixed.save(tmp_path / "new" / f"{i}.png")
    (tmp_path / "new/broken.png").write_bytes(b"")
    out = tmp_path / "list.csv"
    run = CliRunner().invoke(
        app,
        ["suggest", str(tmp_path / "run"), str(tmp_path / "new"), "--count", "4", "--out", str(out), "--workers", "0",
         "--cache", str(place / "cache")],
    )  # fmt: skip
    assert run.exit_code == 1  # a photo could not be read
    assert "broken.png" in run.stderr
    with open(out, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert {row["guess"] for row in rows} <= {"red", "blue", "green"}
    best = vitkit.suggest(tmp_path / "run", tmp_path / "new", count=4, cache=place / "cache", workers=0).photos
    assert [row["path"] for row in rows] == [one.image for one in best]
    told = {one.image: one for one in vitkit.predict(tmp_path / "run", [one.image for one in best], top=2)}
    for one in best:
        guesses = told[one.image].guesses
        assert one.guess == guesses[0].name
        assert one.margin == pytest.approx(guesses[0].probability - guesses[1].probability, abs=1e-4)
    text = out.read_text(encoding="utf-8").splitlines()
    out.write_text("\n".join([text[0], *(line + label for line, label in zip(text[1:], "abab"))]), encoding="utf-8")
    assert open_source(out, "all").class_names == ("a", "b")


def test_a_model_without_classes_cannot_suggest(place):
    with pytest.raises(ConfigError, match="at least two classes"):
        vitkit.suggest(tiny(num_classes=0), place / "set", cache=place / "cache", workers=0)
