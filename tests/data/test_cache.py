from __future__ import annotations

import json
import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.images import BAD, class_folder, encoded, odd_files
from vitkit.data import Augment, EvalLoader, TrainLoader, cached, open_source
from vitkit.errors import BadImage, ConfigError, OutputError
from vitkit.model.config import InputSpec

SPEC = InputSpec(size=(32, 32), resize="crop", crop=0.9, interpolation="bicubic")


@pytest.fixture
def photos(tmp_path):
    class_folder(tmp_path / "photos", {"a": 10, "b": 9})
    (tmp_path / "photos/odd").mkdir()
    for name, data in odd_files().items():
        if name not in BAD:
            (tmp_path / "photos/odd" / name).write_bytes(data)
    return open_source(tmp_path / "photos", "all")


def pixels_of(loader):
    return torch.cat([batch.pixels for batch in loader])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_full_cache_changes_no_pixel(photos, tmp_path, workers):
    kept = cached(photos, tmp_path / "cache", workers=workers)
    for i in range(len(photos)):
        assert np.array_equal(np.asarray(kept.read(i)[0]), np.asarray(photos.read(i)[0])), photos.names[i]
    plain = pixels_of(EvalLoader(photos, SPEC, workers=0))
    assert torch.equal(pixels_of(EvalLoader(kept, SPEC, workers=workers)), plain)
    how = Augment(scale=(0.5, 1.0), color_jitter=0.4)
    a, b = (next(TrainLoader(s, SPEC, how, batch_size=20, workers=0).batches()) for s in (kept, photos))
    assert torch.equal(a.index, b.index)
    assert kept.fingerprint() == photos.fingerprint()


def test_a_cache_for_a_spec_holds_what_evaluation_feeds(photos, tmp_path):
    kept = cached(photos, tmp_path / "cache", spec=SPEC, workers=0)
    assert (tmp_path / "cache/images.u8").stat().st_size == len(photos) * 32 * 32 * 3
    assert torch.equal(pixels_of(EvalLoader(kept, SPEC, workers=1)), pixels_of(EvalLoader(photos, SPEC, workers=0)))


def test_no_image_file_is_read_again(photos, tmp_path):
    kept = cached(photos, tmp_path / "cache", workers=0)
    again = cached(photos, tmp_path / "cache", workers=0)
    for file in (tmp_path / "photos").rglob("*.*"):
        file.unlink()
    assert kept.read(3)[0].size == again.read(3)[0].size == (64, 48)


def test_large_images_are_reduced_to_the_short_side(photos, tmp_path):
    kept = cached(photos, tmp_path / "cache", short_side=24, workers=0)
    sizes = [kept.read(i)[0].size for i in range(len(kept))]
    assert {min(s) for s in sizes} == {24}
    assert sizes[0] == (32, 24)
    far = np.asarray(kept.read(0)[0]).astype(int) - np.asarray(photos.read(0)[0].resize((32, 24)))
    assert np.abs(far).mean() < 6


def test_it_is_made_anew_when_the_data_or_the_request_changes(photos, tmp_path):
    calls = []

    def tell(done, total):
        calls.append((done, total))

    cached(photos, tmp_path / "cache", workers=0, progress=tell)
    assert calls[-1] == (len(photos), len(photos))
    calls.clear()
    cached(photos, tmp_path / "cache", workers=0, progress=tell)
    assert not calls
    cached(photos, tmp_path / "cache", short_side=30, workers=0, progress=tell)
    assert calls
    calls.clear()
    file = tmp_path / "photos/a/000.jpg"
    file.write_bytes(file.read_bytes() + b"\0")
    cached(photos, tmp_path / "cache", short_side=30, workers=0, progress=tell)
    assert calls


def test_other_pictures_of_the_same_size_are_noticed(tmp_path):
    class_folder(tmp_path / "photos", {"a": 3, "b": 3}, (600, 400))
    source = open_source(tmp_path / "photos", "all")
    before = np.asarray(cached(source, tmp_path / "cache", workers=0).read(0)[0])
    file = tmp_path / "photos/a/000.jpg"
    stat, size = file.stat(), file.stat().st_size
    other = encoded(Image.new("RGB", (600, 400), (255, 0, 0)))
    file.write_bytes(other + bytes(size - len(other)))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = np.asarray(cached(source, tmp_path / "cache", workers=0).read(0)[0])
    assert np.abs(before.astype(int) - after).mean() > 30
    assert after[200, 300].tolist() == [254, 0, 0]


def test_a_cache_can_compare_every_byte(tmp_path):
    class_folder(tmp_path / "photos", {"a": 3}, (600, 400))
    source = open_source(tmp_path / "photos", "all")
    told = []

    def make(verify):
        told.clear()
        cached(source, tmp_path / "cache", workers=0, verify=verify, progress=lambda *done: told.append(done))
        return bool(told)

    file = tmp_path / "photos/a/000.jpg"
    assert make(True)
    assert not make(True)
    data = bytearray(file.read_bytes())
    data[len(data) // 6] ^= 1
    file.write_bytes(data)
    assert make(True)
    assert make(False)
    assert not make(False)


def test_half_a_cache_is_none(photos, tmp_path):
    def stop(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(photos, tmp_path / "cache", workers=0, progress=stop)
    assert not list((tmp_path / "cache").iterdir())
    assert len(cached(photos, tmp_path / "cache", workers=0)) == len(photos)


def test_bad_images_stay_bad_and_named(tmp_path):
    (tmp_path / "odd/x").mkdir(parents=True)
    for name, data in odd_files().items():
        (tmp_path / "odd/x" / name).write_bytes(data)
    source = open_source(tmp_path / "odd", "all")
    kept = cached(source, tmp_path / "cache", workers=0)
    assert {source.names[int(i)] for i in json.loads((tmp_path / "cache/cache.json").read_text())["bad"]} == {
        f"x/{name}" for name in BAD
    }
    with pytest.raises(BadImage, match=r"^x/empty\.jpg: the file is empty"):
        kept.read(list(source.names).index("x/empty.jpg"))
    loader = EvalLoader(kept, InputSpec(size=(16, 16)), workers=0, bad_images="skip")
    assert sum(map(len, loader)) == len(source) - len(BAD)


def test_it_can_be_sent_to_a_worker_without_its_pixels(photos, tmp_path):
    kept = cached(photos, tmp_path / "cache", workers=0)
    sent = pickle.dumps(kept)
    assert len(sent) < 20_000 < (tmp_path / "cache/images.u8").stat().st_size
    assert np.array_equal(pickle.loads(sent).raw(2), kept.raw(2))


def test_mistakes(photos, tmp_path):
    with pytest.raises(ConfigError, match="give one of them"):
        cached(photos, tmp_path / "cache", spec=SPEC, short_side=3)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="could not be written"):
        cached(photos, tmp_path / "file/cache", workers=0)
