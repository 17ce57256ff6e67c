"""The real ViT-Ti/16 shows what Figure 7 of the paper shows, and its maps beat a random order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import vitkit
from vitkit import ViT
from vitkit.explanations.attention import attention_distance
from vitkit.explanations.embeddings import filters, position_similarity
from vitkit.jobs.explain import explain, summary
from vitkit.jobs.figures import pixels, sample_photos, some_images


@pytest.fixture(scope="module")
def real(shared_data: Path) -> ViT:
    return vitkit.load(shared_data / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.timm.pth")


def test_positions_show_rows_and_columns(real: ViT) -> None:
    """Figure 7 centre: a patch is most like its neighbours, and more like its own row and column than like others."""
    found = position_similarity(real)
    own, other = [], []
    for r, c in np.ndindex(14, 14):
        tile = found[r, c].copy()
        near = [(i, j) for i in range(14) for j in range(14) if 0 < abs(i - r) + abs(j - c) <= 2]
        assert np.mean([tile[place] for place in near]) > tile.mean()
        cross = np.zeros((14, 14), bool)
        cross[r], cross[:, c], cross[r, c] = True, True, False
        own.append(tile[cross].mean())
        rest = ~cross
        rest[r, c] = False
        other.append(tile[rest].mean())
    assert np.mean(own) > np.mean(other) + 0.15


def test_filters_are_smoother_than_noise(real: ViT) -> None:
    """Figure 7 left: among the first components are plausible basis functions, much smoother than chance."""
    found, share = filters(real)

    def rough(one: np.ndarray) -> float:
        return float((np.diff(one, axis=0) ** 2).mean() / one.var())

    noise = rough(np.random.default_rng(0).normal(size=(16, 16, 3)))
    assert min(rough(one) for one in found[:8]) < noise / 4
    assert share[0] > 2 * share[10]


def test_distance_grows_with_depth(real: ViT) -> None:
    """Figure 7 right: some heads of the lowest layers look near, all heads of the highest look far."""
    found = attention_distance(real, pixels(sample_photos(), real.input_spec))
    assert found[:3].min() < 40
    assert found[-3:].min() > 90
    assert spearmanr(range(12), found.mean(1)).statistic > 0.7


def test_two_sample_photos(real: ViT, tmp_path: Path) -> None:
    china, _ = explain(real, [np.asarray(sample_photos().read(i)[0]) for i in (0, 1)], tmp_path)
    assert china.predictions[0][0] in ("palace", "monastery", "stupa", "boathouse", "bell cote")


@pytest.mark.slow
def test_rollout_beats_random(real: ViT, shared_data: Path, tmp_path: Path) -> None:
    source = some_images(shared_data / "imagenet_val_500", 12)
    torch.set_num_threads(1)
    table = summary(explain(real, [str(source.place(i)) for i in range(len(source))], tmp_path, score=True))
    assert table["gradient-rollout"]["deletion"] < table["random"]["deletion"]
    assert table["occlusion"]["deletion"] < table["random"]["deletion"]
