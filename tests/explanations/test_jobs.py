"""explain, figures and patches as a user runs them: files, sizes, numbers, mistakes."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.explanations.models import tiny
from vitkit import create, load, save
from vitkit.checkpoints import DIALECTS
from vitkit.cli import app
from vitkit.data import preprocess
from vitkit.errors import DataError, InputError, UnknownName, VitkitError
from vitkit.explanations.attention import gradient_rollout, rollout
from vitkit.explanations.common import patch_map
from vitkit.explanations.occlusion import Faithfulness
from vitkit.explanations.plots import PLOTS
from vitkit.jobs.explain import Explained, crop_box, explain, over, patch_of, summary, target_of
from vitkit.jobs.figures import figures, pixels, sample_photos, some_images

NAMES = ("cat", "dog", "fish", "bird", "Ox")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (45, 80, 3), dtype=np.uint8)).save(tmp_path / "a photo.png")
    return tmp_path / "a photo.png"


def named(**more: object) -> torch.nn.Module:
    model, _ = tiny(**more)  # type: ignore[arg-type]
    model.input_spec = dataclasses.replace(model.input_spec, class_names=NAMES)
    return model


def run(*args: object) -> None:
    app([str(arg) for arg in args], standalone_mode=False)


def rows(path: Path) -> list[list[str]]:
    return list(csv.reader(path.read_text(encoding="utf-8").splitlines()))


def test_explain_writes_maps_at_the_images_resolution(photo: Path, tmp_path: Path) -> None:
    model = named()
    (one,) = explain(model, photo, tmp_path / "out", target="DOG", patch="1,2", occlusion=True)
    assert one.folder == tmp_path / "out" / "a photo"
    assert one.target == "dog"
    for name in ("rollout", "gradient-rollout", "similarity", "occlusion"):
        with Image.open(one.folder / f"{name}.png") as picture:
            assert picture.size == (80, 45)
    with Image.open(photo) as image:
        x = preprocess(image, model.input_spec)[None]
    expected = patch_map(rollout(model, x), model, (4, 4))[0]
    table = rows(one.folder / "patches.csv")
    assert table[0] == ["row", "column", "rollout", "gradient-rollout", "similarity", "occlusion"]
    assert len(table) == 17
    for row in table[1:]:
        assert float(row[2]) == pytest.approx(expected[int(row[0]), int(row[1])], rel=1e-4)
    with np.load(one.folder / "arrays.npz") as arrays:
        np.testing.assert_allclose(arrays["rollout.rollout"], expected, rtol=1e-6)
        assert arrays["attention.tokens"].shape == (3, 4, 17)
        assert tuple(arrays["similarity.patch"]) == (1, 2)
        assert int(arrays["occlusion.target"]) == 1
    said = rows(one.folder / "predictions.csv")
    p = model(x).softmax(1)[0].detach()
    assert said[1][0] == NAMES[int(p.argmax())]
    assert float(said[1][2]) == pytest.approx(float(p.max()), rel=1e-4)
    assert sum(float(row[2]) for row in said[1:]) == pytest.approx(1, abs=1e-4)
    assert len(rows(one.folder / "attention.csv")) == 1 + 3 * 4 * 16


def test_several_images_of_one_name_and_no_head(photo: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    with Image.open(photo) as image:
        image.convert("L").rotate(90, expand=True).save(tmp_path / "more" / "A Photo.png")
    model, _ = tiny(num_classes=0)
    found = list(explain(model, [photo, tmp_path / "more"], tmp_path / "out"))
    assert [one.folder.name for one in found] == ["a photo", "A Photo-2"]  # one folder where case does not count
    assert [one.predictions for one in found] == [(), ()]
    with Image.open(found[1].folder / "rollout.png") as picture:
        assert picture.size == (45, 80)
    assert not (found[0].folder / "predictions.csv").exists()
    with pytest.raises(InputError, match="no head"):
        next(explain(model, photo, tmp_path / "out", occlusion=True))


def test_faithfulness_is_written_and_summed_up(photo: Path, tmp_path: Path) -> None:
    found = list(explain(named(), photo, tmp_path / "out", score=True))
    table = summary(found)
    assert list(table) == ["rollout", "gradient-rollout", "occlusion", "random"]
    assert rows(found[0].folder / "faithfulness.csv")[1][0] == "rollout"
    assert (found[0].folder / "deletion.png").is_file()
    assert table["rollout"]["deletion"] == pytest.approx(found[0].scores["rollout"].deletion)
    assert table["rollout"]["deletion_beats_random"] in (0.0, 1.0)
    assert summary([]) == {}


def test_summary_by_hand() -> None:
    def explained(deletion: float, insertion: float) -> Explained:
        def score(deletion: float, insertion: float) -> Faithfulness:
            return Faithfulness(deletion=deletion, insertion=insertion, deleted=np.zeros(1), inserted=np.zeros(1))

        scores = {"map": score(deletion, insertion), "random": score(0.5, 0.5)}
        return Explained(image="", folder=Path(), predictions=(), target=None, scores=scores)

    found = summary([explained(0.2, 0.9), explained(0.4, 0.8), explained(0.3, 0.1)])["map"]
    assert found["deletion"] == pytest.approx(0.3)
    assert found["insertion"] == pytest.approx(0.6)
    assert found["deletion_beats_random"] == 1
    assert found["insertion_beats_random"] == pytest.approx(2 / 3)


def test_a_crop_is_put_where_it_was_taken() -> None:
    """A wide image cut in the middle: the outside is pale, and the map's hottest place is where its patch was."""
    spec = dataclasses.replace(tiny()[0].input_spec, resize="crop")
    image = Image.new("RGB", (100, 50), (128, 128, 128))
    assert crop_box(image, spec) == (25, 0, 75, 50)
    heat = np.zeros((4, 4))
    heat[1, 3] = 1
    found = over(image, heat, spec, 8).astype(int).max(-1)
    assert found[:, :25].min() >= 220
    assert found[:, 75:].min() >= 220
    inside = found[:, 25:75]
    hottest = np.unravel_index(inside.argmax(), inside.shape)
    assert 50 / 4 <= hottest[0] < 50 / 2
    assert 3 * 50 / 4 <= hottest[1] < 50
    squash = dataclasses.replace(spec, resize="squash")
    assert crop_box(image, squash) == (0, 0, 100, 50)


