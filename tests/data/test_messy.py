"""A folder as people have it: everything that is wrong with it is found and named, and nothing in it is changed."""

from __future__ import annotations

import functools
import importlib
import io
import os
import shutil
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance
from typer.testing import CliRunner

import vitkit
from tests.data.images import class_folder, encoded, picture
from tests.data.test_doctor import contents
from vitkit.cli import app
from vitkit.data import examine, files, open_source
from vitkit.data.near import close_features, close_hashes, groups, perceptual_hash
from vitkit.errors import BadImage, DataError

decoding = importlib.import_module("vitkit.data.decode")  # the package has a function of that name
HEIC = b"\0\0\0\x18ftypheic" + b"\0" * 60  # what a HEIC file begins with, and no picture


def heic(image: Image.Image) -> bytes:
    """A real HEIC file where pillow-heif can write one."""
    try:
        import pillow_heif
    except ImportError:
        return HEIC
    buffer = io.BytesIO()
    pillow_heif.from_pillow(image).save(buffer)
    return buffer.getvalue()


@pytest.fixture
def without_heif(monkeypatch):
    """Leave vitkit as it is where pillow-heif is not installed."""
    monkeypatch.delitem(files.FORMATS, "HEIF", raising=False)
    monkeypatch.setattr(decoding, "READS_HEIF", False)
    monkeypatch.setattr(decoding, "formats", functools.cache(decoding.formats.__wrapped__))
    endings = tuple(ending for ending in files.ENDINGS if ending not in files.HEIF)
    for module in [m for name, m in sys.modules.items() if name.startswith("vitkit.") and hasattr(m, "ENDINGS")]:
        monkeypatch.setattr(module, "ENDINGS", endings)


@pytest.fixture(params=[True, False], ids=["with pillow-heif", "without pillow-heif"])
def reads_heic(request) -> bool:
    """Run a test as it goes with pillow-heif, and as it goes without."""
    if request.param:
        pytest.importorskip("pillow_heif")
    else:
        request.getfixturevalue("without_heif")
    return request.param


@pytest.fixture
def messy(tmp_path: Path, reads_heic: bool) -> Path:
    root = tmp_path / "messy"
    class_folder(root / "train", {"ants": 7, "bees": 6}, (96, 80))
    class_folder(root / "test", {"ants": 1})
    for folder in (
        "test/bee",
        "train/wasps",
        "valid/ants",
        "valid/bees",
        "validation/ants",
        "tset/ants",
        "train/ants/sub",
    ):
        (root / folder).mkdir(parents=True)
    new = {
        "test/bee/x.jpg": encoded(picture(900, (96, 80))),
        "train/bees/half.jpg": encoded(picture(900, (96, 80)).resize((48, 40))),
        "train/bees/one.png": encoded(Image.new("RGB", (1, 1)), "PNG"),
        "train/bees/small.png": encoded(picture(5, (20, 20)), "PNG"),
        "train/bees/long.jpg": encoded(picture(71, (400, 40))),
        "train/bees/a.avif": encoded(picture(72), "AVIF"),
        "train/bees/really.png": encoded(picture(73)),
        "train/ants/sub/deep.jpg": encoded(picture(74)),
        "train/ants/cut.jpg": encoded(picture(75))[:900],
        "train/ants/IMG_1.HEIC": heic(picture(82)),
        "train/ants/IMG_2.heic": heic(picture(83))[:600],
        "train/ants/photo.dat": encoded(picture(76)),
        "train/ants/notes.txt": b"ants",
        "train/clip.mov": b"moving",
        "train/loose.jpg": encoded(picture(77)),
        "valid/ants/v.jpg": encoded(picture(78)),
        "valid/bees/v.jpg": encoded(picture(81)),
        "validation/ants/w.jpg": encoded(picture(79)),
        "tset/ants/t.jpg": encoded(picture(80)),
        "train/ants/.hidden.jpg": b"",
    }
    for name, data in new.items():
        (root / name).write_bytes(data)
    shutil.copy(root / "train/ants/000.jpg", root / "train/bees/both.jpg")
    shutil.copy(root / "train/bees/001.jpg", root / "test/bee/leak.jpg")
    (root / "train/ants/link.jpg").symlink_to("nowhere.jpg")
    (root / "train/ants/loop").symlink_to("..")
    return root


