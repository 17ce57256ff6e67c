"""Hub ids, by a cache as huggingface_hub lays it out; nothing here touches a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import tiny
from vitkit.checkpoints import load, save, source
from vitkit.errors import HubError, UnreadableFile

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def put(cache: Path, name: str, commit: str = COMMIT, ref: str = "main", seed: int = 0) -> Path:
    place = cache / ("models--" + name.replace("/", "--"))
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / ref).write_text(commit, encoding="utf-8")
    save(tiny.model(seed), place / "snapshots" / commit, "huggingface")
    return place / "snapshots" / commit


def test_from_the_cache(cache: Path) -> None:
    put(cache, "someone/vit-tiny")
    assert tiny.same_tensors(load("someone/vit-tiny"), tiny.model())


def test_revision(cache: Path) -> None:
    put(cache, "someone/vit-tiny", "a" * 40, "main", seed=1)
    put(cache, "someone/vit-tiny", "b" * 40, "v2", seed=2)
    assert tiny.same_tensors(load("someone/vit-tiny"), tiny.model(1))
    assert tiny.same_tensors(load("someone/vit-tiny@v2"), tiny.model(2))
    assert tiny.same_tensors(load("someone/vit-tiny", revision="b" * 40), tiny.model(2))


def test_offline_says_what_to_do(cache: Path) -> None:
    with pytest.raises(HubError) as error:
        load("google/vit-base-patch16-224", revision="v1")
    said = str(error.value)
    for part in (
        "https://huggingface.co/google/vit-base-patch16-224/tree/v1",
        "model.safetensors",
        "config.json",
        "hf download google/vit-base-patch16-224 --revision v1",
        str(cache),
    ):
        assert part in said
    assert "\n" not in said


def test_timm_names_are_hub_ids(cache: Path) -> None:
    with pytest.raises(HubError, match=r"timm/vit_tiny_patch16_224\.augreg_in21k_ft_in1k"):
        load("vit_tiny_patch16_224.augreg_in21k_ft_in1k")


@pytest.mark.parametrize("name", ["no-slash", "a/b/c", "runs/best.safetensors", "../up", "", "/nowhere/at/all"])
def test_what_is_no_hub_id(name: str, cache: Path) -> None:
    with pytest.raises((UnreadableFile, HubError)) as error:
        load(name or "./nothing.pth")
    assert isinstance(error.value, UnreadableFile)


def test_files_come_before_the_hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(source.FINDERS)[-1] == "hub"
    monkeypatch.chdir(tmp_path)
    save(tiny.model(7), Path("someone/vit-tiny"), "huggingface")
    assert tiny.same_tensors(load("someone/vit-tiny"), tiny.model(7))
