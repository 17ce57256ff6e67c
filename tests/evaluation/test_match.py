"""Classes of a data set and outputs of a model: matched by name, WordNet number or index, else a sentence."""

from __future__ import annotations

import pytest

from vitkit import InputSpec
from vitkit.errors import DataError
from vitkit.evaluation.match import in_order, match_classes
from vitkit.evaluation.names import class_names, imagenet


def spec(*names: str) -> InputSpec:
    return InputSpec(class_names=names)


def test_imagenet_is_built_in() -> None:
    known = imagenet()
    assert len(set(known.wnids)) == len(set(known.names)) == 1000
    assert list(known.wnids) == sorted(known.wnids)  # which is what decides the order
    assert (known.names[0], known.wnids[0]) == ("tench", "n01440764")
    assert (known.names[999], known.wnids[999]) == ("toilet tissue", "n15075141")
    assert class_names(InputSpec(), 1000) == known.names
    assert class_names(InputSpec(), 3) == ("0", "1", "2")
    assert class_names(spec("a", "b"), 2) == ("a", "b")


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
    assert match_classes(data, spec(*names), len(names)).tolist() == found


def test_matched_to_imagenet() -> None:
    assert match_classes(["n01443537", "n01440764"], InputSpec(), 1000).tolist() == [1, 0]
    assert match_classes(["tench", "toilet_tissue"], InputSpec(), 1000).tolist() == [0, 999]
    assert match_classes(["998", "002"], InputSpec(), 1000).tolist() == [998, 2]
    assert match_classes(["crane (bird)", "crane (machine)"], InputSpec(), 1000).tolist() == [134, 517]
    own = imagenet().wnids  # a checkpoint that spells them so itself
    assert match_classes(["n01443537"], spec(*own), 1000).tolist() == [1]
    long = [f"{name}, {number}" for number, name in enumerate(imagenet().names)]  # and one with synonyms
    assert match_classes(["n01443537", "n15075141"], spec(*long), 1000).tolist() == [1, 999]


@pytest.mark.parametrize(
    ("data", "names", "words"),
    [
        (["pizza", "burger"], ("pizza", "steak"), ["1 of the data's 2 classes", "'burger'"]),
        (["n01440764"], ("a", "b"), ["0 of the data's 1"]),
        (["0", "5"], ("a", "b"), ["1 of the data's 2", "indices"]),
        (["Cat", "cat"], ("cat", "dog"), ["2 of the data's 2"]),  # two classes of one output
    ],
)
def test_not_matched(data, names, words) -> None:
    with pytest.raises(DataError) as error:
        match_classes(data, spec(*names), len(names))
    for word in words:
        assert word in str(error.value)


def test_in_order() -> None:
    assert in_order(["x", "y"], 2).tolist() == [0, 1]
    with pytest.raises(DataError, match="the data has 2, the model 3"):
        in_order(["x", "y"], 3)