def test_everything_is_found_and_named(messy, reads_heic):
    before = contents(messy)
    report = examine(messy, workers=0)
    problems = {(p.level, p.where): p.reason for p in report.problems}
    assert problems[("bad", "test/bee")] == "the training split has no class 'bee' (2 images); did you mean 'bees'?"
    assert problems[("bad", "train/wasps")] == "empty class: no images to train on."
    assert problems[("note", "validation")].startswith("not read: valid/ is used as the val split")
    assert problems[("note", "tset")].endswith(
        "1 image in a folder that is not one of the splits; did you mean 'test'?"
    )
    assert "1 image outside of any class folder (loose.jpg)" in problems[("note", "train")]
    assert "it is a JPEG image. Rename it to photo.jpg." in problems[("note", "train/ants/photo.dat")]
    assert problems[("bad", "valid/wasps")] == "empty class: no images to validate on."
    assert problems[("note", "test/wasps")] == "empty class: no images to test on."
    assert ("note", "test/bees") not in problems  # test/bee is named already
    unread = {".dat": 1, ".txt": 1, ".mov": 1} | ({} if reads_heic else {".heic": 2})
    assert {ending: len(names) for ending, names in report.unread.items()} == unread
    found = {(f.name, f.level): f.reason for f in report.findings}
    assert set(found) == ({("ants/IMG_2.heic", "bad")} if reads_heic else set()) | {
        ("ants/cut.jpg", "bad"),
        ("ants/link.jpg", "bad"),
        ("bees/one.png", "note"),
        ("bees/small.png", "note"),
        ("bees/long.jpg", "note"),
        ("bees/really.png", "note"),
    }
    assert not reads_heic or found["ants/IMG_2.heic", "bad"].startswith("truncated: ")
    assert found["bees/one.png", "note"] == "tiny: 1 x 1 px"
    assert found["bees/long.jpg", "note"] == "extreme aspect ratio: 400 x 40 px, 10 to 1"
    assert found["bees/really.png", "note"] == "misnamed: a JPEG file with the ending .png"
    assert [[p.name for p in group] for group in report.conflicts] == [["ants/000.jpg", "bees/both.jpg"]]
    assert [[p.name for p in group] for group in report.across] == [["bees/001.jpg", "bee/leak.jpg"]]
    assert ["bees/half.jpg", "bee/x.jpg"] in [[p.name for p in group] for group in report.near]
    assert not report.healthy
    assert report.images == {"train": 25 if reads_heic else 23, "val": 2, "test": 3}
    assert report.modes.get("HEIF RGB", 0) == int(reads_heic)
    assert contents(messy) == before


