"""The plan: a function of names and numbers, without Ray, torch or a disk."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vitkit.cluster.plan import FEWEST, SHARD_BYTES, SHARD_IMAGES, Shard, difference, names_hash, shard_images, shards


def test_every_image_is_in_exactly_one_shard() -> None:
    parts = {"train": 1000, "val": 64, "test": 1}
    found = shards(parts, 64)
    for part, count in parts.items():
        assert [i for shard in found if shard.part == part for i in range(shard.start, shard.stop)] == [*range(count)]
    assert len({shard.name for shard in found}) == len(found)
    assert [len(shard) for shard in found if shard.part == "train"] == [64] * 15 + [40]
    assert found == shards(dict(parts), 64)
    assert shards({"all": 0}, 64) == []


def test_names_are_file_names() -> None:
    assert Shard("train", 12, 0, 1).name == "train-00012.parquet"
    assert "/" not in Shard("a/../b", 0, 0, 1).name


@pytest.mark.parametrize("batch_size", [1, 7, 64, 5000])
@pytest.mark.parametrize("images", [1, 400, 20_000, 10**7])
def test_shards_hold_whole_batches_and_are_neither_huge_nor_few(images: int, batch_size: int) -> None:
    for image_bytes in (1, 3 * 32 * 32, 3 * 224 * 224, 10**9):
        per_shard = shard_images(images, batch_size, image_bytes)
        assert per_shard % batch_size == 0
        assert per_shard == batch_size or per_shard <= SHARD_IMAGES
        assert per_shard == batch_size or per_shard * image_bytes <= SHARD_BYTES
        assert per_shard == batch_size or -(-images // per_shard) >= min(FEWEST, images // batch_size)


def test_the_hash_depends_on_names_labels_classes_and_order() -> None:
    def of(names: list[str], labels: bytes = b"\0\1", classes: tuple[str, ...] = ("a", "b")) -> str:
        return names_hash(names, labels, classes)

    assert of(["x", "y"]) == of(["x", "y"])
    others = [
        of(["y", "x"]),
        of(["xy", ""]),
        of(["x", "y"], b"\1\0"),
        of(["x", "y"], classes=("a", "c")),
        of(["x", "y", "z"]),
        of(["x", "\udcff"]),  # a file name that is not UTF-8
    ]
    assert len({of(["x", "y"]), *others}) == len(others) + 1


def test_differences_are_named() -> None:
    assert difference({"a": 1, "b": {"c": 2}}, {"b": {"c": 2}, "a": 1}) == ""
    assert difference({"a": 1}, {"a": 2}) == "a: 1 there, 2 here"
    assert difference({"images": {"train": 5}}, {"images": {"train": 6}}) == "images, train: 5 there, 6 here"
    assert difference({"a": 1, "old": 3}, {"a": 1}) == "old: 3 there, None here"


def test_the_plan_needs_neither_ray_nor_torch() -> None:
    code = """
import sys
sys.modules["ray"] = sys.modules["torch"] = sys.modules["pyarrow"] = None
from vitkit.cluster.plan import shards
print(len(shards({"all": 20_000}, 320)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "63", done.stderr
