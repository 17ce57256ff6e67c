from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import pickle
import shutil
import struct
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests import s3
from tests.data.images import class_folder, encoded, picture
from vitkit.data import SOURCES, open_source, open_splits
from vitkit.data.base import Pixels, Subset, stratified
from vitkit.data.files import read_file
from vitkit.data.idx import read_idx
from vitkit.data.string_table import StringTable, natural
from vitkit.errors import BadImage, ConfigError, DataError, UnknownName, pick


@pytest.fixture
def bucket(request):
    """An address to write to; only the rows that need one start a server."""
    if request.getfixturevalue("kind") != "s3":
        yield ""
        return
    with s3.store() as address:
        yield address


@pytest.fixture
def photos(tmp_path):
    class_folder(tmp_path / "photos/train", {"10": 3, "2": 4, "1": 5})
    class_folder(tmp_path / "photos/val", {"10": 2, "1": 1})
    return tmp_path / "photos"


def write_csv(root):
    class_folder(root, {"cat": 6, "dog": 8})
    with open(root / "labels.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        rows.writerows([str(f.relative_to(root)), f.parent.name] for f in sorted(root.glob("*/*.jpg")))
    return root / "labels.csv"


def write_parquet(root):
    from pyarrow import parquet, table

    class_folder(root, {"cat": 6, "dog": 8})
    files = sorted(root.glob("*/*.jpg"))
    parquet.write_table(
        table({"path": [str(f.relative_to(root)) for f in files], "label": [f.parent.name for f in files]}),
        root / "labels.parquet",
    )
    return root / "labels.parquet"


def write_hf(root):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    cells = [{"bytes": encoded(picture(i)), "path": None} for i in range(14)]
    datasets.Dataset.from_dict({"image": cells, "label": [0] * 6 + [1] * 8}, features=features).save_to_disk(root)
    return root


def write_tar(root):
    root.mkdir()
    for shard in range(2):
        with tarfile.open(root / f"shard-{shard}.tar", "w") as tar:
            for n in range(7):
                label = int(shard * 7 + n >= 6)
                for ending, data in (("jpg", encoded(picture(shard * 7 + n))), ("cls", str(label).encode())):
                    info = tarfile.TarInfo(f"{shard:02d}{n:04d}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    (root / "classes.txt").write_text("cat\ndog\n")
    return root


def write_idx(root):
    root.mkdir()
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (14, 5, 7), dtype=np.uint8), np.array([0] * 6 + [1] * 8, np.uint8)
    for part in ("train", "t10k"):
        with gzip.open(root / f"{part}-images-idx3-ubyte.gz", "wb") as file:
            file.write(struct.pack(">HBB3I", 0, 8, 3, *images.shape) + images.tobytes())
        (root / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, 14) + labels.tobytes())
    return root


def write_folder(root):
    return class_folder(root, {"cat": 6, "dog": 8})


def cifar10(folder: Path, records: dict[str, list[int]]) -> Path:
    """Binary files in CIFAR-10's layout: a label, then red, green and blue planes of 32 x 32."""
    folder.mkdir(exist_ok=True, parents=True)
    for name, labels in records.items():
        planes = [np.repeat(np.array([10 * label, 100, 200], np.uint8), 1024) for label in labels]
        content = b"".join(bytes([label]) + plane.tobytes() for label, plane in zip(labels, planes, strict=True))
        (folder / f"{name}.bin").write_bytes(content)
    return folder


def write_cifar10(root):
    return cifar10(root, {"data_batch_1": list(range(10)) * 2, "test_batch": list(range(10))})


MADE = {
    "folder": write_folder,
    "csv": write_csv,
    "parquet": write_parquet,
    "hf": write_hf,
    "tar": write_tar,
    "idx": write_idx,
    "cifar10": write_cifar10,
}