def test_training_goes_on_with_the_cleaned_copy(messy, tmp_path, reads_heic):
    before = contents(messy)
    out, page = tmp_path / "clean", tmp_path / "page.html"
    run = CliRunner().invoke(app, ["doctor", str(messy), "--workers", "0", "--fix", str(out), "--page", str(page)])
    assert run.exit_code == 0, run.stdout
    assert "test/bee became test/bees" in run.stdout
    needs = "2 .heic: train/ants/IMG_1.HEIC, train/ants/IMG_2.heic (HEIC, which needs pillow-heif"
    assert (needs in run.stdout) is not reads_heic
    assert contents(messy) == before
    assert vitkit.doctor(out, workers=0).healthy
    assert (out / "train/ants/IMG_1.HEIC").exists() is reads_heic
    assert not (out / "train/ants/IMG_2.heic").exists()
    assert open_source(out, "train").class_names == ("ants", "bees")
    run_ = vitkit.train(
        out,
        tmp_path / "run",
        model="vit-ti/16",
        recipe="small-data",
        steps=1,
        batch_size=4,
        workers=0,
        report=False,
        image_size=32,
        fields={"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2},
    )
    assert run_.results["train_loss"]


def test_training_on_the_messy_folder_says_what_is_meant(messy):
    with pytest.raises(DataError, match="class 'bee' that the training folder does not have, did you mean 'bees'"):
        open_source(messy, "test")


def test_only_clear_misspellings_are_renamed(tmp_path):
    class_folder(tmp_path / "train", {"bees": 2, "car": 2, "hot_dog": 2, "ant": 2})
    class_folder(tmp_path / "test", {"Bee": 1, "cat": 1, "Hot Dog": 1, "ants": 1, "Ant": 1})
    assert examine(tmp_path, workers=0).renames == {"test": {"Bee": "bees", "Hot Dog": "hot_dog"}}


def test_one_closed_folder_hides_nothing_else(messy, reads_heic, monkeypatch):
    real = os.scandir

    def scandir(path="."):
        if str(path).endswith(("train/bees", "valid")):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    report = examine(messy, workers=0)
    reasons = {p.where: p.reason for p in report.problems if p.level == "bad"}
    assert reasons["train/bees"] == "cannot be opened (Permission denied); its images are missing."
    assert reasons["valid"].startswith(("cannot be opened (Permission denied)", "has no class folders"))
    assert report.classes["train"]["ants"] == (12 if reads_heic else 10)
    cut = {"ants/IMG_2.heic"} if reads_heic else set()
    assert {f.name for f in report.bad} == {"ants/cut.jpg", "ants/link.jpg"} | cut
    with pytest.raises(DataError, match=r"train/bees cannot be opened \(Permission denied\)"):
        open_source(messy, "train")


def test_a_folder_without_images_says_what_there_is(tmp_path, without_heif):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.heic").write_bytes(HEIC)
    with pytest.raises(DataError, match=r"contains no images\. Files that are not read: 1 \.heic\. a: empty class"):
        examine(tmp_path, workers=0)


def test_test_without_train_is_not_a_class_in_silence(tmp_path):
    class_folder(tmp_path, {"test": 2, "val": 2})
    assert {p.where for p in examine(tmp_path, workers=0).problems if p.level == "bad"} == {"test", "val"}


def test_splits_of_a_table_hide_nothing_either(tmp_path):
    class_folder(tmp_path, {"a": 2, "b": 1})
    (tmp_path / "t.csv").write_text("path,label,split\na/000.jpg,a,train\na/001.jpg,b,train\nb/000.jpg,c,test\n")
    assert [(p.level, p.where) for p in examine(tmp_path / "t.csv", workers=0).problems] == [
        ("bad", "train/c"),
        ("note", "test/a"),
        ("note", "test/b"),
        ("note", "classes 'a', 'b'"),  # one training image each
    ]


def test_imbalance_names_the_classes(tmp_path):
    class_folder(tmp_path, {"many": 22, "few": 2})
    (problem,) = examine(tmp_path, workers=0).problems
    assert problem.level == "note"
    assert "'many' has 22 images and 'few' 2" in problem.reason
    shutil.rmtree(tmp_path / "many")
    class_folder(tmp_path, {"many": 20, "few": 2})
    assert not examine(tmp_path, workers=0).problems


def test_small_pictures_are_tiny_only_among_large_ones(tmp_path):
    class_folder(tmp_path, {"a": 5}, (16, 16))
    assert not examine(tmp_path, workers=0).findings


# HEIC


def test_a_heic_photo_names_the_package_that_reads_it(tmp_path, without_heif):
    (tmp_path / "p.heic").write_bytes(heic(picture(3)))
    with pytest.raises(BadImage, match=r"p\.heic: HEIC, which needs pillow-heif: pip install 'vitkit\[heif\]'\.$"):
        vitkit.predict(vitkit.create("vit-ti/16", num_hidden_layers=1, num_classes=2), tmp_path / "p.heic")


def test_heic_is_read_where_pillow_heif_is_installed(tmp_path):
    """With a module in the place of pillow-heif that registers an opener as it does, ValueError included."""
    import subprocess

    (tmp_path / "pillow_heif.py").write_text(
        textwrap.dedent("""
        from PIL import Image, ImageFile
        class HeifImageFile(ImageFile.ImageFile):
            format = "HEIF"
            def _open(self):
                if len(self.fp.read()) < 40:
                    raise ValueError("Invalid input: No 'meta' box found")
                self._size, self._mode, self.tile = (50, 40), "RGB", []
            def load(self):
                self.im = Image.new("RGB", self.size, (9, 9, 9)).im
                return Image.Image.load(self)
        def register_heif_opener():
            Image.register_open("HEIF", HeifImageFile, lambda head: head[4:12] == b"ftypheic")
            Image.register_extensions("HEIF", [".heic", ".heif"])
        """)
    )
    class_folder(tmp_path / "set", {"a": 2})
    (tmp_path / "set/a/p.HEIC").write_bytes(HEIC)
    (tmp_path / "set/a/q.heic").write_bytes(HEIC[:20])
    code = (
        "from vitkit.data import examine; r = examine('set', workers=0); "
        "print(sum(r.images.values()), r.unread, r.modes['HEIF RGB'], [(f.name, f.reason) for f in r.findings])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "4 {} 1 [('a/q.heic', \"Invalid input: No 'meta' box found\")]"


def test_real_heic(tmp_path):
    heif = pytest.importorskip("pillow_heif")
    image = picture(3, (64, 48))
    heif.from_pillow(image).save(tmp_path / "p.heic")
    data = (tmp_path / "p.heic").read_bytes()
    from vitkit.data import decode

    assert decode(data, "p.heic").size == (64, 48)
    for length in range(4, len(data)):  # in the header, in the boxes and in the picture
        with pytest.raises(BadImage, match=r"^cut\.heic: .*Repair or remove it"):
            decode(data[:length], "cut.heic")
    with pytest.raises(BadImage, match=r"^cut\.heic: truncated: "):
        decode(data[:-1], "cut.heic")


# near-duplicates


def changed(image: Image.Image) -> dict[str, Image.Image]:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=30)
    return {
        "half": image.resize((image.width // 2, image.height // 2)),
        "recompressed": Image.open(buffer),
        "paler": ImageEnhance.Contrast(image).enhance(0.7),
        "gray": image.convert("L"),
    }


def test_a_changed_photo_has_nearly_the_same_hash_and_another_photo_has_not():
    images = [picture(seed, (200, 160)) for seed in range(40)]
    hashes = np.array([perceptual_hash(image) for image in images], np.uint64)
    assert list(close_hashes(hashes)) == []
    for image, one in zip(images, hashes, strict=True):
        for word, other in changed(image).items():
            pair = np.array([one, perceptual_hash(other)], np.uint64)
            assert list(close_hashes(pair)) == [(0, 1)], word


def test_plain_and_small_images_have_no_hash():
    assert perceptual_hash(Image.new("RGB", (100, 100), (200, 30, 30))) is None
    assert perceptual_hash(picture(1, (31, 90))) is None
    assert perceptual_hash(picture(1, (32, 90))) is not None


def test_pairs_across_blocks_are_found(monkeypatch):
    from vitkit.data import near

    monkeypatch.setattr(near, "BLOCK", 3)
    hashes = np.arange(10, dtype=np.uint64) << np.uint64(40)
    assert {(i, j) for i, j in close_hashes(hashes)} == {(i, j) for i in range(10) for j in range(i + 1, 10)}
    rng = np.random.default_rng(0)
    X = rng.normal(size=(10, 64))
    X[8] = X[1] * 3 + 0.01
    assert list(close_features(X)) == [(1, 8)]
    assert groups([(3, 4), (1, 8), (8, 4), (6, 7)]) == [[1, 3, 4, 8], [6, 7]]


def test_features_that_are_all_alike_are_not_all_duplicates():
    rng = np.random.default_rng(0)
    X = 10 + rng.normal(size=(50, 64))
    assert (X[0] @ X[1]) / np.linalg.norm(X[0]) / np.linalg.norm(X[1]) > 0.95
    assert list(close_features(X)) == []
    X[7] = X[3] + 0.01
    assert list(close_features(X)) == [(3, 7)]


def test_no_two_of_the_real_photos_are_near_duplicates_but_their_changes_are(shared_data):
    source = open_source(shared_data / "pizza_steak_sushi", "test")
    images = [source.read(i)[0] for i in range(len(source))]
    hashes = np.array([perceptual_hash(image) for image in images], np.uint64)
    assert list(close_hashes(hashes)) == []
    for image, one in zip(images[::10], hashes[::10], strict=True):
        for word, other in changed(image).items():
            assert list(close_hashes(np.array([one, perceptual_hash(other)], np.uint64))) == [(0, 1)], word
