"""Pictures by their numbers: colours, scales, labels and places, against constants written out here."""

from __future__ import annotations

import re

import matplotlib as mpl
import numpy as np
import pytest
import torch

from tests.explanations.models import tiny
from vitkit.explanations import draw
from vitkit.explanations.attention import rollout
from vitkit.explanations.common import PlotOptions
from vitkit.explanations.occlusion import occlusion
from vitkit.explanations.patches import PICTURES, embedding
from vitkit.explanations.pixels import WARM
from vitkit.explanations.plots import PLOTS


def test_the_colours_of_maps_are_inferno() -> None:
    theirs = mpl.colormaps["inferno"](np.linspace(0, 1, 9))[:, :3] * 255
    np.testing.assert_allclose(WARM, theirs, atol=3)


def test_values_are_drawn_in_their_colours() -> None:
    for scale, name in ((None, "inferno"), (draw.SIGNED, "viridis")):
        sheet = draw.tiles([np.array([[-1.0, 0.5]])], 1, scale=scale, limits=(-1, 1)).axes[0].images[0].get_array()
        theirs = np.array([mpl.colormaps[name](at)[:3] for at in (0.0, 0.75)]) * 255
        np.testing.assert_allclose(sheet[0, :2, :3], theirs, atol=1)
    model, x = tiny()
    arrays = embedding(model, x[:1])
    arrays["maps"] = np.tile(np.array([0.0, 1.0]), (32, 4, 2))  # alternating columns of the least and the largest value
    sheet = PICTURES["feature_maps"](arrays).axes[0].images[0].get_array()
    drawn = {tuple(colour) for colour in sheet[..., :3][sheet[..., 3] == 255]}
    assert drawn == {tuple(int(c * 255) for c in mpl.colormaps["viridis"](at)[:3]) for at in (0.0, 1.0)}


def test_unit_range_saturates_at_the_97th_percentile() -> None:
    values = np.arange(101.0)
    expected = np.minimum(values / 97, 1)
    np.testing.assert_allclose(draw.to_unit_range(values), expected, rtol=1e-6)


def test_overlay_brightens_where_the_map_is_high() -> None:
    image = np.full((4, 8, 3), (90, 100, 110), np.uint8)
    found = draw.overlay(image, np.array([[0.0, 1.0]]))
    assert found[0, 0].tolist() == [
        int((0.8 * 100 + 0.2 * c) * 0.35 + 8) for c in (90, 100, 110)
    ]  # dimmed, nearly gray
    warm = np.array([mpl.colormaps["inferno"](0.95)[i] * 255 for i in range(3)])
    np.testing.assert_allclose(found[0, -1], 0.55 * np.array((90, 100, 110)) + 0.45 * warm, atol=6)
    half = draw.overlay(image, np.array([[0.5, 0.5]]), (0.0, 1.0))
    assert (found[0, 0] < half[0, 0]).all()
    assert (half[0, 0] == half[0, -1]).all()  # given limits, equal values look alike


def test_points_start_at_layer_1() -> None:
    figure = draw.points(np.array([[5.0, 7.0], [6.0, np.nan]]), title="", x="layer", y="", name="Head")
    first, second = (c.get_offsets().data.tolist() for c in figure.axes[0].collections)
    assert first == [[1, 5], [2, 6]]
    assert second[0] == [1, 7]
    low, high = figure.axes[0].get_ylim()
    assert -0.05 * high < low < 0  # zero, and room for a point there
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["Head 1", "Head 2"]


def test_a_confusion_matrix_is_coloured_by_its_rows() -> None:
    figure = draw.matrix(np.array([[3, 1], [0, 0]]), ["a", "b"], title="", x="predicted", y="true")
    (image,) = figure.axes[0].images
    np.testing.assert_allclose(image.get_array(), [[0.75, 0.25], [0, 0]])
    assert image.get_clim() == (0, 1)
    assert [text.get_text() for text in figure.axes[0].texts] == ["3", "1"]
    assert figure.axes[0].get_xlabel() == "predicted"


def test_values_are_symmetric_about_zero() -> None:
    figure = draw.values(np.linspace(-50, 100, 151)[None], title="", x="", y="")
    (image,) = figure.axes[0].images
    assert image.get_clim() == pytest.approx((-98.5, 98.5))  # the 99th percentile of |value|
    assert image.get_cmap().name == "RdBu_r"


def labels(name: str, kind: str = "plain") -> tuple[list[str], list[str], list[str]]:
    model, x = tiny(kind)
    figure = PLOTS[name].draw(PLOTS[name].arrays(model, x, PlotOptions()))
    axis = figure.axes[0]
    said = [str(figure.get_suptitle()), axis.get_title(), *(text.get_text() for text in axis.texts)]
    return (
        [tick.get_text() for tick in axis.get_yticklabels()],
        [tick.get_text() for tick in axis.get_xticklabels()],
        said,
    )