def make(kind, tmp_path, bucket):
    """The spec of a small data set of one kind; every row of SOURCES has one."""
    if kind in ("digits", "digit-pairs"):
        return kind
    if kind == "s3":
        return s3.upload(write_folder(tmp_path / "made"), f"{bucket}/{tmp_path.name}")
    if kind == "food":
        for split, counts in {"train": (78, 75, 72), "test": (25, 19, 31)}.items():
            class_folder(tmp_path / "food" / split, dict(zip(("pizza", "steak", "sushi"), counts, strict=True)), (9, 8))
        return f"food:{tmp_path / 'food'}"
    return f"{kind}:{MADE[kind](tmp_path / 'made')}"


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_is_the_same_twice_and_after_pickling(kind, tmp_path, bucket):
    spec = make(kind, tmp_path, bucket)
    a, b = open_source(spec), open_source(spec)
    assert a.fingerprint() == b.fingerprint()
    assert list(a.names) == list(b.names)
    assert len(set(a.names)) == len(a) == len(a.labels)
    assert a.class_names == b.class_names
    copy = pickle.loads(pickle.dumps(a))
    for i in (0, len(a) // 2, len(a) - 1):
        image, label = a.read(i)
        assert np.array_equal(np.asarray(image), np.asarray(b.read(i)[0]))
        assert np.array_equal(np.asarray(image), np.asarray(copy.read(i)[0]))
        assert copy.read(i)[1] == label
        assert label == (tuple(np.flatnonzero(a.labels[i])) if a.several else a.labels[i])
    assert sum(a.counts().values()) == (a.labels.sum() if a.several else len(a))


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_has_a_held_out_part_that_training_does_not_see(kind, tmp_path, bucket):
    spec = make(kind, tmp_path, bucket)
    train, val = open_source(spec), open_source(spec, "val")
    assert len(train)
    assert len(val)
    if set(open_splits(spec)) == {"all"}:
        assert not set(train.names) & set(val.names)
        assert len(train) + len(val) == len(open_source(spec, "all"))
        assert set(train.labels) == set(val.labels)
    assert train.class_names == val.class_names


@pytest.mark.parametrize("kind", MADE)
def test_a_plain_path_is_recognised(kind, tmp_path):
    place = MADE[kind](tmp_path / "made")
    assert list(open_source(place).names) == list(open_source(f"{kind}:{place}").names)
    if kind not in ("idx", "cifar10"):
        assert open_source(place).class_names == ("cat", "dog")


@pytest.mark.parametrize("kind", ["folder", "csv", "parquet", "tar"])
def test_an_unreadable_image_is_named(kind, tmp_path):
    place = MADE[kind](tmp_path / "made")
    if kind == "tar":
        shard = tmp_path / "made/shard-0.tar"
        data = shard.read_bytes()
        shard.write_bytes(data[:512] + bytes(1024) + data[1536:])  # the start of the first member's bytes
        source = open_source(place, "all")
        with pytest.raises(BadImage, match=r"shard-0\.tar/000000\.jpg"):
            source.read(0)
        return
    source = open_source(place, "all")
    (tmp_path / "made" / source.names[2]).write_bytes(b"nothing")
    with pytest.raises(BadImage, match=rf"^{source.names[2]}: not an image"):
        source.read(2)
    (tmp_path / "made" / source.names[2]).unlink()
    with pytest.raises(BadImage, match=rf"^{source.names[2]}: cannot be read"):
        source.read(2)


def test_numeric_classes_are_in_numeric_order_in_every_split(photos):
    train, val = open_source(photos), open_source(photos, "val")
    assert train.class_names == val.class_names == ("1", "2", "10")
    assert train.counts() == {"1": 5, "2": 4, "10": 3}
    assert val.counts() == {"1": 1, "2": 0, "10": 2}


def test_the_order_is_not_the_file_systems(photos, monkeypatch):
    import os

    names = list(open_source(photos).names)

    class Reversed(list):
        __enter__ = list.copy

        def __exit__(self, *error):
            pass

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: Reversed(list(scandir(path))[::-1]))
    assert list(open_source(photos).names) == names


