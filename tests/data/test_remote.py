"""Data at s3:// addresses: the same images, labels and order as from a disk, and read only when needed."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from tests import s3
from tests.data.images import class_folder
from tests.data.test_sources import write_csv, write_parquet, write_tar
from vitkit.data import EvalLoader, open_source, open_splits, remote
from vitkit.errors import BadImage, DataError, Unreachable
from vitkit.model.config import InputSpec


@pytest.fixture(scope="module")
def bucket():
    with s3.store() as address:
        yield address


def same(here, there):
    assert (list(here.names), here.class_names) == (list(there.names), there.class_names)
    assert np.array_equal(here.labels, there.labels)
    assert here.fingerprint() == there.fingerprint()
    assert here.fingerprint(whole=True) == there.fingerprint(whole=True)
    for i in (0, len(here) - 1):
        assert here.raw(i) == there.raw(i)


@pytest.mark.parametrize("kind", ["folder", "tar", "csv", "parquet"])
def test_the_same_data_as_on_a_disk(kind, bucket, tmp_path):
    root = tmp_path / "data"
    if kind == "folder":
        class_folder(root / "train", {"10": 3, "2": 4, "1": 5})
        class_folder(root / "val", {"10": 2, "1": 1})
        place, ending = root, ""
    elif kind == "tar":
        place, ending = write_tar(root), ""
    else:
        place = {"csv": write_csv, "parquet": write_parquet}[kind](root)
        ending = f"/{place.name}"
    address = s3.upload(root, f"{bucket}/{kind}") + ending
    for split in ("train", "val"):
        same(open_source(place, split), open_source(address, split))
    assert list(open_splits(address)) == list(open_splits(place))
    batch = next(iter(EvalLoader(open_source(address), InputSpec(size=(8, 8)), workers=2)))  # connections of their own
    here = next(iter(EvalLoader(open_source(place), InputSpec(size=(8, 8)), workers=0)))
    assert batch.pixels.equal(here.pixels)


def test_one_shard_and_images_without_classes(bucket, tmp_path):
    s3.upload(write_tar(tmp_path / "tars"), f"{bucket}/tars")
    same(open_source(tmp_path / "tars/shard-1.tar", "all"), open_source(f"{bucket}/tars/shard-1.tar", "all"))
    s3.upload(class_folder(tmp_path / "flat", {".": 3, "deep/er": 1}), f"{bucket}/flat")
    found = remote.read_images(f"{bucket}/flat")
    assert list(found.names) == ["000.jpg", "001.jpg", "002.jpg", "deep/er/000.jpg"]
    assert found.class_names == ()


def test_listing_reads_no_image(bucket, tmp_path, monkeypatch):
    address = s3.upload(class_folder(tmp_path / "lazy", {"a": 2, "b": 2}), f"{bucket}/lazy")
    monkeypatch.setattr(remote.RemoteFiles, "_with", lambda *_: pytest.fail("an image was read"))
    assert len(open_source(address, "all")) == 4


def test_what_is_missing_and_what_cannot_be_reached(bucket, tmp_path, monkeypatch):
    with pytest.raises(DataError, match="there is nothing"):
        open_source(f"{bucket}/nothing")
    with pytest.raises(DataError, match="Expected an address such as s3://bucket/folder; got 's3:photos'"):
        open_source("s3:photos")
    with pytest.raises(DataError, match="no class folders"):
        open_source(s3.upload(class_folder(tmp_path / "bare", {".": 2}), f"{bucket}/bare"))
    address = s3.upload(class_folder(tmp_path / "gone", {"a": 2, "b": 2}), f"{bucket}/gone")
    source = pickle.loads(pickle.dumps(open_source(address, "all")))
    files, path = remote.find(f"{address}/a/001.jpg")
    files.delete_file(path)
    with pytest.raises(BadImage, match=r"^a/001\.jpg: cannot be read") as missing:
        source.raw(1)
    assert not isinstance(missing.value, Unreachable)
    assert source.excerpt(1, False) == (-1, b"")

    class Dead:
        def open_input_file(self, path):
            raise OSError("connection refused")

    monkeypatch.setattr(remote, "find", lambda address: (Dead(), "x"))
    with pytest.raises(Unreachable, match=r"^a/000\.jpg: could not be fetched \(connection refused\)"):
        source.raw(0)


def test_a_class_that_training_lacks_is_refused(bucket, tmp_path):
    class_folder(tmp_path / "odd/train", {"cat": 1, "dog": 1})
    class_folder(tmp_path / "odd/val", {"cta": 1})
    address = s3.upload(tmp_path / "odd", f"{bucket}/odd")
    with pytest.raises(DataError, match="has a class 'cta' that the training folder does not have, did you mean 'cat'"):
        open_source(address, "val")
