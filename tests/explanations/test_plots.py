"""Every plot on every kind of model: finite, deterministic, drawn and written; and the pictures of Eq. 1."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from tests.explanations.models import KINDS, tiny
from vitkit import ViT
from vitkit.errors import InputError, OutputError
from vitkit.explanations import draw
from vitkit.explanations.common import PlotOptions, grid_of, image_of, patch_at
from vitkit.explanations.patches import PICTURES, cut, draw_all, embedding
from vitkit.explanations.plots import PLOTS

OF_VITS = [name for name, plot in PLOTS.items() if ViT in plot.models]  # tests/test_backbones.py has the others


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OF_VITS)
def test_arrays(name: str, kind: str) -> None:
    model, x = tiny(kind)
    plot = PLOTS[name]
    once, twice = plot.arrays(model, x, PlotOptions()), plot.arrays(model, iter(x.split(1)), PlotOptions())
    assert once.keys() == twice.keys()
    assert once[plot.value].ndim == len(plot.axes)
    for key, values in once.items():
        assert values.dtype.kind in "fiuU", key
        if values.dtype.kind == "f":
            missing = np.isnan(values)
            assert not missing.any() or kind == "pruned"
            np.testing.assert_allclose(values[~missing], twice[key][~missing], atol=1e-5)
    if plot.needs == "image" and len(plot.axes) == 2:
        assert once[plot.value].shape == tuple(-(-s // 8) for s in model.config.image_hw)


@pytest.mark.parametrize("name", OF_VITS)
def test_drawn_and_written(name: str, tmp_path: Path) -> None:
    model, x = tiny("pruned")
    plot = PLOTS[name]
    arrays = plot.arrays(model, x, PlotOptions())
    files = plot.write(arrays, tmp_path / "x" / name)
    assert [file.suffix for file in files] == [".png", ".svg", ".npz", ".csv"]
    with Image.open(files[0]) as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 10  # something is on it
    ElementTree.parse(files[1])
    with np.load(files[2]) as stored:
        for key, values in arrays.items():
            np.testing.assert_array_equal(stored[key], values)
    rows = list(csv.reader(files[3].read_text(encoding="utf-8").splitlines()))
    assert rows[0] == [*plot.axes, plot.value]
    assert len(rows) - 1 == np.isfinite(arrays[plot.value]).sum()
    *index, value = rows[-1]
    assert float(value) == pytest.approx(arrays[plot.value][tuple(map(int, index))], rel=1e-4, abs=1e-6)


def test_what_cannot_be_made_says_so() -> None:
    model, x = tiny(num_classes=0)
    for plot in PLOTS.values():
        assert plot.fits(model) == (not plot.head and ViT in plot.models)
        if plot.head:
            with pytest.raises(InputError, match="no head"):
                plot.arrays(model, x, PlotOptions())
    with pytest.raises(InputError, match="needs a ResNet"):
        PLOTS["activation"].arrays(*tiny(), PlotOptions())
    with pytest.raises(InputError, match="got none"):
        PLOTS["rollout"].arrays(model, iter(()), PlotOptions())


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plot = PLOTS["filters"]
    with pytest.raises(OutputError, match="--out"):
        plot.write(plot.arrays(tiny()[0], torch.zeros(0), PlotOptions()), tmp_path / "file" / "x")
    with pytest.raises(OutputError, match="--out"):
        draw.save(draw.bars(["a"], [1.0], title="", x=""), tmp_path / "file" / "x.png")


def test_inline_drawings_take_the_pages_colour() -> None:
    drawn = draw.lines({"a": ([0, 1], [0, 1]), "b": ([0, 1], [1, 0])}, title="A < B", x="x", y="y")
    text = draw.inline(drawn, 'a "b" <')
    root = ElementTree.fromstring(text.replace("xlink:href", "href"))
    assert root.get("aria-label") == 'a "b" <'
    assert root.get("width") is None
    assert "currentColor" in text
    assert draw.INK not in text


def test_any_name_can_be_drawn(tmp_path: Path) -> None:
    names = ["$1 & $2", "{a_b^c}$", "\u5bff\u53f8", "<b>", "x" * 200]
    for drawn in (
        draw.bars(names, np.arange(5.0), title="$\\frac$", x="$"),
        draw.matrix(np.eye(5), names, title="$", x="", y=""),
    ):
        text = draw.inline(drawn, "names $")
        words = [node.text for node in ElementTree.fromstring(text.replace("xlink:href", "href")).iter() if node.text]
        assert all(name in words for name in [*names[:4], "x" * 23 + "…"])
        draw.save(drawn, tmp_path / "x.png", tmp_path / "x.svg")


def test_the_same_drawing_has_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw.save(draw.lines({"a": ([0, 1], [0, 1])}, title="t", x="x", y="y"), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_overlay_and_frames_keep_the_size() -> None:
    image = np.full((30, 50, 3), 128, np.uint8)
    heat = np.zeros((3, 5))
    heat[1, 4] = 1
    over = draw.overlay(image, heat)
    assert over.shape == image.shape
    middle = over.astype(int).max(-1)
    assert middle[14, 46] > middle[3, 3]
    frame = draw.framed(image, (1, 4), (3, 5))
    assert tuple(frame[10, 40]) == draw.FRAME
    assert (frame[:10] == image[:10]).all()


def test_enlarged_is_bilinear_between_centres() -> None:
    found = draw.enlarged(np.array([[0.0, 1.0]]), 2, 8)
    theirs = torch.nn.functional.interpolate(torch.tensor([[[[0.0, 1.0]]]]), (2, 8), mode="bilinear")[0, 0].numpy()
    np.testing.assert_allclose(found, theirs, atol=1e-6)
    rng = np.random.default_rng(0)
    values = rng.random((5, 7)).astype(np.float32)
    theirs = torch.nn.functional.interpolate(torch.from_numpy(values)[None, None], (33, 40), mode="bilinear")[0, 0]
    np.testing.assert_allclose(draw.enlarged(values, 33, 40), theirs.numpy(), atol=1e-5)


def test_to_unit_range_takes_constants_and_outliers() -> None:
    assert (draw.to_unit_range(np.full((3, 3), 7.0)) == 0).all()
    values = np.zeros((10, 10))
    values[0, 0] = 1  # one patch above everything
    assert draw.to_unit_range(values)[0, 0] == 1


def test_grids_and_the_middle_patch() -> None:
    model, x = tiny("one channel, not square, padded")
    assert grid_of(model, x) == (6, 4)  # 44 x 30 pixels in patches of 8, the last ones padded
    assert patch_at(None, (4, 7)) == (2, 3)


def test_images_are_seen_as_they_were() -> None:
    model, _ = tiny()
    model.input_spec = dataclasses.replace(model.input_spec, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    given = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    mean, std = (torch.tensor(v) for v in (model.input_spec.mean, model.input_spec.std))
    x = ((given / 255 - mean) / std).permute(0, 3, 1, 2)
    np.testing.assert_array_equal(image_of(x, model), given.numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_is_eq_1(kind: str, tmp_path: Path) -> None:
    model, x = tiny(kind)
    a = embedding(model, x[:1])
    c = model.config
    rows, columns = (-(-side // 8) for side in c.image_hw)
    N, D = rows * columns, c.hidden_size
    assert a["patches"].shape == (rows, columns, 8, 8, 3)
    assert a["maps"].shape == (D, rows, columns)
    assert a["sequence"].shape == (c.num_prefix_tokens + N, D)
    np.testing.assert_allclose(a["sequence"][c.num_prefix_tokens :], a["embedded"] + a["positions"][-N:], atol=1e-5)
    np.testing.assert_array_equal(a["maps"].reshape(D, -1).T, a["embedded"])
    np.testing.assert_array_equal(a["patches"], cut(a["image"], 8))
    if kind in ("registers", "mean pool"):
        files = draw_all(a, tmp_path)
        assert len(files) == len(PICTURES) + 1
        assert all(file.stat().st_size > 1000 for file in files)
