"""vitkit.predict: every form of image, in the order given, and nothing skipped silently."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from tests.features.samples import photos, tiny
from vitkit.data.preprocess import preprocess
from vitkit.errors import BadImage, DataError, InputError
from vitkit.evaluation.predict import files, predictions, runs
from vitkit.runtime import Runtime


@pytest.fixture
def model() -> vitkit.ViT:
    return tiny()


@pytest.fixture
def folder(tmp_path) -> Path:
    return photos(tmp_path / "photos", {"": 4})


def encoded(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_every_form_of_one_image_gives_the_same(model, folder) -> None:
    path = folder / "red" / "0.png"
    image = Image.open(path)
    with torch.no_grad():
        p = model(preprocess(image, model.input_spec)[None]).softmax(-1)[0]
    for given in (path, str(path), path.read_bytes(), image, np.asarray(image), [path], iter([encoded(image)])):
        found = vitkit.predict(model, given, top=2)
        assert len(found) == 1
        assert [g.index for g in found[0].guesses] == p.argsort(descending=True)[:2].tolist()
        assert found[0].probability == pytest.approx(float(p.max()), abs=1e-5)
        assert found[0].name == str(int(p.argmax()))  # an output without a name has its number
    assert vitkit.predict(model, path)[0].image == str(path)
    assert len(vitkit.predict(model, path)[0].guesses) == 4  # no more than there are
    assert len(vitkit.predict(tiny(num_classes=9), path)[0].guesses) == 5  # unless told otherwise


def test_folders_and_patterns(model, folder) -> None:
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_text("no image")
    (folder / "red" / "10.png").write_bytes((folder / "red" / "0.png").read_bytes())
    names = [p.image for p in vitkit.predict(model, folder, batch_size=5)]
    assert len(names) == 13
    assert [Path(name).stem for name in names if "/red/" in name] == ["0", "1", "2", "3", "10"]
    several = vitkit.predict(model, [str(folder / "red" / "*.png"), folder / "blue", folder / "green" / "1.png"])
    assert len(several) == 5 + 4 + 1
    assert len(vitkit.predict(model, str(folder / "**" / "1.png"))) == 3
    (folder / "odd[1].png").write_bytes((folder / "red" / "0.png").read_bytes())
    assert files(folder / "odd[1].png") == [str(folder / "odd[1].png")]  # a file whose name looks like a pattern


def test_what_cannot_be_read(model, folder) -> None:
    (folder / "red" / "0.png").write_bytes(b"")
    with pytest.raises(BadImage, match=r"red/0\.png"):
        vitkit.predict(model, folder)
    found = vitkit.predict(model, [folder, "nowhere.jpg"], bad_images="skip", batch_size=3)
    assert len(found) == 11
    assert [Path(name).name for name, _ in found.skipped] == ["0.png", "nowhere.jpg"]
    assert "empty" in found.skipped[0][1]
    assert len(vitkit.predict(model, "nowhere.jpg", bad_images="skip")) == 0


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([], DataError, "at least one"),
        ("nothing/*.jpg", DataError, "files that match"),
        (np.zeros((3, 8, 8), np.uint8), InputError, r"uint8\[3, 8, 8\]"),
        (np.zeros((8, 8, 3), np.float32), InputError, "float32"),
        ([3], InputError, "got int"),
    ],
)
def test_what_is_not_an_image(model, given, error, words) -> None:
    with pytest.raises(error, match=words):
        vitkit.predict(model, given)


def test_an_empty_folder_and_no_guesses(model, tmp_path) -> None:
    with pytest.raises(DataError, match="Expected images in the folder"):
        vitkit.predict(model, tmp_path)
    with pytest.raises(InputError, match="top must be"):
        vitkit.predict(model, np.zeros((8, 8), np.uint8), top=0)


def test_predictions_come_as_they_are_made(model) -> None:
    made: list[int] = []

    def images():
        for i in range(6):
            made.append(i)
            yield np.full((8, 8), i, np.uint8)

    stream = predictions(model, images(), batch_size=2)
    assert [p.image for p in stream] == [f"image {i}" for i in range(6)]


def test_precision_is_that_of_the_runtime(model, folder) -> None:
    runtime = Runtime("cpu", "bf16")
    assert runs(model, 16, 4, runtime).name == "bf16"
    images = sorted(folder.rglob("*.png"))
    found = list(predictions(model, images, top=1, runtime=runtime))
    x = torch.stack([preprocess(Image.open(path), model.input_spec) for path in images])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = model.features(x)
    with torch.no_grad():
        p = model.classify(y.float()).softmax(-1)
        exact = model(x).softmax(-1)
    assert [one.probability for one in found] == pytest.approx(p.amax(1).tolist(), abs=1e-3)
    assert (p - exact).abs().max() > 1e-5  # the two precisions differ


def test_what_has_a_precision_of_its_own_keeps_it(model, folder) -> None:
    runtime = SimpleNamespace(precision="bf16", device=torch.device("cpu"))
    assert runs(model, 16, 4, runtime).name == "bf16"
    assert runs(model, 16, 4, None).name == "fp32"
    assert runs(lambda x: x, 16, 4, runtime).name == "as exported"
    model.known = object()
    assert runs(model, 16, 4, runtime).name == "fp32"