def test_padded_inputs_keep_their_place() -> None:
    model, _ = tiny("one channel, not square, padded")
    heat = np.zeros((6, 4))
    heat[5, 3] = 1  # half of this patch is padding: what is left of it is in the corner
    found = over(Image.new("RGB", (60, 88), (128, 128, 128)), heat, model.input_spec, 8).astype(int).max(-1)
    assert found.shape == (88, 60)
    assert found[-1, -1] == found.max()
    assert found[0, 0] < found[-1, -1]


def test_what_a_user_may_call_classes_and_patches() -> None:
    assert target_of("FISH", NAMES) == 2
    assert target_of("3", NAMES) == 3
    assert target_of(None, NAMES) is None
    with pytest.raises(InputError, match="no class 'dgo', did you mean 'dog'"):
        target_of("dgo", NAMES)
    with pytest.raises(InputError, match=f"There is no class 'burger'. Give one of {', '.join(NAMES)}, or a number"):
        target_of("burger", NAMES)
    with pytest.raises(InputError, match="from 0 to 4"):
        target_of("5", NAMES)
    assert patch_of("2,3", (4, 6)) == (2, 3)
    assert patch_of("7", (4, 6)) == (1, 0)
    for wrong in ("x", "1,2,3", "0", "25", "-1,2"):
        with pytest.raises(InputError, match="patch"):
            patch_of(wrong, (4, 6))


def test_figures_of_a_data_set(tmp_path: Path) -> None:
    model, _ = tiny("one channel, not square, padded", image_size=8, patch_size=2)
    source = some_images("digits", 20)
    assert len(source) == 20
    written = dict(figures(model, source, tmp_path))
    assert list(written) == [name for name, plot in PLOTS.items() if plot.needs != "image"]
    with np.load(tmp_path / "distance.npz") as arrays:
        assert int(arrays["images"]) == 20
    for files in written.values():
        assert all(file.stat().st_size > 100 for file in files)
    with pytest.raises(UnknownName, match="did you mean 'rollout"):
        next(figures(model, source, tmp_path, only=["rolout"]))