def test_val_and_test_stand_in_for_each_other(photos):
    assert list(open_source(photos, "test").names) == list(open_source(photos, "val").names)
    with pytest.raises(DataError, match=r"no split 'dev'; it has: train, val"):
        open_source(photos, "dev")
    with pytest.raises(DataError, match="has splits of its own; choose one of: train, val"):
        open_source(photos, "all")


def test_a_class_that_training_does_not_know_is_refused(photos):
    class_folder(photos / "val", {"99": 1})
    with pytest.raises(DataError, match="class '99' that the training folder does not have"):
        open_source(photos, "val")


@pytest.mark.parametrize("name", ["food", "digits", "tar", "folder", "hf", "csv"])
def test_a_path_comes_before_a_source_of_the_same_name(name, tmp_path, monkeypatch, caplog):
    class_folder(tmp_path / name, {"cat": 3, "dog": 3})
    monkeypatch.chdir(tmp_path)
    assert open_source(name, "all").class_names == ("cat", "dog")
    assert (
        f"note: '{name}' is a path as well as a data source; the path is used. The source is '{name}:'." in caplog.text
    )
    caplog.clear()
    assert open_source(f"folder:{name}", "all").class_names == ("cat", "dog")
    assert len(open_source("digits:", "all")) == 1797
    assert not caplog.text


def test_a_run_folder_is_not_data(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "mine"):
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    assert len(open_source("digits", "all")) == 1797
    assert "note: the folder 'digits' is a run, which holds no data; the data source 'digits' is used." in caplog.text
    for spec in ("mine", tmp_path / "digits"):
        with pytest.raises(DataError, match="is a run folder, which holds weights and numbers"):
            open_source(spec)


def test_the_fingerprint_sees_names_labels_and_sizes(photos):
    first = open_source(photos).fingerprint()
    file = photos / "train/1/000.jpg"
    file.write_bytes(file.read_bytes() + b"\0")
    second = open_source(photos).fingerprint()
    file.rename(file.with_name("x.jpg"))
    third = open_source(photos).fingerprint()
    (photos / "train/1/x.jpg").rename(photos / "train/2/x.jpg")
    assert len({first, second, third, open_source(photos).fingerprint()}) == 4


def replaced(data, start=0):
    """Other bytes of the same length; those before `start` stay."""
    return data[:start] + bytes(255 - byte for byte in data[start:])


def test_the_fingerprint_sees_other_pictures_of_the_same_size(photos):
    first = open_source(photos).fingerprint()
    for file in photos.rglob("*.jpg"):
        stat = file.stat()
        file.write_bytes(replaced(file.read_bytes()))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as if nothing had happened
        assert file.stat().st_size == stat.st_size
    assert open_source(photos).fingerprint() != first


