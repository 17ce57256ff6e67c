"""`vitkit convert` and `vitkit inspect` as a user runs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import tiny
from tests.peers import peer
from vitkit.checkpoints import load, save
from vitkit.cli import main


def run(*arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["vitkit", *arguments])
    with pytest.raises(SystemExit) as done:
        main()
    out, err = capsys.readouterr()
    return int(done.value.code or 0), out, err


@pytest.fixture
def vitkit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    return lambda *arguments: run(*map(str, arguments), capsys=capsys, monkeypatch=monkeypatch)


def test_convert_with_proof(vitkit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    peer("timm"), peer("transformers")
    save(tiny.model(layer_norm_eps=1e-6), tmp_path / "a.pth", "timm")
    code, out, _ = vitkit("convert", tmp_path / "a.pth", tmp_path / "hf", "--to", "huggingface", "--verify")
    assert code == 0
    assert out.count(": equal") == 4
    assert "timm, random" in out
    assert "transformers, photos" in out
    assert tiny.same_tensors(load(tmp_path / "hf"), tiny.model())


def test_convert_explains(vitkit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    peer("timm")
    save(tiny.model(layer_norm_eps=1e-6), tmp_path / "a.safetensors")
    code, out, _ = vitkit("convert", tmp_path / "a.safetensors", tmp_path / "a.npz", "--to", "google", "--verify")
    assert code == 0
    assert "not compared: the dialect has no library of its own" in out
    assert "explained by hidden_act: the library uses gelu_tanh, vitkit gelu" in out


def test_convert_changes(vitkit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    save(tiny.model(), tmp_path / "a.safetensors")
    code, _, _ = vitkit(
        "convert",
        tmp_path / "a.safetensors",
        tmp_path / "b.safetensors",
        "--num-classes",
        "2",
        "--image-size",
        "16x48",
        "--mean",
        "0.4",
        "--std",
        "0.1,0.2,0.3",
    )
    assert code == 0
    found = load(tmp_path / "b.safetensors")
    assert found.config.num_classes == 2
    assert found.config.image_size == (16, 48)
    assert (found.input_spec.mean, found.input_spec.std) == ((0.4,) * 3, (0.1, 0.2, 0.3))


def test_a_wrong_file_is_an_error(vitkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """If what was written computed something else, --verify would say so and fail."""
    peer("timm")
    from vitkit.checkpoints import writing

    def wrong(model, path, dialect, **_):  # type: ignore[no-untyped-def]
        other = tiny.model(seed=9, layer_norm_eps=1e-6)
        return save(other, path, dialect)

    monkeypatch.setattr(writing, "save", wrong)
    save(tiny.model(layer_norm_eps=1e-6), tmp_path / "a.pth", "timm")
    code, out, err = vitkit("convert", tmp_path / "a.pth", tmp_path / "b.pth", "--to", "timm", "--verify")
    assert code == 2
    assert "DIFFERENT" in out
    assert "do not use the file" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "none.pth", "out.pth", "--to", "timm"),
        ("convert", "a.pth", "out.pth", "--to", "tim"),
        ("convert", "a.pth", "out.npz", "--to", "google", "--mean", "x"),
        ("inspect", "none.pth"),
        ("convert", "a.pth", "out.pth", "--to", "timm", "--image-size", "1x2x3"),
        ("inspect", "junk.pth"),
        ("convert", "a.pth", "out.pth", "--to", "dinov2"),
        ("convert", "junk.pth", "out.pth", "--to", "timm"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(
    vitkit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[no-untyped-def]
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tiny.model(), "a.pth", "timm")
    Path("junk.pth").write_bytes(b"\x80junk")
    before = sorted(Path().iterdir())
    code, _, err = vitkit(*arguments)
    assert code == 2
    assert err.startswith("vitkit: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert sorted(Path().iterdir()) == before


def test_inspect(vitkit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    save(tiny.model(**tiny.MODELS["registers"]), tmp_path / "a.pth", "dinov2")
    code, out, _ = vitkit("inspect", tmp_path / "a.pth")
    assert code == 0
    for part in (
        "dialect   dinov2",
        "not a published one",
        "1 of them not used (mask_token)",
        "layer_norm_eps 1e-12",
        "classes   0",
        "sha256",
        "mean [0.5, 0.5, 0.5]",
    ):
        assert part in out
    code, out, _ = vitkit("inspect", tmp_path / "a.pth", "--json")
    values = json.loads(out)
    assert values["dialect"] == "dinov2"
    assert values["config"]["num_register_tokens"] == 3
    assert len(values["sha256"]) == 64


def test_inspect_builds_no_model(vitkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    save(tiny.model(), tmp_path / "a.safetensors")

    def no(*_: object, **__: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(torch.nn.Module, "__init__", no)
    assert vitkit("inspect", tmp_path / "a.safetensors")[0] == 0