def test_pictures_count_layers_and_heads_from_1() -> None:
    left, top, said = labels("attention")
    assert [line.split("\n")[0] for line in left] == ["layer 1", "layer 2", "layer 3"]
    assert all(re.fullmatch(r"layer \d\n0 to \d+\.\d%\+", line) for line in left)  # each row says its scale
    assert top == ["head 1", "head 2", "head 3", "head 4"]
    assert said[0].startswith("Attention of the class token (Eq. 6)\n")
    assert labels("attention", "mean pool")[2][0].startswith("Attention of the mean of the patches (Eq. 6)\n")
    assert labels("positions")[0] == ["1", "2", "3", "4"]


def test_the_five_most_probable_of_seven_classes() -> None:
    model, x = tiny(num_classes=7)
    found = PLOTS["predictions"].arrays(model, x, PlotOptions(names=tuple("abcdefg")))
    p = model(x[:1]).softmax(1)[0].detach().numpy()
    order = np.argsort(-p)[:5]
    assert found["index"].tolist() == order.tolist()
    assert found["name"].tolist() == ["abcdefg"[k] for k in order]
    np.testing.assert_allclose(found["probability"], p[order], rtol=1e-5)


def test_a_sheet_of_rollouts_has_24_images() -> None:
    model, _ = tiny()
    x = torch.randn(30, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = PLOTS["rollouts"].arrays(model, x, PlotOptions())
    assert found["rollout"].shape == (24, 4, 4)
    np.testing.assert_allclose(found["rollout"].reshape(24, 16), rollout(model, x[:24])[:, 1:], rtol=1e-5)


def test_filters_are_gray_at_zero() -> None:
    filters = np.zeros((1, 2, 2, 3), np.float32)
    filters[0, 0, 0], filters[0, 1, 1] = 0.2, -0.1
    figure = PLOTS["filters"].draw({"filters": filters, "share": np.array([0.25])})
    shown = figure.axes[0].images[0].get_array()
    assert shown[:2, :2, 0].tolist() == [[255, 127], [127, 63]]
    assert "(25% of the variance)" in str(figure.get_suptitle())


def test_similarity_of_positions_is_drawn_from_minus_1_to_1() -> None:
    model, x = tiny()
    figure = PLOTS["positions"].draw(PLOTS["positions"].arrays(model, x, PlotOptions()))
    assert figure.axes[1].get_ylim() == (-1, 1)
    assert figure.axes[1].get_ylabel() == "cosine similarity"


def test_pictures_of_eq_1_name_their_shapes() -> None:
    model, x = tiny("registers")
    arrays = embedding(model, x[:1])
    said = {
        name: str(picture(arrays).get_suptitle()) or picture(arrays).axes[0].get_title()
        for name, picture in PICTURES.items()
    }
    for name, words in {
        "image": "32 x 32 x 3",
        "row": "Row 3 of 4: 4 patches of 8 x 8 x 3",
        "grid": "4 x 4 = 16 patches of 8 x 8 x 3",
        "feature_maps": "10 random channels of 32, each 4 x 4",
        "flattened": "4 x 4 -> [1 x 16], channel 17 of 32",
        "embedding": "patch 11 of 16 as a vector [1 x 32]",
        "positions": "[17 x 32]",
        "sequence": "[20 tokens x 32]",
    }.items():
        assert words in said[name]


def test_occlusion_covers_3_by_3_patches_of_a_large_grid() -> None:
    """The default window, by what it changes: 3 on a grid of 7 or more, 1 below."""
    for side, window in ((6, 1), (7, 3)):
        model, _ = tiny(image_size=8 * side)
        x = torch.randn(1, 3, 8 * side, 8 * side, generator=torch.Generator().manual_seed(0))
        found = occlusion(model, x, 1)
        np.testing.assert_array_equal(found, occlusion(model, x, 1, window=window))
        assert not np.allclose(found, occlusion(model, x, 1, window=4 - window))


def test_reliability_is_compared_with_the_diagonal() -> None:
    axis = draw.reliability([0.5, 0.9], [0.25, 1.0], [(0.2, 0.4), (0.7, 1.0)], title="").axes[0]
    assert axis.lines[0].get_xydata().tolist() == [[0, 0], [1, 1]]
    assert axis.lines[1].get_xydata().tolist() == [[0.5, 0.25], [0.9, 1]]
    assert [line.tolist() for line in axis.collections[0].get_segments()] == [
        [[0.5, 0.2], [0.5, 0.4]],
        [[0.9, 0.7], [0.9, 1.0]],
    ]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("confidence", "accuracy")
