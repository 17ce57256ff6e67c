"""Several labels per image: tables, splits, batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.data.images import class_folder
from tests.pairs import pairs
from vitkit.data.augment import Augment
from vitkit.data.base import Unlabelled, folds, stratified, subset
from vitkit.data.mix import Mix, soft_targets
from vitkit.data.sources import open_source, open_splits
from vitkit.data.train_loader import TrainLoader
from vitkit.errors import DataError
from vitkit.model.config import InputSpec

GRAY = InputSpec(size=(8, 16), channels="gray", mean=(0.5,), std=(0.5,))


def many(n: int = 400, K: int = 6, seed: int = 0) -> np.ndarray:
    """Labels of very different frequency, and images without any."""
    return (np.random.default_rng(seed).random((n, K)) < np.geomspace(0.5, 0.01, K)).astype(np.uint8)


def test_both_layouts_are_the_same_data(tmp_path) -> None:
    one = open_splits(pairs(tmp_path / "x"))
    two = open_splits(pairs(tmp_path / "x", columns=True))
    for split in ("train", "test"):
        a, b = one[split](), two[split]()
        assert a.several
        assert a.class_names == b.class_names == tuple(map(str, range(10)))
        assert a.labels.shape == (len(a), 10)
        assert np.array_equal(a.labels, b.labels)
        assert a.fingerprint() == b.fingerprint()
        assert a.said(0) == "no label"
        assert a.read(0)[1] == ()
        assert a.said(3) == "|".join(a.class_names[k] for k in a.read(3)[1])
        assert a.counts() == {name: int(a.labels[:, k].sum()) for k, name in enumerate(a.class_names)}
    assert one["train"]().spoken() == (
        f"any number of 10 labels per image (column 'labels'): {one['train']().labels.sum() / 60:.2f} on average, "
        "6 images without any"
    )
    assert "one column per label" in two["train"]().spoken()


def test_a_changed_label_changes_the_fingerprint(tmp_path) -> None:
    table = pairs(tmp_path / "x")
    before = open_source(table).fingerprint()
    lines = table.read_text().splitlines()
    lines[1] = lines[1].replace(",,", ",3,")
    table.write_text("\n".join(lines))
    assert open_source(table).fingerprint() != before


def test_a_bar_in_the_label_column_means_several_and_is_stated(tmp_path) -> None:
    class_folder(tmp_path, {"cat": 3})
    table = tmp_path / "t.csv"
    table.write_text("path,label\ncat/000.jpg,b\n\ncat/001.jpg,a|b\ncat/002.jpg,\n")
    source = open_source(table, "all")
    assert source.labels.tolist() == [[0, 1], [1, 1], [0, 0]]
    assert "because of '|' in line 4" in source.spoken()


def test_lists_in_parquet_are_labels(tmp_path) -> None:
    from pyarrow import parquet, table

    class_folder(tmp_path, {"cat": 3})
    files = [f"cat/00{n}.jpg" for n in range(3)]
    parquet.write_table(table({"image": files, "label": [["b"], ["a", "b"], []]}), tmp_path / "a.parquet")
    assert open_source(tmp_path / "a.parquet", "all").labels.tolist() == [[0, 1], [1, 1], [0, 0]]
    parquet.write_table(table({"image": files, "x": [True, False, True], "y": [0.0, 1.0, 0.0]}), tmp_path / "b.parquet")
    source = open_source(tmp_path / "b.parquet", "all")
    assert source.class_names == ("x", "y")
    assert source.labels.tolist() == [[1, 0], [0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("image,cat,dog\na.jpg,1,0\nb.jpg,0,2\n", "t.csv, line 3: expected 0 or 1 in column 'dog', .*; got '2'"),
        ("image,id\na.jpg,17\n", "line 2: expected 0 or 1 in column 'id', because t.csv has no column 'label'"),
        ("image,cat\na.jpg,\n", "line 2: expected 0 or 1 in column 'cat'.* got ''"),
        ("image,labels\na.jpg,cat|\n", "line 2: expected labels separated by |; got an empty one"),
        ("image,labels\na.jpg,x\nb.jpg,cat|dog|cat\n", "line 3: expected each label once; got 'cat' twice"),
        ("image,labels\n,cat\n", "line 2: expected a path"),
        ("image,label,labels\na.jpg,x,y\n", "Expected one column of labels in .*t.csv; got 'label' .* and 'labels'"),
        ("image,cat,cat\na.jpg,1,0\n", "Expected different names of labels"),
        ("image,a|b\na.jpg,1\n", r"Expected different names of labels without \|"),
        ("image\na.jpg\n", "Expected a column 'label', a column 'labels' or one column per label"),
        ("image,label\na.jpg,\n", "line 2: .* call the column 'labels'"),
        ("image,labels\na.jpg,\n", "got no labels at all"),
    ],
)
def test_mistakes_in_a_table_are_one_sentence(text, says, tmp_path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=says):
        open_source(tmp_path / "t.csv", "all")


def test_a_stratified_part_has_the_share_of_every_label() -> None:
    labels = many()
    kept, held = stratified(labels, 0.2, 0)
    assert sorted([*kept, *held]) == list(range(400))
    total, part = labels.sum(0, dtype=int), labels[held].sum(0, dtype=int)
    assert total.min() >= 2
    assert (part >= 1).all()
    assert (np.abs(part - 0.2 * total) <= np.maximum(0.1 * total, 1)).all()
    none = (~labels.any(1)).sum()
    assert abs((~labels[held].any(1)).sum() - 0.2 * none) <= 1
    assert np.array_equal(held, stratified(labels, 0.2, 0)[1])
    assert not np.array_equal(held, stratified(labels, 0.2, 1)[1])


def test_folds_spread_every_label() -> None:
    labels = many()
    fold = folds(labels, 5, 0)
    assert set(fold) == set(range(5))
    for k in range(6):
        counts = np.bincount(fold[labels[:, k] > 0], minlength=5)
        assert counts.max() - counts.min() <= max(2, 0.1 * counts.sum())


def test_subsets_are_nested_and_have_every_label() -> None:
    labels = many()
    small, large = subset(labels, 20, 0), subset(labels, 0.5, 0)
    assert (len(small), len(large)) == (20, 200)
    assert set(small) < set(large)
    assert labels[small].any(0).all()


def test_mixed_targets_and_smoothing_by_hand() -> None:
    labels, others = torch.tensor([[1, 0, 1], [0, 0, 0]]), torch.tensor([[0, 0, 1], [1, 1, 0]])
    weight = torch.tensor([0.75, 0.5])
    plain = soft_targets(labels, others, weight, 3)
    assert plain.tolist() == [[0.75, 0.0, 1.0], [0.5, 0.5, 0.0]]
    smooth = soft_targets(labels, labels, torch.ones(2), 3, smoothing=0.2)
    assert torch.allclose(smooth, torch.tensor([[0.9, 0.1, 0.9], [0.1, 0.1, 0.1]]))


@pytest.mark.parametrize("mix", [None, Mix(mixup=0.8), Mix(cutmix=1.0)])
def test_batches_are_the_same_for_any_number_of_processes(mix, tmp_path) -> None:
    source = open_source(pairs(tmp_path / "x", 20, 4))
    how = {"batch_size": 8, "seed": 3, "mix": mix, "workers": 0}
    augment = Augment(flip=0.0)
    (whole,) = TrainLoader(source, GRAY, augment, **how).batches(2, 3)
    assert whole.labels.shape == whole.others.shape == (8, 10)
    parts = [next(TrainLoader(source, GRAY, augment, rank=r, ranks=2, **how).batches(2, 3)) for r in range(2)]
    assert torch.equal(torch.cat([part.targets(10) for part in parts]), whole.targets(10))
    assert torch.equal(whole.labels, torch.from_numpy(source.labels)[whole.index].long())
    if mix is not None:
        assert not torch.equal(whole.targets(10), whole.labels.float())


def test_unlabelled_forgets_labels(tmp_path) -> None:
    source = Unlabelled(open_source(pairs(tmp_path / "x", 20, 4)))
    assert not source.several
    assert source.labels.shape == (20,)
