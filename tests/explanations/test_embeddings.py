"""Filters, positions and patches compared: against known tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.explanations.models import KINDS, tiny
from vitkit.errors import InputError
from vitkit.explanations.embeddings import filters, patch_similarity, position_similarity


def test_filters_are_the_principal_components() -> None:
    model, _ = tiny()
    found, share = filters(model, 6)
    E = model.patch_embedding.projection.weight.detach().double().flatten(1).numpy()
    values, vectors = np.linalg.eigh(np.cov(E, rowvar=False))
    for k in range(6):
        one = found[k].transpose(2, 0, 1).reshape(-1)
        assert abs(one @ vectors[:, -1 - k]) == pytest.approx(1, abs=1e-4)
        assert share[k] == pytest.approx(values[-1 - k] / values.sum(), rel=1e-3)
        assert one[np.abs(one).argmax()] > 0


def test_filters_of_few_outputs() -> None:
    model, _ = tiny("one channel, not square, padded", hidden_size=8)
    found, _ = filters(model)
    assert found.shape == (8, 8, 8, 1)


def test_similarity_of_a_sinusoidal_table() -> None:
    """cos and sin of the row and of the column: the similarity is the mean of cosines of their differences."""
    model, _ = tiny(image_size=(40, 56))
    rows, columns = np.mgrid[:5, :7]
    w = 0.9 ** np.arange(8)
    angle = [np.multiply.outer(place, w) for place in (rows, columns)]
    table = np.concatenate([f(a) for a in angle for f in (np.cos, np.sin)], -1).reshape(35, 32)
    with torch.no_grad():
        model.positions.table[0, 1:] = torch.from_numpy(table)
    found = position_similarity(model)
    for r, c in np.ndindex(5, 7):
        expected = (
            np.cos(np.multiply.outer(rows - r, w)).mean(-1) + np.cos(np.multiply.outer(columns - c, w)).mean(-1)
        ) / 2
        np.testing.assert_allclose(found[r, c], expected, atol=1e-5)
        assert found[r, c, r, c] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_patch_similarity(kind: str) -> None:
    model, x = tiny(kind)
    found = patch_similarity(model, x, patch=(1, 2))
    assert found[:, 1, 2] == pytest.approx(1, abs=1e-5)
    z = model.tokens(x).detach()[0, model.config.num_prefix_tokens :].double().numpy()
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    np.testing.assert_allclose(found[0].reshape(-1), z @ z[1 * found.shape[2] + 2], atol=1e-5)
    first = patch_similarity(model, x, patch=(1, 2), layer=0)
    assert not np.allclose(first, found)


def test_patch_similarity_refuses() -> None:
    model, x = tiny()
    with pytest.raises(InputError, match=r"4 rows and 4 columns.*row 4, column 0"):
        patch_similarity(model, x, patch=(4, 0))
    with pytest.raises(InputError, match=r"from 0 .* to 3; got 9"):
        patch_similarity(model, x, layer=9)
