"""Token merging against a plain version of itself, and what must hold whatever is merged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.test_vit import pixels, tiny
from tests.speed.test_fused import KINDS, relative
from vitkit.errors import ConfigError
from vitkit.speed.graph import Graph
from vitkit.speed.merge import merge, plan


def slowly(z: torch.Tensor, size: torch.Tensor, k: torch.Tensor, r: int, n: int) -> list[dict[frozenset[int], tuple]]:
    """One image at a time, one token at a time: {the tokens that went in: (their mean, their size)}."""
    images = []
    for b in range(len(z)):
        keys = torch.nn.functional.normalize(k[b].mean(0), dim=-1)
        patches = range(n, z.shape[1])
        first, second = patches[::2], patches[1::2]
        best = {i: max(second, key=lambda j, i=i: float(keys[i] @ keys[j])) for i in first}
        going = sorted(first, key=lambda i: -float(keys[i] @ keys[best[i]]))[:r]
        groups = {j: [j] for j in [*range(n), *second, *(i for i in first if i not in going)]}
        for i in going:
            groups[best[i]].append(i)
        found = {}
        for members in groups.values():
            weight = size[b, members]
            found[frozenset(members)] = ((z[b, members] * weight).sum(0) / weight.sum(), weight.sum())
        images.append(found)
    return images


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 17), st.integers(0, 2), st.integers(0, 99), st.data())
def test_merge_equals_its_plain_version(N: int, n: int, seed: int, data) -> None:
    r = data.draw(st.integers(1, N // 2))
    g = torch.Generator().manual_seed(seed)
    z, k = torch.randn(2, n + N, 8, generator=g), torch.randn(2, 3, n + N, 4, generator=g)
    size = torch.randint(1, 5, (2, n + N, 1), generator=g).float()
    merged, sizes = merge(z, size, k, r, n)
    assert merged.shape == (2, n + N - r, 8)
    assert torch.allclose(sizes.sum(1), size.sum(1))  # no patch is lost
    assert torch.equal(merged[:, :n], (z * size / size)[:, :n])  # tokens before the patches are left alone
    for b, expected in enumerate(slowly(z, size, k, r, n)):
        mine = sorted(zip(merged[b].tolist(), sizes[b, :, 0].tolist()))
        theirs = sorted((mean.tolist(), float(weight)) for mean, weight in expected.values())
        for (one, one_size), (other, other_size) in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, abs=1e-5)
            assert one_size == other_size


def test_equal_tokens_merge_without_a_trace() -> None:
    """Tokens that are the same say the same as one token that counts twice."""
    model = tiny(pool="mean")
    with torch.no_grad():
        model.positions.table.zero_()
        x = pixels(2, 3, 32, 8).repeat(1, 1, 1, 4)  # every row of patches is four times the same
        assert relative(Graph(model, merge=4)(x), model(x)) < 2e-5


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_the_graph_equals_the_plain_model(changes) -> None:
    model = tiny(**changes)
    c = model.config
    x = pixels(2, c.num_channels, *(side * c.patch_size for side in c.grid))
    with torch.no_grad():
        assert relative(Graph(model)(x), model(x)) < 5e-6
        wide = pixels(1, c.num_channels, 5 * c.patch_size, 3 * c.patch_size)
        assert relative(Graph(model, any_size=True)(wide), model(wide)) < 5e-6
        assert torch.isfinite(Graph(model, merge=3)(x)).all()


@pytest.mark.parametrize("changes", [{}, {"pool": "mean"}], ids=["cls", "mean"])
def test_merging_moves_the_answer_a_little_and_more_with_more(changes) -> None:
    model = tiny(num_hidden_layers=4, image_size=64, **changes)
    x = pixels(4, 3, 64, 64)
    with torch.no_grad():
        few, many = (relative(Graph(model, merge=r)(x), model(x)) for r in (1, 20))
    assert 0 < few < many


def test_plan_never_merges_more_than_half() -> None:
    c = tiny(num_hidden_layers=5).config  # 16 patches
    assert plan(c, 6) == [6, 5, 2, 1, 0]  # the last block's patches are not read
    assert plan(tiny(num_hidden_layers=5, pool="mean").config, 6) == [6, 5, 2, 1, 1]
    assert plan(c, 0) == [0] * 5
    with pytest.raises(ConfigError, match="merge must be at most 8, half of the 16 patches; got 9"):
        plan(c, 9)
    with pytest.raises(ConfigError, match="merge must be 0"):
        plan(c, -1)
