"""The cache is never wrong: other keys, damage, two writers, and kills at random moments."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.test_gpu import stand_in
from tests.features.samples import photos, tiny
from vitkit.data import open_source
from vitkit.data.base import Pixels, Subset
from vitkit.data.decode import digest
from vitkit.data.gpu import GpuPixels
from vitkit.data.preprocess import preprocess
from vitkit.errors import BadImage, DataError, InputError, OutputError
from vitkit.evaluation.predict import Images
from vitkit.features import FeatureCache, embed, fill
from vitkit.features.cache import backbone_hash, space_of
from vitkit.features.choice import choose
from vitkit.runtime import Runtime


@pytest.fixture
def folder(tmp_path) -> Path:
    return photos(tmp_path / "photos", {"": 4})


@pytest.fixture
def cache(tmp_path) -> FeatureCache:
    return FeatureCache(tmp_path / "cache")


def direct(model, source) -> np.ndarray:
    with torch.no_grad():
        return torch.cat(
            [model.features(preprocess(source.read(i)[0], model.input_spec)[None]) for i in range(len(source))]
        ).numpy()


def test_features_are_the_models_and_are_computed_once(folder, cache) -> None:
    model, source, seen = tiny().train(), open_source(folder, "all"), []
    first = fill(model, source, cache, batch_size=5, workers=0, progress=seen.append)
    assert model.training
    assert (first.computed, first.reused, sum(seen)) == (12, 0, 12)
    second = fill(model, source, cache, progress=seen.append)
    assert (second.computed, second.reused, sum(seen)) == (0, 12, 24)
    found = second.read()
    assert np.allclose(found.features, direct(model.eval(), source), atol=1e-5)
    assert found.names == tuple(source.names)
    assert (found.labels == source.labels).all()
    assert cache.count(second.space) == 12


def test_workers_give_the_same(folder, cache, tmp_path) -> None:
    source = open_source(folder, "all")
    here = embed(tiny(), source, cache, workers=0)
    there = embed(tiny(), source, FeatureCache(tmp_path / "other"), workers=2, batch_size=5)
    assert np.allclose(here.features, there.features, atol=1e-5)


def test_other_weights_preprocessing_features_or_bytes_are_other_keys(folder, cache) -> None:
    import dataclasses

    model, source = tiny(), open_source(folder, "all")
    fill(model, source, cache, workers=0)

    other = tiny()
    with torch.no_grad():
        other.blocks[1].mlp.fc2.bias[0] += 1e-6
    eps = tiny(layer_norm_eps=1e-5)
    crop = tiny()
    crop.input_spec = dataclasses.replace(crop.input_spec, resize="crop", crop=0.9)
    mean = tiny()
    mean.input_spec = dataclasses.replace(mean.input_spec, mean=(0.4, 0.5, 0.5))
    for changed in (other, eps, crop, mean):
        assert fill(changed, source, cache, workers=0).computed == 12
    assert fill(model, source, cache, workers=0, features="mean").computed == 12
    assert fill(model, source, cache, workers=0, features="layers:0").computed == 12
    assert space_of(model, choose("cls", model.config), "bf16") != space_of(model, choose("cls", model.config), "fp32")

    head = tiny(num_classes=7, hidden_dropout_prob=0.0)  # what the features do not depend on
    head.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("head")}, strict=False)
    head.input_spec = dataclasses.replace(head.input_spec, class_names=tuple("abcdefg"))
    assert backbone_hash(head) == backbone_hash(model)
    assert fill(head, source, cache, workers=0).reused == 12

    photo = folder / "red" / "0.png"
    Image.open(photo).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(photo)
    again = fill(model, source, cache, workers=0)
    assert (again.computed, again.reused) == (1, 11)
    assert np.allclose(again.read().features, direct(model, source), atol=1e-5)


def test_precision_decoder_and_format_are_part_of_the_key(folder, cache, monkeypatch) -> None:
    model, source = tiny(), open_source(folder, "all")
    fill(model, source, cache, workers=0)
    runtime = Runtime("cpu")
    assert fill(model, source, cache, workers=0, runtime=runtime).reused == 12
    runtime.precision = "bf16"
    assert fill(model, source, cache, workers=0, runtime=runtime).computed == 12
    with monkeypatch.context() as other:
        other.setattr("PIL.__version__", "0.0")
        assert fill(model, source, cache, workers=0).computed == 12
    with monkeypatch.context() as other:
        other.setattr("vitkit.data.gpu.version", lambda name: "0.9")
        other.setattr("vitkit.data.eval_loader.GpuPixels", partial(GpuPixels, decoder=stand_in))
        filled = fill(model, source, cache, workers=0, decode="gpu")
        assert (filled.computed, filled.decode) == (12, "gpu")
        assert fill(model, source, cache, workers=0, decode="gpu").reused == 12
        other.setattr("vitkit.data.gpu.version", lambda name: "1.0")
        assert fill(model, source, cache, workers=0, decode="gpu").computed == 12
    with monkeypatch.context() as other:
        other.setattr("vitkit.features.cache.FORMAT", 0)
        assert fill(model, source, cache, workers=0).computed == 12
    assert fill(model, source, cache, workers=0).reused == 12


def test_equal_images_are_computed_once(cache) -> None:
    images = np.zeros((4, 9, 9, 3), np.uint8)
    images[3] += 200
    filled = fill(tiny(), Pixels(images, [0, 1, 0, 1], "ab"), cache)
    assert (filled.computed, filled.reused) == (2, 2)
    assert np.array_equal(filled.read().features[0], filled.read().features[2])
    assert not np.array_equal(filled.read().features[0], filled.read().features[3])


def damage(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(statement)
    db.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE features SET numbers = zeroblob(128) WHERE rowid = 3",
        "UPDATE features SET numbers = x'00' WHERE rowid = 3",
        "UPDATE features SET checksum = x'00' WHERE rowid = 3",
        # another image's numbers, with their own checksum
        "UPDATE features SET (numbers, checksum) = (SELECT numbers, checksum FROM features WHERE rowid = 1) "
        "WHERE rowid = 3",
        "DELETE FROM features WHERE rowid = 3",
    ],
)
def test_a_damaged_row_is_found_and_computed_again(folder, cache, statement) -> None:
    model, source = tiny(), open_source(folder, "all")
    expected = embed(model, source, cache, workers=0).features
    cache.close()
    damage(cache.path, statement)
    again = fill(model, source, cache, workers=0)
    assert (again.computed, again.reused) == (1, 11)
    assert np.allclose(again.read().features, expected, atol=1e-5)
    assert fill(model, source, cache, workers=0).computed == 0


def test_rows_of_another_space_are_not_taken(folder, cache) -> None:
    """Even if the table that numbers the spaces were mixed up."""
    source = open_source(folder, "all")
    fill(tiny(), source, cache, workers=0)
    fill(tiny(layer_norm_eps=1e-4), source, cache, workers=0)
    cache.close()
    damage(cache.path, "UPDATE spaces SET id = CASE id WHEN 1 THEN -2 ELSE -1 END")
    damage(cache.path, "UPDATE spaces SET id = -id")
    again = fill(tiny(), source, cache, workers=0)
    assert again.computed == 12
    assert np.allclose(again.read().features, direct(tiny(), source), atol=1e-5)


@pytest.mark.parametrize("how", ["header", "middle", "short", "text"])
def test_a_damaged_file_is_moved_aside(folder, tmp_path, how) -> None:
    notes: list[str] = []
    cache, model = FeatureCache(tmp_path / "cache", notes.append), tiny()
    source = open_source(folder, "all")
    expected = embed(model, source, cache, workers=0).features
    cache.close()
    data = bytearray(cache.path.read_bytes())
    if how == "header":
        data[:100] = bytes(100)
    elif how == "middle":
        data[4096:] = os.urandom(len(data) - 4096)
    elif how == "short":
        data = data[:5000]
    else:
        data = bytearray(b"this is no database at all, but a text of some length\n" * 200)
    cache.path.write_bytes(data)
    cache = FeatureCache(tmp_path / "cache", notes.append)
    assert np.allclose(embed(model, source, cache, workers=0).features, expected, atol=1e-5)
    assert any("damaged" in note for note in notes)
    assert list(cache.path.parent.glob("*.damaged-*"))


@pytest.mark.parametrize("workers", [0, 2])
def test_with_an_empty_cache_each_file_is_read_once(folder, cache, monkeypatch, workers) -> None:
    source, log = open_source(folder, "all"), folder.parent / "log"
    read = source.raw

    def raw(i: int) -> bytes:
        with open(log, "a") as file:  # workers are other processes
            file.write(f"{i}\n")
        return read(i)

    monkeypatch.setattr(source, "raw", raw)
    filled = fill(tiny(), source, cache, workers=workers, batch_size=5)
    assert sorted(map(int, log.read_text().split())) == list(range(12))
    assert np.array_equal(filled.digests, [digest(read(i)) for i in range(12)])
    assert np.allclose(filled.read().features, direct(tiny(), source), atol=1e-5)


def test_a_batch_of_copies_is_not_computed(cache) -> None:
    images = np.zeros((5, 9, 9, 3), np.uint8)
    images[4] += 9
    seen: list[int] = []
    filled = fill(tiny(), Pixels(images, [0] * 5, "a"), cache, batch_size=2, progress=seen.append)
    assert (filled.computed, filled.reused, sum(seen)) == (2, 3, 5)


def test_an_error_of_the_disk_is_raised_and_the_workers_end(folder, cache, monkeypatch) -> None:
    monkeypatch.setattr(cache, "write", lambda *_: (_ for _ in ()).throw(OutputError("The disk is full.")))
    before = multiprocessing.active_children()  # of other tests
    with pytest.raises(OutputError, match="The disk is full"):
        fill(tiny(), open_source(folder, "all"), cache, workers=2, batch_size=2)
    assert not set(multiprocessing.active_children()) - set(before)


def test_a_file_that_changes_meanwhile_is_not_embedded(folder, cache, monkeypatch) -> None:
    source, count = open_source(folder, "all"), {}
    fill(tiny(), Subset(source, [0]), cache, workers=0)  # so that the others are hashed first
    read = source.raw

    def raw(i: int) -> bytes:
        count[i] = count.get(i, 0) + 1
        return read((i + 1) % len(source) if count[i] > 1 and i == 2 else i)

    monkeypatch.setattr(source, "raw", raw)
    with pytest.raises(BadImage, match=r"blue/2.png: was changed"):
        fill(tiny(), source, cache, workers=0)
    assert fill(tiny(), open_source(folder, "all"), cache, workers=0).read().features.shape == (12, 32)


def test_bad_images(folder, cache) -> None:
    (folder / "red" / "0.png").write_bytes(b"no image")
    source = open_source(folder, "all")
    with pytest.raises(BadImage, match=r"red/0\.png"):
        fill(tiny(), source, cache, workers=0)
    filled = fill(tiny(), source, cache, workers=0, bad_images="skip")
    assert [name for name, _ in filled.skipped] == ["red/0.png"]
    assert len(filled.read().names) == 11
    (folder / "red" / "00.png").write_bytes(b"no image")  # the same bytes again: named as well
    filled = fill(tiny(), open_source(folder, "all"), cache, workers=0, bad_images="skip")
    assert [name for name, _ in filled.skipped] == ["red/0.png", "red/00.png"]
    assert len(filled.read().names) == 11
    (folder / "red" / "00.png").unlink()
    (folder / "red" / "1.png").unlink()
    filled = fill(tiny(), source, cache, workers=0, bad_images="skip")
    assert sorted(name for name, _ in filled.skipped) == ["red/0.png", "red/1.png"]
    assert len(filled.read().names) == 10
    with pytest.raises(BadImage, match=r"red/1\.png"):
        fill(tiny(), source, cache, workers=0)
    with pytest.raises(DataError, match="at least one readable image"):
        fill(tiny(), Images([b"bad", b"worse"]), cache, workers=0, bad_images="skip")


def test_a_cache_is_closed_when_nothing_holds_it(folder, tmp_path, monkeypatch) -> None:
    opened, connect = [], sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **how: opened.append(connect(*args, **how)) or opened[-1])
    found = fill(tiny(), open_source(folder, "all"), FeatureCache(tmp_path / "cache"), workers=0)
    assert len(found.read().features) == 12  # results read from it later
    del found
    for connection in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
            connection.execute("SELECT 1")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["features.sqlite"]  # no log is left beside it


def test_places_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="--cache"):
        FeatureCache(tmp_path / "file")
    (tmp_path / "taken" / "features.sqlite").mkdir(parents=True)
    with pytest.raises(OutputError, match="--cache"):
        FeatureCache(tmp_path / "taken")


def test_a_damaged_file_that_cannot_be_renamed(tmp_path, monkeypatch) -> None:
    """As on Windows, while another process has it open."""

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "features.sqlite").write_bytes(b"nonsense" * 1000)
    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OutputError, match=r"damaged and cannot be renamed \(Permission denied\).*--cache"):
        FeatureCache(tmp_path)


def test_many_images_are_asked_for_in_pieces(folder, cache, monkeypatch) -> None:
    model, source = tiny(), open_source(folder, "all")
    expected = embed(model, source, cache, workers=0).features
    monkeypatch.setattr("vitkit.features.cache.KEYS", 5)
    monkeypatch.setattr(sys.modules["vitkit.features.embed"], "CHUNK", 7)
    again = fill(model, source, cache, workers=0)
    assert (again.computed, again.reused) == (0, 12)
    assert np.array_equal(again.read().features, expected)


def test_any_number_of_rows_is_written_at_once(cache) -> None:
    space = cache.space({"a": "test"})
    rng = np.random.default_rng(0)
    for count in (0, 1, 240, 241, 500):
        images, rows = rng.integers(0, 256, (count, 32), np.uint8), rng.random((count, 5), np.float32)
        cache.write(space, images, rows)
        found, there = cache.read(space, images, 5)
        assert there.all()
        assert np.array_equal(found, rows)
    twice = np.repeat(images[:1], 2, axis=0)
    cache.write(space, twice, rows[1:3])
    assert np.array_equal(cache.read(space, twice, 5)[0], rows[[2, 2]])  # the last one counts
    assert cache.count(space) == 1 + 240 + 241 + 500


def test_weights_are_hashed_while_features_are_computed(folder, cache, monkeypatch) -> None:
    computed, hashed = threading.Event(), []

    def wait(*key):
        assert computed.wait(30)
        hashed.append(space_of(*key))
        return hashed[0]

    module = sys.modules["vitkit.features.embed"]
    monkeypatch.setattr(module, "space_of", wait)
    monkeypatch.setattr(module, "need_finite", lambda *given: computed.set())
    source = open_source(folder, "all")
    found = fill(tiny(), source, cache, workers=0)
    assert found.computed == len(source)
    assert len(hashed) == 1
    assert found.space == cache.space(hashed[0])


def test_nan_is_not_kept(folder, cache) -> None:
    model = tiny()
    torch.nn.init.constant_(model.norm.bias, float("nan"))
    with pytest.raises(InputError, match="NaN"):
        fill(model, open_source(folder, "all"), cache, workers=0)
    assert cache.count() == 0


POSIX = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
SCRIPT = """
import os, random, signal, sys, time
from tests.data.test_gpu import stand_in
from tests.features.samples import tiny
from vitkit.data import open_source
from vitkit.features import FeatureCache, fill