@pytest.mark.parametrize("start", [0, 60, 120])
def test_the_fingerprint_sees_one_large_photo_that_changed_from_some_place_on(tmp_path, start):
    class_folder(tmp_path, {"a": 2, "b": 2}, (600, 400))
    file = tmp_path / "a/000.jpg"
    assert file.stat().st_size > 40_000
    before = open_source(tmp_path, "all").fingerprint()
    file.write_bytes(replaced(file.read_bytes(), start * 2**10 // 4))
    assert open_source(tmp_path, "all").fingerprint() != before


def test_a_copied_folder_has_the_same_fingerprint(photos, tmp_path):
    copy = shutil.copytree(photos, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(next(copy.rglob("*.jpg")), (1, 1))
    for whole in (False, True):
        assert open_source(copy).fingerprint(whole=whole) == open_source(photos).fingerprint(whole=whole)


def test_every_byte_is_compared_when_asked(tmp_path):
    class_folder(tmp_path, {"a": 2, "b": 2}, (600, 400))
    file = tmp_path / "a/000.jpg"
    source = open_source(tmp_path, "all")
    before = [source.fingerprint(), source.fingerprint(whole=True)]
    data = bytearray(file.read_bytes())
    data[len(data) // 6] ^= 1  # between two of the parts that are read by default
    file.write_bytes(data)
    assert source.fingerprint() == before[0]
    assert source.fingerprint(whole=True) != before[1]


@pytest.mark.parametrize("kind", ["folder", "csv", "parquet", "hf", "tar", "idx"])
def test_every_source_has_a_fingerprint_of_its_content(kind, tmp_path):
    place = MADE[kind](tmp_path / "made")
    source = open_source(place, "train" if kind == "idx" else "all")
    before = [source.fingerprint(), Subset(source, [3, 4]).fingerprint()]
    assert before[0] == open_source(place, "train" if kind == "idx" else "all").fingerprint()
    raw, other = source.raw, source.raw(4)
    source.raw = lambda i: other if i == 3 else raw(i)
    if kind in ("folder", "csv", "parquet"):
        (tmp_path / "made" / source.names[3]).write_bytes(other)
    elif kind == "tar":
        source.where[3] = source.where[4]
    elif kind == "idx":
        source._images[3] = source._images[4]
    assert source.fingerprint() != before[0]
    assert Subset(source, [3, 4]).fingerprint() != before[1]


def test_hidden_files_and_other_files_are_not_images(photos):
    count = len(open_source(photos))
    for name in (".hidden.jpg", "notes.txt", "Thumbs.db"):
        (photos / "train/1" / name).write_bytes(b"x")
    (photos / "train/.cache").mkdir()
    assert len(open_source(photos)) == count


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere/at/all", "Expected a folder.*; there is no data at 'nowhere/at/all'"),
        ("digits:here", "Expected 'digits' alone.*got 'digits:here'"),
        ("folder:nowhere", "no folder"),
        ("food:nowhere", "no folder"),
        ("idx:nowhere", "Expected pairs of IDX files.*none in 'nowhere'"),
    ],
)
def test_mistakes_are_one_sentence(spec, says):
    with pytest.raises(DataError, match=says):
        open_source(spec)


def test_an_unknown_kind_offers_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'digits'"):
        pick(SOURCES, "digit", "data source")


def test_folders_without_classes_and_without_images(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="no class folders"):
        open_source(tmp_path / "a")
    (tmp_path / "a/cat").mkdir()
    with pytest.raises(DataError, match="contains no images"):
        open_source(tmp_path / "a")


def test_csv_with_splits_and_with_mistakes(tmp_path):
    class_folder(tmp_path, {"cat": 3})
    table = tmp_path / "t.csv"
    table.write_text(
        "﻿file,class,split\ncat/000.jpg,7,train\ncat/001.jpg,10,train\ncat/002.jpg,7,validation\n", encoding="utf-8"
    )
    assert open_source(table).class_names == open_source(table, "val").class_names == ("7", "10")
    assert len(open_source(table)) == 2
    for text, says in {
        "path\nx\n": "Expected a column 'label'",
        "path,label\nx\n": "line 2: expected 2 cells",
        "path,label,split\nx,y,sometimes\n": "line 2: expected one of train, .*; got split 'sometimes'",
        "": "one line per image; .* is empty",
        "path,label\nx,\n": "line 2: expected a path and a label",
    }.items():
        table.write_text(text)
        with pytest.raises(DataError, match=says):
            open_source(table)


@pytest.mark.parametrize(
    ("heading", "rows"),
    [
        ("path;label", ["cat/000.jpg;a,b", "cat/001.jpg;c"]),
        ('"image";"class"', ['"cat/000.jpg";"a,b"', '"cat/001.jpg";c']),
        ("path,label", ['cat/000.jpg,"a,b"', "cat/001.jpg,c"]),
    ],
)
def test_semicolons_separate_columns_where_the_heading_has_no_commas(tmp_path, heading, rows):
    """As German Excel writes them."""
    class_folder(tmp_path, {"cat": 2})
    (tmp_path / "t.csv").write_text("\r\n".join([heading, *rows, ""]), encoding="utf-8-sig", newline="")
    assert open_source(tmp_path / "t.csv", "all").class_names == ("a,b", "c")
    (tmp_path / "t.csv").write_text("path;label\ncat/000.jpg;a\nx\n")
    with pytest.raises(DataError, match="line 3: expected 2 cells"):
        open_source(tmp_path / "t.csv", "all")


@pytest.mark.parametrize("encoding", ["utf-16", "cp1252"])
def test_a_csv_in_another_encoding_is_refused_with_advice(tmp_path, encoding):
    (tmp_path / "t.csv").write_text("path,label\nx.jpg,Häuser\n", encoding=encoding)
    with pytest.raises(DataError, match=r"t\.csv; it is in another encoding\. .* save it as CSV UTF-8\.$"):
        open_source(tmp_path / "t.csv", "all")


@pytest.mark.parametrize("kind", ["csv", "parquet", "tar", "hf", "folder"])
def test_none_and_the_like_are_classes(kind, tmp_path):
    names = ["NA", "NULL", "None", "nan", "null"]
    class_folder(tmp_path / "x", dict.fromkeys(names, 2))
    files = sorted((tmp_path / "x").glob("*/*.jpg"))
    labels = [file.parent.name for file in files]
    place = tmp_path / "x"
    if kind == "csv":
        place = tmp_path / "x.csv"
        rows = "".join(f"{file},{label}\n" for file, label in zip(files, labels, strict=True))
        place.write_text("path,label\n" + rows, encoding="utf-8")
    elif kind == "parquet":
        from pyarrow import parquet, table

        place = tmp_path / "x.parquet"
        parquet.write_table(table({"path": [str(file) for file in files], "label": labels}), place)
    elif kind == "tar":
        place = tmp_path / "x.tar"
        with tarfile.open(place, "w") as tar:
            for n, (file, label) in enumerate(zip(files, labels, strict=True)):
                for name, data in (
                    (f"{n}.jpg", file.read_bytes()),
                    (f"{n}.json", json.dumps({"label": label}).encode()),
                ):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    elif kind == "hf":
        datasets = pytest.importorskip("datasets")
        place = tmp_path / "hf"
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
        rows = {"image": [{"bytes": file.read_bytes(), "path": None} for file in files], "label": labels}
        datasets.Dataset.from_dict(rows, features=features).save_to_disk(place)
    source = open_source(place, "all")
    assert source.class_names == tuple(names)
    assert source.counts() == dict.fromkeys(names, 2)


def test_a_label_that_is_missing_is_not_a_class(tmp_path):
    from pyarrow import parquet, table

    class_folder(tmp_path, {"a": 2})
    files = [str(file) for file in sorted(tmp_path.glob("a/*.jpg"))]
    for labels in (["a", None], [1.0, float("nan")]):
        parquet.write_table(table({"path": files, "label": labels}), tmp_path / "x.parquet")
        with pytest.raises(DataError, match="row 3: expected a path and a label"):
            open_source(tmp_path / "x.parquet", "all")
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    rows = {"image": [{"bytes": encoded(picture(n)), "path": None} for n in range(2)], "label": ["a", None]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "hf")
    with pytest.raises(DataError, match="without one"):
        open_source(tmp_path / "hf", "all")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, data in {"0.jpg": encoded(picture(0)), "0.json": b'{"label": null}'}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with pytest.raises(DataError, match="it has neither"):
        open_source(tmp_path / "x.tar", "all")


def test_loops_of_links_and_pipes_do_not_hang(photos):
    names = list(open_source(photos).names)
    (photos / "train/1/inside").mkdir()
    try:
        (photos / "train/1/inside/again").symlink_to(photos / "train/1", target_is_directory=True)
        (photos / "train/1/self").symlink_to(photos / "train/1/self")
        (photos / "train/self").symlink_to(photos / "train/self")
        os.mkfifo(photos / "train/1/pipe.jpg")
    except (OSError, AttributeError):
        pytest.skip("this system has no links or pipes")
    assert list(open_source(photos).names) == names
    (photos / "train/1/broken.jpg").symlink_to(photos / "nowhere.jpg")
    source = open_source(photos)
    with pytest.raises(BadImage, match=r"^1/broken\.jpg: cannot be read"):
        source.read(list(source.names).index("1/broken.jpg"))
    assert source.fingerprint()


def test_links_between_two_classes_are_followed_once(photos):
    try:
        (photos / "train/1/x").symlink_to(photos / "train/2", target_is_directory=True)
        (photos / "train/2/x").symlink_to(photos / "train/1", target_is_directory=True)
    except OSError:
        pytest.skip("this system has no links")
    names = list(open_source(photos).names)
    assert sum(name.startswith("1/x/") for name in names) == sum(
        name.count("/") == 1 and name[0] == "2" for name in names
    )
    assert not any("x/x" in name for name in names)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_only_regular_files_are_read(photos, tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    os.mkfifo(tmp_path / "pipe.tar")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    kinds = {
        "pipe.jpg": "expected a file; it is a named pipe",
        "zero.jpg": "expected a file; it is a device",
        "folder.jpg": "expected a file; it is a folder",
        "loop.jpg": "cannot be read",
        "nul\0.jpg": "cannot be read",
    }
    (tmp_path / "t.csv").write_text("path,label\n" + "".join(f"{name},a\n" for name in kinds if "\0" not in name))
    source = open_source(tmp_path / "t.csv", "all")
    for i, name in enumerate(source.names):
        with pytest.raises(BadImage, match=f"^{name}: {kinds[name]}"):
            source.read(i)
    assert source.fingerprint()
    for name, what in kinds.items():
        with pytest.raises(BadImage, match=what):
            read_file(tmp_path / name, name)
    with pytest.raises(DataError, match="it is a named pipe"):
        open_source(f"tar:{tmp_path}", "all")


def test_a_huge_file_is_not_an_image(tmp_path):
    with open(tmp_path / "huge.jpg", "wb") as file:
        file.truncate(2**31 + 1)  # sparse: it takes no room on the disk
    with pytest.raises(BadImage, match=r"^huge\.jpg: expected an image of at most 2,147,483,648 bytes"):
        read_file(tmp_path / "huge.jpg", "huge.jpg")


def test_tar_is_indexed_once_and_again_when_it_changes(tmp_path):
    place = write_tar(tmp_path / "made")
    first = open_source(place, "all")
    kept = next(place.glob(".vitkit-index-*.json"))
    index = json.loads(kept.read_text())
    index["rows"] = index["rows"][:5]
    kept.write_text(json.dumps(index))
    assert len(open_source(place, "all")) == 5  # the kept list is what is read
    with tarfile.open(place / "shard-1.tar", "a") as tar:
        for name, data in {"new.jpg": encoded(picture(99)), "new.json": b'{"label": 1}'}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert len(open_source(place, "all")) == len(first) + 1


def test_tar_with_folders_for_classes(tmp_path):
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for name in ("n02/a.jpg", "n10/b.jpg", "n10/c.jpg"):
            data = encoded(picture(0))
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    source = open_source(f"tar:{tmp_path}", "train")
    assert source.class_names == ("n02", "n10")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\x08",
        struct.pack(">HBBI", 0, 8, 1, 9) + b"12",
        struct.pack(">HBBI", 0, 13, 1, 1) + b"1234",
        struct.pack(">HBB", 0, 8, 0) + b"1",
        struct.pack(">HBB70I", 0, 8, 70, *[1] * 70) + b"1",
    ],
)
def test_broken_idx_files_are_named(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(DataError, match=str(tmp_path / "x")):
        read_idx(tmp_path / "x")


def test_gzipped_idx_files_are_read_as_far_as_their_header_says(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(struct.pack(">HBBI", 0, 8, 1, 3) + b"abc" + bytes(2**28)))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"expected 3 bytes of data, as its header says; got more"):
        read_idx(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**24  # it would decompress to 256 MB
    for claimed in (4, 2**32 - 1):
        path.write_bytes(gzip.compress(struct.pack(">HBBI", 0, 8, 1, claimed) + b"abc"))
        with pytest.raises(DataError, match=rf"expected {claimed:,} bytes of data, as its header says; got 3"):
            read_idx(path)


@pytest.mark.parametrize(
    ("images", "labels", "named"),
    [
        ((0, 2, 2), (0,), "train-labels"),
        ((4, 2, 2), (4, 1), "train-labels"),
        ((4,), (4,), "train-images"),
        ((3, 0, 4), (3,), "train-images"),
        ((3, 2, 2, 5), (3,), "train-images"),
    ],
)
def test_idx_files_that_are_not_images_and_labels(images, labels, named, tmp_path):
    for name, shape in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        head = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
        (tmp_path / name).write_bytes(head + bytes(math.prod(shape)))
    with pytest.raises(DataError, match=named):
        open_source(f"idx:{tmp_path}", "train")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipes_named_like_data_files_do_not_hang(tmp_path):
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "data_batch_1.bin"):
        os.mkfifo(tmp_path / name)
    for kind in ("idx", "cifar10"):
        with pytest.raises(DataError, match="it is a named pipe"):
            open_source(f"{kind}:{tmp_path}", "train")


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.5, -1.0, 256.0])
def test_arrays_with_values_that_are_no_pixels_are_refused(value):
    images = np.full((3, 2, 2), 7.0)
    assert Pixels(images, [0, 1, 0], ("a", "b")).raw(2).tolist() == [[[7], [7]], [[7], [7]]]
    images[1, 0, 1] = value
    with pytest.raises(DataError, match=r"Expected whole numbers from 0 to 255; second has other values"):
        Pixels(images, [0, 1, 0], ("a", "b"), ("first", "second", "third"))


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    source = open_source("digits", "all")
    assert len(source) == 1797
    assert source.class_names == tuple("0123456789")
    for i in (0, 900, 1796):
        assert np.array_equal(np.rint(np.asarray(source.read(i)[0]) / 255 * 16), load_digits().images[i])


