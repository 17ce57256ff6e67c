"""Resizing of positions as arithmetic equals torch's own filters, rule by rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitkit.model.parts.positions import RULES, resize
from vitkit.speed.axis import AXES, resized


def test_the_tables_have_the_same_rows() -> None:
    assert list(AXES) == list(RULES)


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 24), m=st.integers(1, 40))
def test_matrix_of_an_axis(rule: str, n: int, m: int) -> None:
    mine = AXES[rule](n, torch.arange(m, dtype=torch.float32))
    assert (mine - RULES[rule](n, m)).abs().max() < 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_a_whole_table(rule: str) -> None:
    table = torch.randn(1, 1 + 7 * 5, 6)
    expected = resize(table, (7, 5), (4, 9), rule)
    assert (resized(table, (7, 5), (4, 9), rule) - expected).abs().max() < 2e-5


@pytest.mark.parametrize("rule", RULES)
def test_the_same_size_is_not_resized(rule: str) -> None:
    table = torch.randn(1, 1 + 7 * 5, 6)
    assert torch.equal(resized(table, (7, 5), (7, 5), rule), table)
    assert (resized(table, (7, 5), (7, 6), rule) - resize(table, (7, 5), (7, 6), rule)).abs().max() < 2e-5
