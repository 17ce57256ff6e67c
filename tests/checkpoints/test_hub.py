"""Hub ids, by a cache as huggingface_hub lays it out; nothing here touches a network."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.checkpoints import tiny
from vitkit.checkpoints import hub, load, save, source
from vitkit.errors import HubError, UnreadableFile
from vitkit.server.teach_store import HIDDEN

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


@pytest.mark.parametrize(
    "name",
    ["runs/nope", "runs/nope@ema", "someone/nope@last", "weights/vit", "here/nope", "~/nope", "./a/b", "here/nop"],
)
def test_what_looks_like_a_path_is_one(name: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the hub can be reached: a mistyped run is not looked for there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "nope2").mkdir(parents=True)
    (tmp_path / "here" / "nope.jpg").touch()  # no weights
    monkeypatch.setattr(hub, "fetch", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(UnreadableFile, match="There is no file or folder") as error:
        load(name)
    assert ("did you mean 'here/nope2'?" in str(error.value)) == name.startswith("here/")


def test_a_lesson_without_weights_says_how_to_save_it(tmp_path: Path) -> None:
    (tmp_path / "desk" / HIDDEN).mkdir(parents=True)
    with pytest.raises(UnreadableFile, match=r"has not been saved: open `vitkit teach .*desk` and press Save"):
        load(tmp_path / "desk")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert save(tiny.model(3), "~/x.safetensors") == tmp_path / "x.safetensors"
    save(tiny.model(3), "~/y", "huggingface")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.safetensors", "y"]
    assert tiny.same_tensors(load("~/x.safetensors"), tiny.model(3))
    assert tiny.same_tensors(load("~/y"), tiny.model(3))


def test_without_a_network_only_the_cache_is_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    def refuse(*_: object, **__: object) -> None:
        raise OSError("Network is unreachable")

    def watched(*arguments: object, **options: object) -> str:
        asked.append(options["local_files_only"])
        return plain(*arguments, **options)

    asked: list[object] = []
    plain = huggingface_hub.hf_hub_download
    put(cache, "someone/vit-tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", watched)
    assert tiny.same_tensors(load("someone/vit-tiny"), tiny.model())
    with pytest.raises(HubError, match="is not in the cache, and the hub cannot be reached"):
        load("someone/vit-other")
    assert set(asked) == {True}


@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:{port}"])
def test_reachable(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        if proxy:  # the name behind a proxy need not resolve here
            monkeypatch.setenv("http_proxy", proxy.format(port=port))
            url = "http://hub.invalid"
        assert hub.reachable(url, 200.0)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        if proxy:
            monkeypatch.setenv("http_proxy", proxy.format(port=port))
        assert not hub.reachable(url if proxy else f"http://127.0.0.1:{port}")


def test_files_come_before_the_hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(source.FINDERS)[-1] == "hub"
    monkeypatch.chdir(tmp_path)
    save(tiny.model(7), Path("someone/vit-tiny"), "huggingface")
    assert tiny.same_tensors(load("someone/vit-tiny"), tiny.model(7))


@pytest.mark.parametrize("name", ["vit-b/16", "r50+vit-b/16", "r50x1", "vit_base_patch16_224"])
def test_the_name_of_an_architecture_is_refused_before_the_hub_is_asked(name: str, monkeypatch) -> None:
    monkeypatch.setattr(hub, "fetch", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(UnreadableFile, match=r"is the name of an architecture, which has none\. vitkit\.create"):
        load(name)
