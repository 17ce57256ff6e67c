"""A choice by timing is made once per device, shape and version, and the next process reads it from disk."""

from __future__ import annotations

import json

import pytest

from vitkit.speed import choices

TIMES = {"slow": 3.0, "quick": 1.0, "middling": 2.0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    choices._known.cache_clear()
    yield tmp_path / "cache"
    choices._known.cache_clear()


def choose(what: str, names: tuple[str, ...] = tuple(TIMES)) -> tuple[str | None, list[str]]:
    """The choice, and what was timed for it, in the order of the first turn."""
    timed = []

    def time(work) -> float:
        timed.append(work())
        if work() == "broken":
            raise RuntimeError("does not take this shape")
        return TIMES[work()]

    best = choices.fastest(what, {name: lambda name=name: name for name in names}, time)
    return best, list(dict.fromkeys(timed))


def test_the_fastest_is_chosen_once_and_a_new_process_reads_it(folder) -> None:
    assert choose("a product") == ("quick", list(TIMES))
    assert choose("a product") == ("quick", [])
    choices._known.cache_clear()  # as in a new process
    assert choose("a product") == ("quick", [])
    assert choose("another product", ("slow", "middling")) == ("middling", ["slow", "middling"])
    assert len(json.loads((folder / choices.NAME).read_text(encoding="utf-8"))) == 2


def test_other_ways_or_another_version_are_timed_again(folder, monkeypatch) -> None:
    choose("a product")
    assert choose("a product", ("slow", "middling"))[1] == ["slow", "middling"]
    monkeypatch.setattr(choices, "_where", lambda: "another device")
    assert choose("a product")[1] == list(TIMES)


def test_each_device_has_its_own_choices(folder, monkeypatch) -> None:
    current = [0]
    monkeypatch.setattr(choices.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choices.torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(choices.torch.cuda, "get_device_name", lambda index: ["an H200", "an A100"][index])
    choices._on.cache_clear()
    try:
        assert choose("a product")[1] == list(TIMES)
        current[0] = 1
        assert choose("a product")[1] == list(TIMES)
        current[0] = 0
        assert choose("a product")[1] == []
    finally:
        choices._on.cache_clear()


def test_what_cannot_run_is_not_chosen(folder) -> None:
    assert choose("a product", ("broken", "slow"))[0] == "slow"
    assert choose("another", ("broken",))[0] is None


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_damaged_file_is_replaced(folder, text) -> None:
    folder.mkdir()
    (folder / choices.NAME).write_text(text, encoding="utf-8")
    assert choose("a product")[0] == "quick"
    assert list(json.loads((folder / choices.NAME).read_text(encoding="utf-8")).values()) == ["quick"]


def test_a_value_of_another_kind_is_passed_over(folder) -> None:
    choose("a product")
    path = folder / choices.NAME
    (key,) = json.loads(path.read_text(encoding="utf-8"))
    for value in ({}, [], 1, None):
        path.write_text(json.dumps({key: value}), encoding="utf-8")
        choices._known.cache_clear()
        assert choose("a product") == ("quick", list(TIMES))


def test_without_a_cache_folder_it_still_chooses(folder) -> None:
    folder.write_text("a file where the folder should be", encoding="utf-8")
    assert choose("a product")[0] == "quick"


def test_choices_of_two_processes_are_both_kept(folder) -> None:
    choose("a product")
    choices._known.cache_clear()
    choices._known()
    path = folder / choices.NAME
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"of another process": "x"}), encoding="utf-8"
    )
    choose("another product")
    assert len(json.loads(path.read_text(encoding="utf-8"))) == 3


def test_a_run_keeps_its_choices_where_the_cache_is_gone(folder, tmp_path, monkeypatch) -> None:
    run, before = tmp_path / "run" / choices.NAME, choices.run_number()
    choose("a product")  # by an earlier process
    assert not choices.pinning()
    with choices.pinned(run):
        assert choices.pinning()
        assert choose("a product") == ("quick", [])
        assert choose("another") == ("quick", list(TIMES))
        assert choices.run_number() != before
    assert sorted(json.loads(run.read_text(encoding="utf-8")).values()) == ["quick", "quick"]
    (folder / choices.NAME).unlink()
    choices._known.cache_clear()
    monkeypatch.setitem(TIMES, "slow", 0.5)  # now the fastest
    with choices.pinned(run):
        assert choose("a product") == choose("another") == ("quick", [])
    assert choose("a product") == ("slow", list(TIMES))  # and elsewhere it is
    with choices.pinned(run):
        assert choose("a product") == ("quick", [])  # whatever another program has chosen since


def test_a_run_keeps_its_choice_when_another_way_is_left_out(folder, tmp_path, monkeypatch) -> None:
    with choices.pinned(tmp_path / "a.json"):
        choose("a product")
    monkeypatch.setitem(TIMES, "middling", 0.5)
    with choices.pinned(tmp_path / "a.json"):
        assert choose("a product", ("quick", "middling")) == ("quick", [])
        assert choose("a product", ("slow", "middling"))[0] == "middling"  # it cannot keep what is not there


def test_runs_do_not_exchange_their_choices(folder, tmp_path, monkeypatch) -> None:
    with choices.pinned(tmp_path / "a.json"):
        choose("a product")
        monkeypatch.setitem(TIMES, "slow", 0.5)
        with choices.pinned(tmp_path / "b.json"):
            assert choose("b product")[0] == "slow"
        assert choose("a product") == ("quick", [])
    assert len(json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))) == 1
    assert not choices.pinning()