def test_food_reads_as_its_course_made_it(shared_data):
    for spec in (f"food:{shared_data / 'pizza_steak_sushi'}", str(shared_data / "pizza_steak_sushi")):
        train, test = open_source(spec), open_source(spec, "test")
        assert (len(train), len(test)) == (225, 75)
        assert train.class_names == test.class_names == ("pizza", "steak", "sushi")
        assert train.counts() == {"pizza": 78, "steak": 75, "sushi": 72}


def test_fashion_mnist_knows_its_names(shared_data):
    train, test = open_source(shared_data / "fashion_mnist"), open_source(shared_data / "fashion_mnist", "test")
    assert (len(train), len(test)) == (60_000, 10_000)
    assert train.class_names[9] == test.class_names[9] == "Ankle boot"
    assert train.read(0)[1] == 9


def test_stratified_keeps_the_balance_and_depends_on_the_seed():
    labels = np.repeat([0, 1, 2], [100, 50, 2])
    kept, held = stratified(labels, 0.1, 0)
    assert sorted([*kept, *held]) == list(range(152))
    assert np.bincount(labels[held]).tolist() == [10, 5, 1]
    assert held.tolist() == stratified(labels, 0.1, 0)[1].tolist() != stratified(labels, 0.1, 1)[1].tolist()
    with pytest.raises(ConfigError):
        stratified(labels, 1.0, 0)