# The dialects that can hold a plain model; those of CLIP, SigLIP, DINOv3 and others hold their own parts only.
PLAIN = ("native", "huggingface", "timm", "torchvision", "google", "dinov2", "dinov2-hf", "course")


@pytest.mark.parametrize("dialect", PLAIN)
def test_every_dialect(dialect: str, photo: Path, tmp_path: Path) -> None:
    """Saving a model in any dialect and loading it again does not change its maps."""
    assert dialect in DIALECTS
    backbone = "dinov2" in dialect
    model = create(
        "vit-ti/16",
        num_hidden_layers=2,
        num_classes=0 if backbone else 5,
        image_size=32,
        patch_size=8,
        layer_scale=0.1 if backbone else None,
    ).eval()
    path = tmp_path / {"google": "w.npz", "huggingface": "w", "dinov2-hf": "w"}.get(dialect, "w.safetensors")
    save(model, path, dialect=dialect)
    loaded = load(path)
    x = torch.randn(1, 3, 32, 32)
    np.testing.assert_allclose(rollout(loaded, x), rollout(model, x), atol=1e-5)
    if not backbone:
        np.testing.assert_allclose(gradient_rollout(loaded, x, 1), gradient_rollout(model, x, 1), rtol=1e-2, atol=1e-6)


def test_some_images(photo: Path, tmp_path: Path) -> None:
    assert len(some_images(None, 128)) == 2
    assert len(some_images(tmp_path, 5)) == 1  # a plain folder
    assert len(some_images(str(tmp_path / "*.png"), 5)) == 1  # a pattern
    with pytest.raises(DataError, match="no data at"):
        some_images(str(tmp_path / "nothing"), 5)
    with pytest.raises(InputError, match="--count 0"):
        some_images("digits", 0)
    model, _ = tiny()
    assert [len(x) for x in pixels(sample_photos(), model.input_spec, 1)] == [1, 1]


def test_command_lines(photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "w.safetensors"
    save(create("vit-ti/16", num_hidden_layers=2, num_classes=3, image_size=32, patch_size=8), weights)
    run("explain", weights, photo, "--out", tmp_path / "e", "--faithfulness", "--image-size", "24x48")
    said = capsys.readouterr().out
    assert "overview.png" in said
    assert "beats random" in said
    assert len(rows(tmp_path / "e" / "a photo" / "patches.csv")) == 1 + 3 * 6
    run("figures", weights, "--out", tmp_path / "f", "--only", "filters", "--only", "distance")
    assert "two sample photos" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "f").iterdir()) == [
        "distance.csv",
        "distance.npz",
        "distance.png",
        "distance.svg",
        "filters.csv",
        "filters.npz",
        "filters.png",
        "filters.svg",
    ]
    run("figures", "--list")
    listed = capsys.readouterr().out
    assert all(name in listed for name in PLOTS)
    run("patches", photo, "--model", "vit-ti/16", "--image-size", "48x32", "--patch-size", 8, "--out", tmp_path / "p")
    said = capsys.readouterr().out
    assert "[6, 4, 8, 8, 3]" in said
    assert "random" in said
    assert "[1, 24]" in said
    assert len(list((tmp_path / "p").glob("*.png"))) == 8
    run("patches", photo, "--from", weights, "--out", tmp_path / "q")
    assert "random" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["figures"], "--list"),
        (["figures", "W", "--only", "nothing"], "Unknown plot"),
        (["explain", "W", "PHOTO", "--class", "seven"], "no class 'seven'"),
        (["explain", "W", "PHOTO", "--patch", "99,0"], "4 rows and 4 columns"),
        (["explain", "W", "PHOTO", "--out", "PHOTO"], "it is a file. Give the name of a folder"),
        (["patches", "PHOTO", "--model", "vit-x/1"], "Unknown variant"),
        (["patches", "PHOTO", "--model", "vit-ti/16", "--out", "PHOTO"], "it is a file. Give the name of a folder"),
    ],
)
def test_mistakes(args: list[str], words: str, photo: Path, tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    save(create("vit-ti/16", num_hidden_layers=1, num_classes=3, image_size=32, patch_size=8), weights)
    with pytest.raises(VitkitError, match=words):
        run(*({"W": weights, "PHOTO": photo}.get(arg, arg) for arg in args))
