"""Occlusion and faithfulness on models whose answer is known to come from one place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.explanations.models import KINDS, tiny
from vitkit import ViT
from vitkit.errors import InputError
from vitkit.explanations.occlusion import blurred, faithfulness, occlusion


class OnePatch(ViT):
    """A model whose logit of class 1 is the brightness of the patch in row 1, column 2."""

    def forward(self, x: torch.Tensor, head_mask: torch.Tensor | None = None) -> torch.Tensor:
        bright = x[:, :, 8:16, 16:24].mean((1, 2, 3))
        return torch.stack([torch.zeros_like(bright), 4 * bright], 1)


def one_patch() -> tuple[OnePatch, torch.Tensor]:
    model = OnePatch(tiny(num_classes=2)[0].config).eval()
    x = torch.rand(1, 3, 32, 32) * 0.1
    x[:, :, 8:16, 16:24] += 1
    return model, x


def test_occlusion_finds_the_one_patch_that_matters() -> None:
    model, x = one_patch()
    told: list[tuple[int, int]] = []
    found = occlusion(model, x, 1, batch=5, progress=lambda done, of: told.append((done, of)))
    assert found.shape == (1, 4, 4)
    assert np.unravel_index(found[0].argmax(), (4, 4)) == (1, 2)
    expected = np.zeros((4, 4))
    logit = 4 * float(x[:, :, 8:16, 16:24].mean())
    expected[1, 2] = -np.log1p(np.exp(-logit)) + np.log(2)
    np.testing.assert_allclose(found[0], expected, atol=1e-5)
    assert told[-1] == (16, 16)
    assert [done for done, _ in told] == [5, 10, 15, 16]


def test_a_wider_window_covers_the_neighbours() -> None:
    model, x = one_patch()
    found = occlusion(model, x, 1, window=3)[0]
    assert ((found > 0.1) == np.array([[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]], bool)).all()
    with pytest.raises(InputError, match="odd window"):
        occlusion(model, x, window=2)


@pytest.mark.parametrize("kind", KINDS)
def test_occlusion_of_every_kind(kind: str) -> None:
    model, x = tiny(kind)
    found = occlusion(model, x)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, occlusion(model, x))


def test_faithfulness_tells_truth_from_noise() -> None:
    model, x = one_patch()
    truth, wrong = np.zeros((4, 4)), np.ones((4, 4))
    truth[1, 2], wrong[1, 2] = 1, 0
    found = faithfulness(model, x, {"truth": truth, "wrong": wrong}, 1, steps=16)
    assert found["truth"].deletion < found["random"].deletion < found["wrong"].deletion
    assert found["truth"].insertion > found["random"].insertion > found["wrong"].insertion
    p = float(model(x).softmax(1)[0, 1])
    assert found["truth"].deleted[0] == pytest.approx(p, abs=1e-6)
    np.testing.assert_allclose(found["truth"].deleted[1:], 0.5, atol=1e-6)
    assert found["truth"].deletion == pytest.approx((p + 0.5) / 2 / 16 + 0.5 * 15 / 16, abs=1e-6)
    np.testing.assert_allclose(found["truth"].inserted[1:], p, atol=1e-6)


def test_faithfulness_is_the_same_twice_and_refuses_what_does_not_fit() -> None:
    model, x = tiny()
    once = faithfulness(model, x[:1], {"a": np.arange(16.0).reshape(4, 4)})
    again = faithfulness(model, x[:1], {"a": np.arange(16.0).reshape(4, 4)})
    assert {name: s.deletion for name, s in once.items()} == {name: s.deletion for name, s in again.items()}
    with pytest.raises(InputError, match="one image"):
        faithfulness(model, x, {})
    with pytest.raises(InputError, match="maps of 4 x 4 patches; 'a' has 9 values"):
        faithfulness(model, x[:1], {"a": np.zeros((3, 3))})


def test_ten_steps_and_the_mean_of_three_random_orders() -> None:
    model, x = tiny()
    found = faithfulness(model, x[:1], {}, 1)["random"]
    assert len(found.deleted) == len(found.inserted) == 11
    rng = np.random.default_rng(0)
    orders = {str(i): -np.argsort(rng.permutation(16)).reshape(4, 4) for i in range(3)}
    scores = faithfulness(model, x[:1], orders, 1)
    np.testing.assert_allclose(found.deleted, np.mean([scores[name].deleted for name in orders], 0), atol=1e-6)


def test_blurred_averages_squares_of_two_patches() -> None:
    x = torch.zeros(1, 32, 32)
    x[:, :16, :16] = 1
    soft = blurred(x, 8)[0]
    assert soft[[0, 0, 31], [0, 31, 31]].tolist() == [1, 0, 0]
    assert soft[15, 0] == pytest.approx(17 / 32)  # bilinear between the centres of the squares, at rows 7.5 and 23.5


def test_blurred_keeps_the_mean() -> None:
    x = torch.rand(3, 32, 32)
    soft = blurred(x, 8)
    assert soft.shape == x.shape
    torch.testing.assert_close(soft.mean((1, 2)), x.mean((1, 2)), atol=0.02, rtol=0)
    assert soft.std() < x.std() / 3