def test_a_tenth_is_held_out_and_it_is_always_the_same():
    train, val = open_source("digits"), open_source("digits", "val")
    assert (len(train), len(val)) == (1618, 179)
    assert list(val.names[:5]) == ["digit 12", "digit 15", "digit 20", "digit 22", "digit 36"]


def test_one_image_a_class_cannot_be_split(tmp_path):
    class_folder(tmp_path, {"a": 1, "b": 1})
    with pytest.raises(DataError, match="use split 'all'"):
        open_source(tmp_path, "val")
    assert len(open_source(tmp_path, "all")) == 2


def test_subsets_and_pixels():
    images = np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3)
    whole = Pixels(images, [0, 1, 1, 0], ["a", "b"])
    part = Subset(whole, [3, 1])
    assert [part.read(i)[1] for i in range(2)] == [0, 1]
    assert part.names[0] == "row 3"
    assert np.array_equal(np.asarray(part.read(0)[0]), images[3])
    with pytest.raises(DataError, match="4 images and 3 labels"):
        Pixels(images, [0, 1, 1], ["a", "b"])


def test_names_keep_every_string_and_little_memory():
    names = [f"class/{i:07d}.jpg" for i in range(1000)] + ["", "ünï", "\udcff"]
    kept = StringTable(names)
    assert list(kept) == names
    assert kept[-1] == names[-1]
    assert kept[3:5] == names[3:5]
    assert kept.nbytes < 30 * len(names)
    with pytest.raises(IndexError):
        kept[len(names)]