cache, folder, writers, kills = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
source, rng = open_source(folder, "all"), random.Random(0)

def child(tell=None, allowed=None):
    def progress(count):
        if tell is not None and count == 1:         # one image, not those that were there before
            os.write(tell, b".")
            os.read(allowed, 1)
    fill(tiny(), source, FeatureCache(cache), batch_size=1, workers=0, progress=progress)
    os._exit(0)

for round in range(kills + 1):
    if round < kills:
        (told, tell), (allowed, allow) = os.pipe(), os.pipe()
        images = rng.randint(1, 40)
        os.write(allow, bytes(images + 8))          # it cannot finish before it is killed, however fast it is
    children = [os.fork() or child(*((tell, allowed) if round < kills and not i else ())) for i in range(writers)]
    if round < kills:
        os.close(tell)
        while images and os.read(told, 1):
            images -= 1
        time.sleep(rng.uniform(0, 0.02))
        os.kill(children[0], signal.SIGKILL)
        for pipe in (told, allowed, allow):
            os.close(pipe)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    kept = FeatureCache(cache)
    print(*codes, kept.count(), flush=True)
    kept.close()
"""


def write(cache: Path, folder: Path, writers: int, kills: int) -> list[list[int]]:
    """Rounds of processes that fill the cache at the same time; in all but the last, the first of them is killed.

    Returns:
        The exit codes of each round, and the rows in the cache after it.
    """
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(cache), str(folder), str(writers), str(kills)],
        env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


def check(cache: Path, folder: Path, rows: int) -> None:
    """Everything is in the cache, and right."""
    model, source = tiny(), open_source(folder, "all")
    kept = FeatureCache(cache)
    filled = fill(model, source, kept, workers=0)
    assert (filled.computed, kept.count()) == (0, rows)
    assert np.allclose(filled.read().features, direct(model, source), atol=1e-5)
    with sqlite3.connect(kept.path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


@POSIX
def test_three_writers_at_once(tmp_path) -> None:
    folder = photos(tmp_path / "photos", {"": 30})
    assert write(tmp_path / "cache", folder, writers=3, kills=0) == [[0, 0, 0, 90]]
    check(tmp_path / "cache", folder, 90)


@POSIX
@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path, kills) -> None:
    """kill -9: what was written stays, is right, and the next process continues from there."""
    folder = photos(tmp_path / "photos", {"": 150})
    rounds = write(tmp_path / "cache", folder, writers=1, kills=kills)
    assert rounds[-1] == [0, 450]
    kept = [rows for _, rows in rounds]
    assert kept == sorted(kept)  # nothing that was written is lost
    assert [code for code, _ in rounds[:6]] == [-signal.SIGKILL] * 6  # and the first ones did not finish before
    assert kept[5] > 0
    check(tmp_path / "cache", folder, 450)


@POSIX
def test_one_of_two_writers_is_killed(tmp_path) -> None:
    folder = photos(tmp_path / "photos", {"": 60})
    rounds = write(tmp_path / "cache", folder, writers=2, kills=1)
    assert [codes[1] for codes in rounds] == [0, 0]  # the other one is not held up
    check(tmp_path / "cache", folder, 180)


def test_embedding_needs_no_optional_library(tmp_path) -> None:
    """On an accelerator's machine there may be torch, numpy and Pillow, and nothing else."""
    code = """
import sys
for name in ("typer", "rich", "matplotlib", "sklearn", "scipy", "accelerate", "huggingface_hub", "pyarrow", "pandas"):
    sys.modules[name] = None
import numpy as np
from tests.data.test_gpu import stand_in
from tests.features.samples import tiny
from vitkit import predict
from vitkit.data.base import Pixels, Subset
from vitkit.data.decode import digest
from vitkit.data.gpu import GpuPixels
from vitkit.evaluation import logits_of, measure
from vitkit.features import FeatureCache, fill, fit
source = Pixels(np.random.default_rng(0).integers(0, 256, (8, 9, 9, 3)), [0, 1] * 4, "ab")
found = fill(tiny(), source, FeatureCache(sys.argv[1])).read()
print(found.features.shape, measure(logits_of(tiny(), source)).n, len(predict(tiny(), np.zeros((9, 9), np.uint8))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        text=True,
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert done.stdout == "(8, 32) 8 1\n", done.stderr
