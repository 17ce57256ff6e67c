"""Matching a data set's classes to a model's outputs by name, WordNet ID or index, or a refusal."""

from __future__ import annotations

import pytest
import torch

from tests.features.samples import tiny
from vitkit import InputSpec
from vitkit.errors import DataError, InputError
from vitkit.evaluation.match import by_wnid, in_order, match_classes
from vitkit.evaluation.names import class_names, imagenet


class Blank:
    """A classifier without a configuration, like an exported model: K zeros for every image."""

    def __init__(self, K: int, *names: str) -> None:
        self.K, self.input_spec = K, InputSpec(size=(8, 8), class_names=names)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), self.K)


def test_imagenet_is_built_in() -> None:
    known = imagenet()
    assert len(set(known.wnids)) == len(set(known.names)) == 1000
    assert list(known.wnids) == sorted(known.wnids)  # which is what decides the order
    assert (known.names[0], known.wnids[0]) == ("tench", "n01440764")
    assert (known.names[999], known.wnids[999]) == ("toilet tissue", "n15075141")


def test_names_of_outputs() -> None:
    """The checkpoint's own, else ImageNet's for 1000 outputs, else numbers; K is read from whatever knows it."""
    assert class_names(Blank(1000)) == imagenet().names
    assert class_names(Blank(3)) == ("0", "1", "2")
    assert class_names(Blank(2, "a", "b")) == ("a", "b")
    model = tiny()
    assert class_names(model) == ("0", "1", "2", "3")
    model.input_spec = InputSpec(class_names=tuple("abcd"))
    assert class_names(model) == tuple("abcd")
    with pytest.raises(InputError, match=r"no head.*vitkit probe"):
        class_names(tiny(num_classes=0))


def test_imagenet_wnids_are_timms() -> None:
    from tests.peers import peer

    info = peer("timm.data").ImageNetInfo()
    assert tuple(info.index_to_label_name(k) for k in range(1000)) == imagenet().wnids


@pytest.mark.parametrize(
    ("data", "names", "found"),
    [
        (["pizza", "steak"], ("sushi", "steak", "pizza"), [2, 1]),
        (["Great_White-shark", "TENCH"], ("tench", "great white shark"), [1, 0]),
        (["tench"], ("goldfish, Carassius auratus", "tench, Tinca tinca"), [1]),
        (["0", "2"], ("zero", "one", "two"), [0, 2]),
        (["000", "010"], tuple("abcdefghijk"), [0, 10]),
        (["9", "1"], ("1", "5", "9"), [2, 0]),  # names come before indices
    ],
)
def test_matched(data, names, found) -> None:
    assert match_classes(data, names).tolist() == found


def test_matched_to_imagenet() -> None:
    assert match_classes(["n01443537", "n01440764"], imagenet().names).tolist() == [1, 0]
    assert match_classes(["tench", "toilet_tissue"], imagenet().names).tolist() == [0, 999]
    assert match_classes(["998", "002"], imagenet().names).tolist() == [998, 2]
    assert match_classes(["crane (bird)", "crane (machine)"], imagenet().names).tolist() == [134, 517]
    own = imagenet().wnids  # a checkpoint that spells them so itself
    assert match_classes(["n01443537"], own).tolist() == [1]
    long = [f"{name}, {number}" for number, name in enumerate(imagenet().names)]  # and one with synonyms
    assert match_classes(["n01443537", "n15075141"], long).tolist() == [1, 999]
    for other, same in ((100, True), (101, False)):  # nine tenths of the names make it ImageNet
        mixed = [f"other {k}" if k < other else name.partition(" (")[0] for k, name in enumerate(imagenet().names)]
        assert bool(by_wnid(mixed)) == same


@pytest.mark.parametrize(
    ("data", "names", "words"),
    [
        (
            ["pizza", "burger"],
            ("pizza", "steak"),
            [
                "1 of the data's 2 classes match by name, but 'burger' does not",
                "classes are pizza, steak: use",  # all of them, so no dots
                "or pass --in-order",
            ],
        ),
        (["n01440764"], ("a", "b"), ["0 of the data's 1", "or weights, or rename the data's classes to the model's"]),
        (["0", "5"], ("a", "b"), ["1 of the data's 2 classes match by index, but '5' does not"]),
        (["000", "n01", "004"], ("a", "b"), ["1 of the data's 3 classes match by index, but 'n01' does not"]),
        (["x"], tuple("abcdefghijk"), ["classes are a, b, c, ...: use"]),
        (["Cat", "cat"], ("cat", "dog"), ["2 of the data's 2 classes match by name, but two of them match the same"]),
    ],
)
def test_not_matched(data, names, words) -> None:
    with pytest.raises(DataError) as error:
        match_classes(data, names)
    for word in words:
        assert word in str(error.value)


def test_the_order_is_no_way_out_for_another_number_of_classes() -> None:
    with pytest.raises(DataError) as error:
        match_classes(["x"], ("a", "b"))
    assert "--in-order" not in str(error.value)
    assert str(error.value).endswith("names or indices.")


def test_in_order() -> None:
    assert in_order(["x", "y"], 2).tolist() == [0, 1]
    with pytest.raises(DataError, match="the data has 2, the model 3"):
        in_order(["x", "y"], 3)
