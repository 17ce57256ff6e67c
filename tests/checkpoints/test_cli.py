"""`vitkit convert` and `vitkit inspect` as a user runs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import tiny
from tests.peers import peer
from vitkit.checkpoints import load, save, to_dialect
from vitkit.cli import main
from vitkit.errors import ConfigError, VitkitError


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


def test_inspect_says_that_a_file_is_incomplete(vitkit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    save(tiny.model(), tmp_path / "a.pth", "timm")
    whole = torch.load(tmp_path / "a.pth", weights_only=True)
    for name, change in (("blocks.0.attn.qkv.bias", None), ("head.weight", whole["head.weight"][:, :3])):
        tensors = {key: tensor for key, tensor in whole.items() if key != name} | (
            {} if change is None else {name: change}
        )
        torch.save(tensors, tmp_path / "b.pth")
        code, out, _ = vitkit("inspect", tmp_path / "b.pth", "--heads", "2")
        assert code == 0
        assert "note      It cannot be loaded: it holds " in out
    assert "cannot be loaded" not in vitkit("inspect", tmp_path / "a.pth", "--heads", "2")[1]


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


# What every command that loads weights has in common

LOADING = {
    "--heads": 4,
    "--mean": "0.1,0.2,0.3",
    "--std": "0.4",
    "--resize": "crop",
    "--crop": "0.75",
    "--interpolation": "nearest",
    "--image-size": 48,
    "--key": "student",
}
COMMANDS = {  # {w}: the weights, {d}: a folder of images, {p}: a photo, {o}: a place for results
    "predict": "predict {w} {p}",
    "eval": "eval {w} {d} --split test --in-order --out {o}",
    "embed": "embed {d} --from {w} --cache {o}",
    "search": "search {d} {p} --from {w} --cache {o} --workers 0",
    "suggest": "suggest {w} {d} --cache {o} --workers 0",
    "doctor": "doctor {d} --from {w} --cache {o} --workers 0",
    "probe": "probe {d} --from {w} --out {o} --no-report",
    "tune": "tune {d} --from {w} --out {o} --no-report",
    "explain": "explain {w} {p} --out {o}",
    "figures": "figures {w} --only filters --out {o}",
    "export": "export {w} --to onnx --out {o}.onnx",
    "patches": "patches {p} --from {w} --out {o}",
    "walk": "walk {p} --from {w} --out {o}",
    "explore": "explore --from {w} --build {o} --photos {p}",
    "serve": "serve {w}",
    "teach": "teach --from {w} --out {o}",
    "train": "train {d} --from {w} --out {o} --dry-run",
    "pretrain": "pretrain {d} --from {w} --out {o} --dry-run",
    "sweep": "sweep {d} --from {w} --out {o} --recipe finetune-pets --lrs 0.01",
    "convert": "convert {w} {o}.safetensors",
    "inspect": "inspect {w}",
    "describe": "describe {w}",
}


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    """Weights whose heads nothing states, inside what a training script has saved."""
    sets = {name: to_dialect(tiny.model(seed), "timm") for seed, name in enumerate(("teacher", "student"))}
    torch.save({name: {n: t.clone() for n, t in tensors.items()} for name, tensors in sets.items()}, tmp_path / "w.pth")
    return tmp_path / "w.pth"


def test_the_commands_that_load_weights_are_all_here() -> None:
    from typer.main import get_command

    from vitkit.cli import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    options = {name: {o for p in command.params for o in p.opts} for name, command in commands.items()}
    assert {name for name in options if set(LOADING) <= options[name]} == set(COMMANDS)
    takes = {name for name, command in commands.items() if any(p.name == "weights" for p in command.params)}
    assert takes | {"convert", "inspect", "describe"} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_passes_on_how_to_load(
    command: str,
    nested: Path,
    tmp_path: Path,
    vitkit,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[no-untyped-def]
) -> None:
    """Without --heads loading stops and asks for it; with the options, `load` sees all of them."""
    from PIL import Image

    from vitkit.checkpoints import reading

    for part in ("train", "test"):
        for kind in ("a", "b"):
            folder = tmp_path / "images" / part / kind
            folder.mkdir(parents=True)
            for i in range(6):
                Image.new("RGB", (40, 40), (40 * i, 0, 0)).save(folder / f"{i}.png")
    places = {"w": nested, "d": tmp_path / "images", "p": tmp_path / "images/test/a/0.png", "o": tmp_path / "out"}
    words = COMMANDS[command].format(**places).split()
    code, _, err = vitkit(*words)
    assert code == 2
    assert "does not state its number of heads" in err
    assert "--heads" in err

    seen: list[dict[str, object]] = []

    class Stop(VitkitError):
        pass

    def watched(found: object, of_model: dict[str, object], of_input: dict[str, object]) -> None:
        seen.append({"key": found.key, **of_model, **of_input})  # type: ignore[attr-defined]
        raise Stop("seen")

    monkeypatch.setattr(reading, "_changed", watched)
    code, _, err = vitkit(*words, *(str(word) for pair in LOADING.items() for word in pair))
    assert "seen" in err
    wanted = {
        "key": "student",
        "num_attention_heads": 4,
        "mean": (0.1, 0.2, 0.3),
        "std": (0.4,),
        "resize": "crop",
        "crop": 0.75,
        "interpolation": "nearest",
        "image_size": 48,
    }
    if command in ("patches", "walk"):  # the image is prepared at that size, the model is left as it is
        wanted.pop("image_size")
    assert wanted.items() <= seen[0].items()


def test_exported_files_take_preprocessing_only(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from vitkit.jobs.open_model import open_model
    from vitkit.speed.exported import export

    file = tmp_path / "a.onnx"
    export(tiny.model(), "onnx", file)
    assert open_model(file, resize="squash", interpolation="nearest").input_spec.interpolation == "nearest"
    with pytest.raises(ConfigError, match="An exported file cannot change num_attention_heads"):
        open_model(file, num_attention_heads=2)
