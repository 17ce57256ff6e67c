from __future__ import annotations

import numpy as np
import pytest

import vitkit
from tests.features.samples import photos, saved
from vitkit.errors import DataError
from vitkit.features import labels


def blobs(n: int = 60, classes: int = 3, width: int = 16, seed: int = 0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    means = rng.normal(size=(classes, width)) * 2
    return (means[y] + rng.normal(size=(n, width))).astype(np.float32), y


def test_planted_labels_come_first():
    X, y = blobs()
    wrong = np.array([5, 17, 40])
    y = y.copy()
    y[wrong] = (y[wrong] + 1) % 3
    found = labels.rank(X, y)
    assert set(found.order[:3]) == set(wrong)
    assert set(found.suspects(y)) == set(wrong)
    assert (found.suggested[wrong] == (y[wrong] + 2) % 3).all()
    assert sorted(found.order) == list(range(60))
    assert (np.diff(found.confidence[found.order]) >= 0).all()


def test_a_wrong_label_of_a_copied_photo_does_not_confirm_itself():
    """Two copies with the same wrong label: if one were fitted to, the other would look right."""
    X, y = blobs()
    y = y.copy()
    X[8] = X[5]
    y[[5, 8]] = (y[5] + 1) % 3
    fold = labels.folds_of(X, y, 0)
    assert fold[5] == fold[8]
    assert set(labels.rank(X, y).order[:2]) == {5, 8}


def test_folds_spread_every_class():
    X, y = blobs(50, 5)
    fold = labels.folds_of(X, y, 3)
    for k in range(5):
        assert np.bincount(fold[y == k], minlength=labels.FOLDS).tolist() == [2] * labels.FOLDS
    assert not np.array_equal(fold, labels.folds_of(X, y, 4))


def test_a_single_image_of_a_class_is_not_judged():
    X, y = blobs(31)
    y = y.copy()
    y[30] = 7  # and classes 3 to 6 have no images
    found = labels.rank(X, y)
    assert np.isnan(found.confidence[30])
    assert 30 not in found.order
    assert len(found.order) == 30


def test_too_few_classes_are_refused():
    with pytest.raises(DataError, match="two classes with two images each"):
        labels.rank(np.zeros((3, 2), np.float32), np.array([0, 0, 1]))


def test_the_doctor_names_a_photo_in_the_wrong_folder(tmp_path):
    root = photos(tmp_path / "set", {"train": 8, "test": 4})
    (root / "train/red/0.png").rename(root / "train/blue/red.png")
    report = vitkit.doctor(root, weights=saved(tmp_path), cache=tmp_path / "cache", workers=0)
    first = report.suspects[0]
    assert (first.image.split, first.image.name, first.image.label) == ("train", "blue/red.png", "blue")
    assert first.suggested == "red"
    assert report.to_dict()["suspects"][0]["suggested"] == "red"


def test_planted_errors_in_real_photos(shared_data, tmp_path):
    """5% of the labels of FoodVision Mini are wrong: they are in the first 10% of the ranking."""
    from vitkit.data import open_source

    weights = shared_data / "weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.timm.pth"
    found = vitkit.embed(
        vitkit.load(weights, num_attention_heads=3),
        shared_data / "pizza_steak_sushi",
        split="train",
        workers=0,
        cache=tmp_path,
    )["train"]
    assert len(found.labels) == len(open_source(shared_data / "pizza_steak_sushi", "train"))
    rng = np.random.default_rng(0)
    wrong = rng.permutation(len(found.labels))[:11]
    y = found.labels.copy()
    y[wrong] = (y[wrong] + rng.integers(1, 3, 11)) % 3
    first = labels.rank(found.features, y).order[: round(0.1 * len(y))]
    assert len(set(wrong) & set(first)) >= 10