def test_natural_order():
    assert sorted(["10", "9", "a10", "a9", "1", "b", "01"], key=natural) == ["01", "1", "9", "10", "a9", "a10", "b"]


def test_images_of_a_hub_data_set_are_not_decoded_to_be_listed(tmp_path):
    source = open_source(write_hf(tmp_path / "made"), "all")
    assert isinstance(source.raw(0), bytes)
    assert isinstance(source.read(0)[0], Image.Image)


def test_shards_of_another_split_take_the_classes_of_training(tmp_path):
    for split, classes in {"train": ["ant", "bee", "cat"], "val": ["cat"]}.items():
        with tarfile.open(tmp_path / f"{split}-0.tar", "w") as tar:
            for name in classes:
                data = encoded(picture(0))
                info = tarfile.TarInfo(f"{name}/x.jpg")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    val = open_source(f"tar:{tmp_path}", "val")
    assert val.class_names == ("ant", "bee", "cat")
    assert val.labels.tolist() == [2]


def test_cifar10(tmp_path: Path) -> None:
    folder = cifar10(
        tmp_path / "cifar-10-batches-bin", {"data_batch_1": [3, 0], "data_batch_2": [9], "test_batch": [1]}
    )
    for spec in (f"cifar10:{folder}", str(folder), str(tmp_path)):
        train, test = open_splits(spec)["train"](), open_splits(spec)["test"]()
        assert train.labels.tolist() == [3, 0, 9]
        assert train.names[2] == "train image 2"
        assert (train.class_names[3], len(train.class_names)) == ("cat", 10)
        assert train.raw(0).shape == (32, 32, 3)
        assert train.raw(0)[5, 7].tolist() == [30, 100, 200]
        assert test.read(0)[0].getpixel((4, 4)) == (10, 100, 200)
    first = np.arange(3072, dtype=np.uint32).astype(np.uint8)
    (folder / "test_batch.bin").write_bytes(bytes([5]) + first.tobytes())
    image = open_splits(str(folder))["test"]().raw(0)
    assert image[0, 1, 0] == first[1]  # the second pixel of the first row, red
    assert image[1, 0, 0] == first[32]
    assert image[0, 0, 2] == first[2048]


def test_cifar10_that_is_damaged_or_absent(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Expected CIFAR-10's binary files"):
        open_splits(f"cifar10:{tmp_path}")
    folder = cifar10(tmp_path, {"data_batch_1": [3, 0]})
    with open(folder / "data_batch_1.bin", "ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"expected records of 3,073 bytes; got 6,147 bytes"):
        open_splits(str(folder))["train"]()
    cifar10(tmp_path, {"data_batch_1": [3, 10]})
    with pytest.raises(DataError, match=r"record 1 of train has label 10. Is it CIFAR-100"):
        open_splits(str(folder))["train"]()
