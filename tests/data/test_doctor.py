from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

import vitkit
from tests.data.images import BAD, class_folder, encoded, odd_files, picture
from vitkit.cli import app
from vitkit.data import clean, examine, open_source
from vitkit.data.doctor import Place, describe
from vitkit.errors import DataError, OutputError
from vitkit.jobs.probe import parts_of

EXPECTED = {  # file -> (level, words of its reason)
    "truncated.jpg": ("bad", "truncated"),
    "truncated.png": ("bad", "truncated"),
    "empty.jpg": ("bad", "0 bytes"),
    "text.jpg": ("bad", "not an image"),
    "bomb.png": ("bad", "decompression bomb"),
    "cmyk.jpg": ("note", "CMYK"),
    "sixteen.png": ("note", "16-bit"),
    "palette.png": ("note", "palette"),
    "animated.gif": ("note", "first of 3 frames"),
    "misnamed.png": ("note", "JPEG file with the ending .png"),
    "rotated.jpg": ("note", "EXIF-rotated"),
    "huge.jpg": ("note", "very large: 20000 x 40 px"),
    "rgba.png": ("note", "alpha channel is dropped"),
}


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "set"
    class_folder(root / "train", {"good": 10, "other": 4})
    (root / "train/odd").mkdir()
    for name, data in odd_files().items():
        (root / "train/odd" / name).write_bytes(data)
    (root / "test/other").mkdir(parents=True)
    (root / "test/other/x.jpg").write_bytes(encoded(picture(500)))
    shutil.copy(root / "train/good/003.jpg", root / "test/other/copy.jpg")
    shutil.copy(root / "train/good/004.jpg", root / "train/good/again.jpg")
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_every_odd_file_is_named_with_its_reason(folder, workers):
    told = []
    report = examine(folder, workers=workers, progress=lambda done, total: told.append((done, total)))
    for name, (level, words) in EXPECTED.items():
        found = [f for f in report.findings if f.name == f"odd/{name}" and words in f.reason]
        assert [f.level for f in found] == [level], name
        assert found[0].split == "train"
    assert {f.name for f in report.bad} == {f"odd/{name}" for name in BAD}
    assert all(f.useless for f in report.bad)
    assert not [f for f in report.findings if f.name.startswith(("good/", "other/")) or f.name.endswith("good.jpg")]
    assert told[-1] == (32, 32)
    assert sorted(told) == told


def test_balance_sizes_and_duplicates(folder):
    report = examine(folder, workers=0)
    assert report.images == {"train": 30, "test": 2}
    assert report.classes == {"train": {"good": 11, "odd": 15, "other": 4}, "test": {"good": 0, "odd": 0, "other": 2}}
    assert report.imbalance == pytest.approx(15 / 4)
    assert report.sizes["width"] == [40, 64, 20_000]
    assert report.sizes["height"][2] == 120
    leak = [Place("train", "good/003.jpg", "good"), Place("test", "other/copy.jpg", "other")]
    assert report.across == report.conflicts == [leak]
    assert [Place("train", "good/004.jpg", "good"), Place("train", "good/again.jpg", "good")] in report.duplicates
    assert report.modes["JPEG L"] == 1


@pytest.mark.parametrize(("side", "noted"), [(9_999, False), (10_000, True)])
def test_a_side_of_10000_pixels_is_noted(side, noted):
    notes, kind = describe(encoded(Image.new("RGB", (3, side))), "x.jpg")
    assert kind == "JPEG"
    assert bool(notes) is noted


