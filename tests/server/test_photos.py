"""The photos of a run on its page: some to try, and training photos that are similar to a photo."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from tests.server.conftest import files, photo, tiny
from vitkit.features.cache import FeatureCache
from vitkit.jobs import photos as module
from vitkit.jobs.photos import open_photos, spread
from vitkit.jobs.probe import probe
from vitkit.server.app import create_app
from vitkit.server.service import Service, name_of
from vitkit.server.settings import Settings


def folder(root: Path, parts: tuple[str, ...] = ("train", "test"), count: int = 4) -> Path:
    for p, part in enumerate(parts):
        for k, name in enumerate(("cat", "dog")):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                (root / part / name / f"{i}.png").write_bytes(photo(100 * p + 10 * k + i))
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    data = folder(tmp_path / "pets")
    probe(tiny(), data, tmp_path / "run", FeatureCache(tmp_path / "cache"), workers=0)
    return tmp_path / "run"


@pytest.fixture
def client(run: Path) -> TestClient:
    from vitkit import load

    service = Service(load(run), source=str(run))
    service.warm()
    service.photos = open_photos(run, service.model, run.parent / "cache")
    service.photos.wait()
    yield TestClient(create_app(service))
    service.close()


def test_a_training_photo_is_most_similar_to_itself(client, run: Path) -> None:
    raw = (run.parent / "pets/train/dog/2.png").read_bytes()
    card = client.get("/v1/model").json()
    assert (card["name"], card["similar"]) == ("run", True)
    first, bad = client.post("/v1/similar?count=3", files=files(raw, b"broken")).json()["results"]
    assert bad["kind"] == "BadImage"
    assert len(first["similar"]) == 3
    assert (first["similar"][0]["class"], first["similar"][0]["similarity"]) == ("dog", pytest.approx(1, abs=1e-4))
    found = client.get(first["similar"][0]["photo"])
    assert (found.content, found.headers["content-type"]) == (raw, "image/png")
    similarity = [one["similarity"] for one in first["similar"]]
    assert similarity == sorted(similarity, reverse=True)
    with Image.open(io.BytesIO(client.get(first["similar"][0]["photo"] + "?thumbnail=true").content)) as small:
        assert (small.format, small.size) == ("JPEG", (48, 40))


def test_samples_are_held_out_and_of_every_class(client, run: Path) -> None:
    samples = client.get("/v1/model").json()["samples"]
    assert sorted(samples.values()) == ["cat"] * 3 + ["dog"] * 3
    held = {path.read_bytes() for path in (run.parent / "pets/test").rglob("*.png")}
    for path in samples:
        assert client.get(path).content in held


def test_numbers_that_are_no_photo(client) -> None:
    for number in (16, 10**6):
        refused = client.get(f"/v1/photos/{number}")
        assert (refused.status_code, refused.json()["kind"]) == (422, "InputError")
    for path in ("-1", "x", "..%2f..%2fetc%2fpasswd", str(10**30)):
        assert client.get(f"/v1/photos/{path}").status_code in (404, 422)


@pytest.mark.parametrize("content", [b"broken", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n"])
def test_a_photo_that_was_damaged_since_is_a_sentence(client, run: Path, content: bytes) -> None:
    for path in (run.parent / "pets").rglob("*.png"):
        path.write_bytes(content)
    for number in ("0", "0?thumbnail=true"):
        refused = client.get(f"/v1/photos/{number}")
        assert (refused.status_code, refused.json()["kind"]) == (422, "BadImage"), refused.text
        assert "not an image in a format that vitkit reads" in refused.json()["error"]


def test_photos_need_the_token(run: Path) -> None:
    from vitkit import load

    service = Service(load(run), Settings(token="correct-horse"))
    service.warm()
    service.photos = open_photos(run, service.model, run.parent / "cache")
    client = TestClient(create_app(service))
    assert client.get("/v1/photos/0").status_code == 401
    assert client.get("/v1/photos/0", headers={"Authorization": "Bearer correct-horse"}).status_code == 200
    service.close()


def test_without_features_there_are_samples_only(run: Path, tmp_path: Path) -> None:
    from vitkit import load

    service = Service(load(run))
    service.warm()
    client = TestClient(create_app(service))
    assert client.get("/v1/photos/0").status_code == 422  # photos are not allowed by default here
    assert "flower" in str(client.get("/v1/model").json()["samples"])
    service.photos = open_photos(run, service.model, tmp_path / "empty cache")
    service.photos.wait()
    card = client.get("/v1/model").json()
    assert (len(card["samples"]), card["similar"]) == (6, False)
    refused = client.post("/v1/similar", files=files(photo()))
    assert refused.status_code == 422
    assert "no photos to compare with" in refused.json()["error"]
    service.close()


def test_data_that_is_gone_or_would_be_downloaded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    assert open_photos(run.parent / "elsewhere", model) is None
    (run.parent / "pets").rename(run.parent / "moved")
    assert open_photos(run, model) is None
    monkeypatch.setattr(module, "cache_folder", lambda: run.parent)
    assert not module._at_hand("food")
    assert module._at_hand("digits")


def test_photos_held_out_of_data_without_parts_are_not_searched(tmp_path: Path) -> None:
    data = folder(tmp_path / "pets", parts=(".",), count=20)
    probe(tiny(), data, tmp_path / "run", FeatureCache(tmp_path / "cache"), workers=0)
    found = open_photos(tmp_path / "run", tiny(), tmp_path / "cache")
    assert (len(found.train), len(found.held)) == (36, 4)
    assert not set(found.train.names) & set(found.held.names)
    found.wait()
    assert found.searchable


def test_a_photo_that_has_disappeared_is_an_error_of_its_own(client, run: Path) -> None:
    for path in (run.parent / "pets/train/cat").iterdir():
        path.unlink()
    assert client.get("/v1/photos/0").status_code == 422


def test_spread_takes_classes_in_turn() -> None:
    labels = np.repeat([0, 1, 2], [10, 1, 5])
    assert spread(labels, 6) == [3, 10, 12, 6, 13]
    assert spread(labels[:0], 6) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [("run", "run"), ("run@ema", "run@ema"), ("a.b.safetensors", "a.b"), ("google/vit", "google/vit")],
)
def test_short_names(tmp_path: Path, source: str, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "a.b.safetensors").touch()
    assert name_of(source if "/" in source else str(tmp_path / source)) == name
