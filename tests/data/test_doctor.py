from __future__ import annotations

import json
import shutil

import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.data.images import BAD, class_folder, encoded, odd_files, picture
from vitkit.cli import app
from vitkit.data import examine, move_aside, open_source
from vitkit.data.doctor import describe
from vitkit.errors import DataError

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
    "huge.jpg": ("note", "20000 x 40 px"),
    "rgba.png": ("note", "alpha channel is dropped"),
}


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "set"
    class_folder(root / "train", {"good": 10, "other": 4})
    (root / "train/odd").mkdir()
    for name, data in odd_files().items():
        (root / "train/odd" / name).write_bytes(data)
    (root / "val/other").mkdir(parents=True)
    (root / "val/other/x.jpg").write_bytes(encoded(picture(500)))
    shutil.copy(root / "train/good/003.jpg", root / "val/other/copy.jpg")
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
    assert not [f for f in report.findings if f.name.startswith(("good/", "other/")) or f.name.endswith("good.jpg")]
    assert told[-1] == (32, 32)
    assert sorted(told) == told


def test_balance_sizes_and_duplicates(folder):
    report = examine(folder, workers=0)
    assert report.images == {"train": 30, "val": 2}
    assert report.classes == {"train": {"good": 11, "odd": 15, "other": 4}, "val": {"good": 0, "odd": 0, "other": 2}}
    assert report.imbalance == pytest.approx(15 / 4)
    assert report.sizes["width"] == [40, 64, 20_000]
    assert report.sizes["height"][2] == 120
    assert report.across == [[["train", "good/003.jpg"], ["val", "other/copy.jpg"]]]
    assert [["train", "good/004.jpg"], ["train", "good/again.jpg"]] in report.duplicates
    assert report.modes["JPEG L"] == 1


@pytest.mark.parametrize(("side", "noted"), [(9_999, False), (10_000, True)])
def test_a_side_of_10000_pixels_is_noted(side, noted):
    notes, kind = describe(encoded(Image.new("RGB", (3, side))), "x.jpg")
    assert kind == "JPEG"
    assert bool(notes) is noted


def test_fix_moves_and_never_deletes(folder):
    before = {f.relative_to(folder): f.read_bytes() for f in folder.rglob("*.*")}
    report = examine(folder, workers=0)
    aside = move_aside(report)
    assert aside == folder.with_name("set.bad")
    after = {f.relative_to(folder): f.read_bytes() for f in folder.rglob("*.*")}
    moved = {f.relative_to(aside): f.read_bytes() for f in aside.rglob("*.*") if f.name != "moved.json"}
    assert after | moved == before
    assert {f.name for f in moved} == BAD
    record = json.loads((aside / "moved.json").read_text())
    assert record["train/odd/empty.jpg"] == {
        "from": str(folder / "train/odd/empty.jpg"),
        "reason": "the file is empty (0 bytes)",
    }
    assert all(f.moved_to for f in report.bad)
    assert not examine(folder, workers=0).bad
    assert len(open_source(folder)) == 30 - len(BAD)
    (folder / "train/odd/empty.jpg").write_bytes(b"")
    move_aside(examine(folder, workers=0))
    assert (aside / "train/odd/empty-again.jpg").is_file()
    assert len(json.loads((aside / "moved.json").read_text())) == len(BAD) + 1
    assert move_aside(examine(folder, workers=0)) is None


def test_a_table_is_not_moved_out_of(tmp_path):
    class_folder(tmp_path, {"a": 3})
    (tmp_path / "a/000.jpg").write_bytes(b"")
    (tmp_path / "t.csv").write_text("path,label\na/000.jpg,a\na/001.jpg,a\na/gone.jpg,a\n")
    report = examine(tmp_path / "t.csv", workers=0)
    assert [f.name for f in report.bad] == ["a/000.jpg", "a/gone.jpg"]
    with pytest.raises(DataError, match=r"'csv' source\. Remove the rows"):
        move_aside(report)
    assert (tmp_path / "a/000.jpg").exists()


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
    assert "train/good/003.jpg = val/other/copy.jpg" in run.stdout
    assert "decoding: 32 of 32" in run.stderr
    run = CliRunner().invoke(app, ["doctor", str(folder), "--workers", "0", "--json", "--fix"])
    assert run.exit_code == 0
    report = json.loads(run.stdout)
    assert {f["name"] for f in report["findings"] if f["moved_to"]} == {f"odd/{name}" for name in BAD}
    assert report["duplicates_across_splits"]
    run = CliRunner().invoke(app, ["doctor", str(folder), "--workers", "0"])
    assert run.exit_code == 0
    assert "can be read" in run.stdout


def test_food_is_well(shared_data):
    report = examine(shared_data / "pizza_steak_sushi")
    assert report.images == {"train": 225, "test": 75}
    assert not report.bad
    assert not report.across