def contents(folder: Path) -> dict[Path, bytes]:
    return {f.relative_to(folder): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_a_cleaned_copy_has_the_good_images_and_the_original_is_untouched(folder, tmp_path):
    before = contents(folder)
    done = clean(examine(folder, workers=0), tmp_path / "clean")
    assert contents(folder) == before
    kept = contents(tmp_path / "clean")
    assert done.kept == len(kept)
    assert all(before[name] == data for name, data in kept.items())
    lost = {str(name) for name in before} - {str(name) for name in kept}
    assert lost == set(done.left_out) == set(json.loads((tmp_path / "clean.json").read_text())["left_out"])
    two = "the same photo has the labels good and other"
    assert (
        done.left_out
        == {
            **{f"train/odd/{name}": done.left_out[f"train/odd/{name}"] for name in BAD},
            "train/odd/misnamed.png": "a copy of odd/good.jpg",
            "train/good/again.jpg": "a copy of good/004.jpg",
            "train/good/003.jpg": two,
            "test/other/copy.jpg": two,
        }
        or "train/odd/rgba.png" not in done.left_out
    )
    assert done.left_out["train/odd/empty.jpg"] == "the file is empty (0 bytes)"
    again = examine(tmp_path / "clean", workers=0)
    assert again.healthy
    assert not again.duplicates
    assert len(open_source(tmp_path / "clean")) == again.images["train"]


def test_a_photo_in_two_splits_stays_only_where_it_is_judged(tmp_path):
    class_folder(tmp_path / "set/train", {"a": 3, "b": 3})
    for split in ("val", "test"):
        (tmp_path / f"set/{split}/a").mkdir(parents=True)
        shutil.copy(tmp_path / "set/train/a/001.jpg", tmp_path / f"set/{split}/a/leak.jpg")
    done = clean(examine(tmp_path / "set", workers=0), tmp_path / "clean")
    assert done.left_out == {"train/a/001.jpg": "also in val: a/leak.jpg"}


def test_a_list_of_good_images_is_a_data_set(folder, tmp_path):
    before = contents(folder)
    done = clean(examine(folder, workers=0), tmp_path / "lists/good.csv")
    assert contents(folder) == before
    copied = clean(examine(folder, workers=0), tmp_path / "clean")
    assert done.kept == copied.kept
    assert done.left_out == copied.left_out
    for split in ("train", "test"):
        listed, copy = open_source(tmp_path / "lists/good.csv", split), open_source(tmp_path / "clean", split)
        assert [listed.raw(i) for i in range(len(listed))] == [copy.raw(i) for i in range(len(copy))]
    again = clean(examine(tmp_path / "lists/good.csv", workers=0), tmp_path / "again.csv")  # a table can be cleaned too
    assert again.left_out == {}


@pytest.mark.skipif(os.name == "nt", reason="Windows allows no such names")
def test_a_list_has_no_formulas_and_the_same_names(tmp_path):
    names = ["'+x", "'=1+1", "-1.5", "=1+1", "@b", "a"]
    for i, name in enumerate(names):
        (tmp_path / "set" / name).mkdir(parents=True)
        picture(i).save(tmp_path / "set" / name / "=x.png")
    clean(examine(tmp_path / "set", workers=0), tmp_path / "good.csv")
    with open(tmp_path / "good.csv", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [cell for cell in cells if cell[0] in "=+@-" and cell != "-1.5"]
    assert sorted(open_source(tmp_path / "good.csv", "all").class_names) == names


@pytest.mark.parametrize(
    ("data", "out", "words"),
    [
        ("set", "set/train/new", "outside of the data"),
        ("set", "set/good.csv", "outside of the data"),
        ("set", ".", "exists"),
        ("set/t.csv", "new", r"ends in \.csv"),
        ("digits", "new.csv", "'digits' source"),
    ],
)
def test_a_place_where_nothing_may_be_written_is_refused_first(tmp_path, monkeypatch, data, out, words):
    monkeypatch.chdir(tmp_path)
    class_folder(tmp_path / "set/train", {"a": 2})
    (tmp_path / "set/t.csv").write_text("path,label\ntrain/a/000.jpg,a\n")
    before = contents(tmp_path)
    with pytest.raises((DataError, OutputError), match=words):
        clean(examine(data, workers=0), out)
    run = CliRunner().invoke(app, ["doctor", data, "--fix", out])
    assert isinstance(run.exception, DataError | OutputError)
    assert "decoding" not in run.stderr
    assert contents(tmp_path) == before


def test_damage_that_pillow_passes_over_is_noted(tmp_path):
    pytest.importorskip("simplejpeg")
    class_folder(tmp_path, {"a": 2}, (200, 150))
    file = tmp_path / "a/000.jpg"
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 2] = b"\xff\xd9"  # an end marker in the middle of the picture
    file.write_bytes(bytes(data))
    report = examine(tmp_path, workers=0)
    assert any(f.name == "a/000.jpg" for f in report.findings)
    assert not [f for f in report.findings if f.name == "a/001.jpg"]


def test_sources_without_files_are_examined_too():
    report = examine("digits", workers=0)
    assert report.images == {"all": 1797}
    assert report.sizes == {"width": [8, 8, 8], "height": [8, 8, 8]}
    assert not report.bad


def test_the_command(folder):
    run = CliRunner().invoke(app, ["doctor", str(folder), "--workers", "0"])
    assert run.exit_code == 1
    for name in EXPECTED:
        assert f"odd/{name}" in run.stdout
    assert "train/good/003.jpg = test/other/copy.jpg" in run.stdout
    assert "decoding: 32 of 32" in run.stderr
    out = str(folder.with_name("clean"))
    run = CliRunner().invoke(app, ["doctor", str(folder), "--workers", "0", "--json", "--fix", out])
    assert run.exit_code == 0
    report = json.loads(run.stdout)
    assert {f["name"] for f in report["findings"] if f["level"] == "bad"} == {f"odd/{name}" for name in BAD}
    assert report["duplicates_across_splits"] == report["duplicates_with_two_labels"]
    assert report["duplicates_across_splits"][0][0] == {"split": "train", "name": "good/003.jpg", "label": "good"}
    assert report["cleaned"] == out
    run = CliRunner().invoke(app, ["doctor", out, "--workers", "0"])
    assert run.exit_code == 0
    assert "can be read" in run.stdout


def test_food_is_well(shared_data):
    report = examine(shared_data / "pizza_steak_sushi")
    assert report.images == {"train": 225, "test": 75}
    assert not report.bad
    assert not report.across


def test_the_page_shows_the_pictures(folder, tmp_path):
    report = vitkit.doctor(folder, page=tmp_path / "page.html", workers=0)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for words in ("odd/empty.jpg", "the file is empty (0 bytes)", "The same photo with two labels", "odd/huge.jpg"):
        assert words in page
    inside = [group for group in report.duplicates if group not in report.across]
    shown = [*report.conflicts, *report.across, *inside, *report.near]
    assert page.count("<img") == len(report.notes) + sum(map(len, shown))
    assert "<script" not in page


def short(folder: Path) -> list[tuple[str, str, str]]:
    report = examine(folder, workers=0)
    assert not (report.healthy and any(problem.level == "bad" for problem in report.problems))
    return [(p.level, p.where, p.reason) for p in report.problems if "only one" in p.reason]


def test_what_training_refuses_is_a_problem(tmp_path):
    """A class with one image and no part to judge by; a single class."""
    class_folder(tmp_path / "one", {"a": 3, "b": 1})
    needed = "one to train on and one to hold out are needed"
    assert short(tmp_path / "one") == [
        ("bad", "class 'b'", f"only one image; {needed}. Add images, or remove the class.")
    ]
    with pytest.raises(DataError, match="'b' has 1"):
        parts_of(tmp_path / "one", 0)
    class_folder(tmp_path / "single", {"a": 3})
    assert short(tmp_path / "single") == [
        ("bad", "classes", "only one, 'a'; a classifier needs at least two. Add images of another class.")
    ]
    with pytest.raises(DataError, match="at least two classes"):
        parts_of(tmp_path / "single", 0)
    class_folder(tmp_path / "many", dict.fromkeys("abcdefgh", 1))
    where, words = "classes 'a', 'b', 'c', 'd', 'e' and 3 more", f"only one image each; {needed}."
    assert short(tmp_path / "many") == [("bad", where, f"{words} Add images, or remove the classes.")]
    (tmp_path / "one/b/001.jpg").write_bytes(b"broken")  # an image that cannot be read does not count
    assert [where for _, where, _ in short(tmp_path / "one")] == ["class 'b'"]


def test_one_training_image_will_do_where_others_are_judged_by(tmp_path):
    class_folder(tmp_path / "set/train", {"a": 3, "b": 1})
    class_folder(tmp_path / "set/test", {"a": 2, "b": 2})
    noted = "only one training image; `vitkit train` needs another to validate on, or --val 0."
    assert short(tmp_path / "set") == [("note", "class 'b'", noted)]
    assert len(parts_of(tmp_path / "set", 0).train) == 4
    class_folder(tmp_path / "set/val", {"a": 2, "b": 2})
    assert short(tmp_path / "set") == []


def test_one_image_with_a_label_is_a_problem_and_one_label_is_not(tmp_path):
    class_folder(tmp_path / "set", {"x": 4})
    table = tmp_path / "t.csv"
    rows = [f"set/x/{i:03}.jpg,{label}" for i, label in enumerate(("a", "a|b", "a|b", ""))]
    table.write_text("\n".join(["path,labels", *rows]))
    assert short(table) == []
    table.write_text("\n".join(["path,labels", *rows[:2], *rows[3:]]))
    assert [row[:2] for row in short(table)] == [("bad", "label 'b'")]
    table.write_text("\n".join(["path,labels", "set/x/000.jpg,a", "set/x/001.jpg,a", "set/x/002.jpg,"]))
    assert short(table) == []


def test_a_cleaned_copy_that_cannot_be_trained_on_says_so(tmp_path):
    class_folder(tmp_path / "set", {"a": 3, "b": 2})
    shutil.copy(tmp_path / "set/b/000.jpg", tmp_path / "set/b/001.jpg")  # after cleaning, b has one image
    run = CliRunner().invoke(app, ["doctor", str(tmp_path / "set"), "--workers", "0", "--fix", str(tmp_path / "new")])
    assert run.exit_code == 1
    assert "still a problem: class 'b': only one image; one to train on" in run.stdout
    assert contents(tmp_path / "new").keys() == {Path(f"a/00{i}.jpg") for i in range(3)} | {Path("b/000.jpg")}
    table = tmp_path / "t.csv"
    rows = [f"set/a/{i:03}.jpg,{label}" for i, label in enumerate(("a", "a|b", ""))]
    table.write_text("\n".join(["path,labels", *rows]))
    found = clean(examine(table, workers=0), tmp_path / "good.csv").problems
    assert [problem.where for problem in found] == ["label 'b'"]


def test_paths_are_those_of_the_data(tmp_path):
    """Data without splits has no folder `all`, and a folder has a better name than `.`."""
    root = class_folder(tmp_path / "set", {"a": 3, "b": 3})
    (root / "a/broken.jpg").write_bytes(b"")
    (root / "loose.jpg").write_bytes(encoded(picture(9)))
    shutil.copy(root / "a/000.jpg", root / "a/again.jpg")
    page = tmp_path / "page.html"
    run = CliRunner().invoke(app, ["doctor", str(root), "--workers", "0", "--page", str(page)])
    assert "\n1 bad image (" in run.stdout
    for text in (run.stdout, page.read_text(encoding="utf-8")):
        assert "all/" not in text
        assert "a/broken.jpg: the file is empty" in text
    assert "a/000.jpg = a/again.jpg" in run.stdout
    assert "\n  set: not read: 1 image outside of any class folder" in run.stdout
    assert clean(examine(root, workers=0), tmp_path / "new").left_out.keys() == {"a/broken.jpg", "a/again.jpg"}
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/x.jpg").write_bytes(encoded(picture(9)))
    with pytest.raises(DataError, match=r"photos contains no images\. photos: has no class folders"):
        examine(tmp_path / "photos", workers=0)
