"""Bad input: one sentence, nothing run, and whatever was at the destination is still there."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import pickle
import stat
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoints import tiny
from vitkit.checkpoints import atomic, containers, load, open_checkpoint, save, sidecar, to_dialect
from vitkit.checkpoints.atomic import staging
from vitkit.errors import (
    CheckpointError,
    OutputError,
    TensorMismatch,
    UnreadableFile,
    UnsafeFile,
    VitkitError,
)

FILES = {"native": "a.safetensors", "timm": "b.pth", "google": "c.npz"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("whole")
    found = {dialect: save(tiny.model(), folder / name, dialect) for dialect, name in FILES.items()}
    legacy = folder / "legacy.pth"
    torch.save(dict(to_dialect(tiny.model(), "timm")), legacy, _use_new_zipfile_serialization=False)
    return {**found, "legacy": legacy}


def test_legacy_pickles_are_read(whole: dict[str, Path]) -> None:
    assert tiny.same_tensors(load(whole["legacy"], num_attention_heads=4), tiny.model())


@pytest.mark.parametrize("dialect", [*FILES, "legacy"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_truncated(dialect: str, share: float, whole: dict[str, Path], tmp_path: Path) -> None:
    data = whole[dialect].read_bytes()
    (tmp_path / "cut").write_bytes(data[: int(len(data) * share)])
    with pytest.raises((UnreadableFile, UnsafeFile)) as error:
        load(tmp_path / "cut", num_attention_heads=4)
    assert "\n" not in str(error.value)


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_damaged_bytes_are_never_a_crash(data: st.DataObject, whole: dict[str, Path], tmp_path: Path) -> None:
    """Whatever bytes come, the answer is a model or one of our errors."""
    dialect = data.draw(st.sampled_from([*FILES, "legacy"]))
    content = bytearray(whole[dialect].read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # most damage goes where the structure is: the beginning and the end
        place = data.draw(st.one_of(st.integers(0, 400), st.integers(len(content) - 400, len(content) - 1)))
        content[place] = data.draw(st.integers(0, 255))
    (tmp_path / "damaged").write_bytes(content)
    with contextlib.suppress(VitkitError):
        load(tmp_path / "damaged", num_attention_heads=4)


@pytest.mark.parametrize("size", [0x4B50, 0x0880, 0x3C28])  # "PK" of a zip, "\x80" of a pickle, "(<"
def test_a_safetensors_file_whose_length_looks_like_another_format(size: int, tmp_path: Path) -> None:
    """The file begins with the length of its header; a training state of such a length was called damaged."""
    file, tensor = tmp_path / "odd.safetensors", {"a": torch.arange(3.0)}
    safetensors.torch.save_file(tensor, file, {"pad": ""})
    bare = int.from_bytes(file.read_bytes()[:8], "little")
    text = file.read_bytes()[8 : 8 + bare].rstrip()
    safetensors.torch.save_file(tensor, file, {"pad": "x" * (size - len(text))})
    assert int.from_bytes(file.read_bytes()[:8], "little") == size
    assert torch.equal(containers.read(file)[0]["a"], tensor["a"])


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is empty"),
        (b"hello world, this is not a checkpoint", "begins with"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\x1f\x8b\x08\x00\x00\x00", "gzip"),
        (b"PK\x03\x04 not really", "truncated or damaged"),
        (b'\x08\x00\x00\x00\x00\x00\x00\x00{"a": 1}', "not a complete safetensors file"),
    ],
)
def test_wrong_magic(content: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(content)
    with pytest.raises(UnreadableFile, match=what):
        load(tmp_path / "a.pth")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="There is no file or folder"):
        load(tmp_path / "none.pth")
    with pytest.raises(UnreadableFile, match="holds no weights"):
        load(tmp_path)
    for name in ("a.pth", "b.pth"):
        torch.save({}, tmp_path / name)
    with pytest.raises(UnreadableFile, match=r"several files of weights \(a.pth, b.pth\)"):
        load(tmp_path)


# Code in files


class Bomb:
    """Unpickled without care, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _as_zip(saved: Any, path: Path) -> None:
    torch.save(saved, path)


def _as_legacy(saved: Any, path: Path) -> None:
    torch.save(saved, path, _use_new_zipfile_serialization=False)


def _as_pickle(saved: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(saved))


@pytest.mark.parametrize("write", [_as_zip, _as_legacy, _as_pickle])
def test_a_malicious_pickle_does_nothing(write: Any, tmp_path: Path) -> None:
    write({**to_dialect(tiny.model(), "timm"), "bomb": Bomb(tmp_path / "exploded")}, tmp_path / "a.pth")
    with pytest.raises(UnsafeFile, match=r"posix\.mkdir.*not read|not read"):
        load(tmp_path / "a.pth")
    assert not (tmp_path / "exploded").exists()


def test_a_malicious_npz_does_nothing(tmp_path: Path) -> None:
    array = np.empty(1, dtype=object)
    array[0] = Bomb(tmp_path / "exploded")
    np.savez(tmp_path / "a.npz", **{"embedding/kernel": array}, allow_pickle=True)
    with pytest.raises(UnsafeFile, match="could run code; it was not read"):
        load(tmp_path / "a.npz")
    assert not (tmp_path / "exploded").exists()


def test_a_bomb_would_have_worked(tmp_path: Path) -> None:
    """The two tests above cannot pass because the bomb is a dud."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert (tmp_path / "exploded").exists()


def test_a_whole_module_is_refused(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pth")
    with pytest.raises(UnsafeFile, match="state_dict"):
        load(tmp_path / "a.pth")


def test_torchscript_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/constants.pkl", b"")
        archive.writestr("a/data.pkl", b"")
    with pytest.raises(UnsafeFile, match="TorchScript"):
        load(tmp_path / "a.pt")


# What training scripts save


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: {"model": t},
        lambda t: {"state_dict": t, "epoch": 3},
        lambda t: {"student": {}, "teacher": t},
        lambda t: {f"module.{name}": v for name, v in t.items()},
        lambda t: {"state_dict": {f"module._orig_mod.{name}": v for name, v in t.items()}},
        lambda t: {"model": OrderedDict(t), "args": argparse.Namespace(lr=0.1, name="x"), "optimizer": {"state": {}}},
        lambda t: {"teacher": {f"module.backbone.{name}": v for name, v in t.items()}},
    ],
    ids=["model", "state_dict", "teacher", "module.", "nested prefixes", "with arguments", "DINO"],
)
def test_nested_state_dicts(wrap: Any, tmp_path: Path) -> None:
    torch.save(
        wrap({name: t.clone() for name, t in to_dialect(tiny.model(num_classes=0), "timm").items()}), tmp_path / "a.pth"
    )
    assert tiny.same_tensors(load(tmp_path / "a.pth", num_attention_heads=4), tiny.model(num_classes=0))


@pytest.mark.parametrize(
    ("saved", "what"),
    [
        ({"epoch": 3}, "Expected a state dict.*holds a dict of epoch"),
        ([1, 2], "holds a list"),
        ({}, "holds a dict"),
        ({"cls_token": torch.zeros(1), "step": 7}, "also holds 'step'"),
    ],
)
def test_no_state_dict(saved: Any, what: str, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "a.pth")
    with pytest.raises(TensorMismatch, match=what):
        load(tmp_path / "a.pth")


def test_missing_and_extra_and_shapes_in_files(tmp_path: Path) -> None:
    tensors = {name: t.clone() for name, t in to_dialect(tiny.model(), "timm").items()}
    for change, what in (
        ({"blocks.1.mlp.fc2.bias": None}, r"lacks 1 of .* 'blocks.1.mlp.fc2.bias'"),
        ({"novel.weight": torch.zeros(1)}, "'novel.weight'"),
        ({"blocks.1.mlp.fc1.bias": torch.zeros(63)}, r"\[64\].*got \[63\]"),
        ({"patch_embed.proj.weight": torch.zeros(32, 3)}, "4 axes"),
        ({"pos_embed": None}, "'pos_embed'"),
        ({"patch_embed.proj.weight": torch.zeros(32, 3, 8, 4)}, "8 x 4"),
        ({"norm.weight": torch.zeros(32, dtype=torch.int8)}, "floating-point"),
        ({"blocks.999999999.norm1.bias": torch.zeros(32)}, "blocks are missing"),
    ):
        changed = {name: t for name, t in {**tensors, **change}.items() if t is not None}
        torch.save(changed, tmp_path / "a.pth")
        with pytest.raises(CheckpointError, match=what):
            load(tmp_path / "a.pth", num_attention_heads=4)


# Shards


def shards(folder: Path, parts: int = 2) -> Path:
    from safetensors.torch import save_file

    tensors = to_dialect(tiny.model(), "huggingface")
    names, places = list(tensors), {}
    folder.mkdir()
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        chosen = names[part::parts]
        save_file({name: tensors[name].contiguous() for name in chosen}, folder / file)
        places |= dict.fromkeys(chosen, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    return index


def test_sharded(tmp_path: Path) -> None:
    index = shards(tmp_path / "s")
    for source in (index, tmp_path / "s"):
        assert tiny.same_tensors(load(source, num_attention_heads=4), tiny.model())


def test_bad_shards(tmp_path: Path) -> None:
    index = shards(tmp_path / "s")
    values = json.loads(index.read_text(encoding="utf-8"))
    name = next(iter(values["weight_map"]))
    index.write_text(
        json.dumps({"weight_map": {**values["weight_map"], name: "../outside.safetensors"}}), encoding="utf-8"
    )
    with pytest.raises(UnreadableFile, match="outside its own folder"):
        load(index)
    index.write_text(
        json.dumps({"weight_map": {**values["weight_map"], "ghost": values["weight_map"][name]}}), encoding="utf-8"
    )
    with pytest.raises(TensorMismatch, match="'ghost'"):
        load(index)
    index.write_text("[]", encoding="utf-8")
    with pytest.raises(UnreadableFile, match="not the index"):
        load(index)
    index.write_text(json.dumps(values), encoding="utf-8")
    (tmp_path / "s" / values["weight_map"][name]).unlink()
    with pytest.raises(UnreadableFile, match="Could not open"):
        load(index)


def test_bad_json_beside(tmp_path: Path) -> None:
    save(tiny.model(), tmp_path / "hf", "huggingface")
    for name, content, what in (
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[1]", "not a JSON object"),
        ("config.json", '{"model_type": "dinov2", "hidden_size": {}}', "cannot be understood"),
        ("config.json", '{"architecture": "x", "pretrained_cfg": 3}', "cannot be understood"),
        ("preprocessor_config.json", '{"resample": 99}', "cannot be understood"),
    ):
        before = (tmp_path / "hf" / name).read_text(encoding="utf-8")
        (tmp_path / "hf" / name).write_text(content, encoding="utf-8")
        with pytest.raises(UnreadableFile, match=what):
            load(tmp_path / "hf")
        (tmp_path / "hf" / name).write_text(before, encoding="utf-8")


def test_json_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    save(tiny.model(), tmp_path / "hf", "huggingface")
    config = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    config["id2label"]["0"] = "Käse"
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    code = (
        f"from vitkit.checkpoints import open_checkpoint\n"
        f"print(ascii(open_checkpoint({str(tmp_path / 'hf')!r}).input_spec.class_names[0]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )
    assert done.stdout.strip() == r"'K\xe4se'", done.stderr


# Writing


@pytest.mark.parametrize(("dialect", "name"), [*FILES.items(), ("huggingface", "hf")])
def test_a_failed_write_changes_nothing(
    dialect: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tiny.model(1), tmp_path / name, dialect)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def half(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(containers, "WRITERS", dict.fromkeys(containers.WRITERS, half))
    with pytest.raises(OutputError, match=r"the disk is full; free some space\. Nothing there was changed"):
        save(tiny.model(2), tmp_path / name, dialect)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert not list(tmp_path.rglob(".vitkit-*"))


def test_a_real_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The operating system refuses in the middle of the write; every library reports that in its own way."""
    resource = pytest.importorskip("resource")
    places = {**FILES, "huggingface": "hf"}
    for dialect, name in places.items():
        save(tiny.model(1), tmp_path / name, dialect)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    code = (
        "import json, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from tests.checkpoints import tiny\nfrom vitkit.checkpoints import save\n"
        "from vitkit.errors import OutputError\n"
        "for dialect, name in json.loads(sys.argv[1]).items():\n"
        "    try: save(tiny.model(2), name, dialect)\n"
        "    except OutputError as error: print(error)"
    )
    there = json.dumps({dialect: str(tmp_path / name) for dialect, name in places.items()})
    done = subprocess.run(
        [sys.executable, "-c", code, there],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Could not write to") == len(places), done.stdout
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_new_folders_do_not_stay_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(containers, "WRITERS", dict.fromkeys(containers.WRITERS, refuse))
    with pytest.raises(OutputError, match="read-only"):
        save(tiny.model(), tmp_path / "x" / "y" / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_staging_keeps_the_folder_when_the_block_fails(tmp_path: Path) -> None:
    def write() -> None:
        with staging(tmp_path) as private:
            (private / "a").write_text("1", encoding="utf-8")
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("last", ["a", "b", "c"])
def test_the_last_file_moves_last_whatever_the_clock_says(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[str] = []
    plain = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (moved.append(Path(new).name), plain(old, new)))
    with staging(tmp_path, last) as private:
        for name in "abc":
            (private / name).write_text("1", encoding="utf-8")
            os.utime(private / name, ns=(0, 0))
    assert moved == [*sorted(set("abc") - {last}), last]


def test_windows_syncs_no_folder_and_no_read_only_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, fsync fails on files opened for reading, and folders cannot be opened at all."""
    opened: list[tuple[str, int]] = []

    def watched(path: Path, flags: int) -> int:
        opened.append((Path(path).name, flags))
        return plain(path, flags)

    plain = os.open
    monkeypatch.setattr(atomic, "os", SimpleNamespace(**{**vars(os), "name": "nt", "open": watched}))
    with staging(tmp_path) as private:
        (private / "a").write_text("1", encoding="utf-8")
    assert opened == [("a", os.O_RDWR)]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "folder.safetensors").mkdir()
    for place, dialect, what in (
        (tmp_path / "file" / "a.safetensors", "native", "part of the path is a file"),
        (tmp_path / "folder.safetensors", "native", r"folder\.safetensors: it is a folder"),
        (tmp_path / "a.pth", "native", r"ending in \.safetensors"),
        (tmp_path / "a.safetensors", "google", r"ending in \.npz"),
        (tmp_path / "a.safetensors", "huggingface", "Expected the name of a folder"),
        (tmp_path / "file", "huggingface", "Expected the name of a folder"),
    ):
        with pytest.raises(OutputError, match=what):
            save(tiny.model(), place, dialect)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder.safetensors"]


def test_written_files_have_the_usual_permissions(tmp_path: Path) -> None:
    path = save(tiny.model(), tmp_path / "a.safetensors")
    mask = os.umask(0o022)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_model_can_be_saved_over_the_file_it_came_from(tmp_path: Path) -> None:
    """Its tensors are mapped from that file; the old file lives on until nothing looks into it."""
    path = save(tiny.model(), tmp_path / "a.safetensors")
    model = load(path)
    save(model, path)
    assert tiny.same_tensors(load(path), tiny.model())
    assert tiny.same_tensors(model, tiny.model())


def test_unused_tensors_are_said(tmp_path: Path) -> None:
    save(tiny.model(**tiny.MODELS["dinov2"]), tmp_path / "a.pth", "dinov2")
    opened = open_checkpoint(tmp_path / "a.pth")
    assert opened.unused == ["mask_token"]
    assert "Left out of the model: a mask token (1 tensor)." in opened.notes


# Files that would take for ever, or all memory


def changed_native(folder: Path, config: dict[str, Any], spec: dict[str, Any]) -> Path:
    """A native file whose description was changed by hand."""
    from safetensors.torch import save_file

    tensors, metadata = containers.read(save(tiny.model(), folder / "a.safetensors"))
    values = json.loads(metadata["vitkit"])
    values["config"] |= config
    values["input_spec"] |= spec
    save_file({n: t.clone() for n, t in tensors.items()}, folder / "b.safetensors", {"vitkit": json.dumps(values)})
    return folder / "b.safetensors"


@pytest.mark.parametrize(
    ("config", "spec", "what"),
    [
        ({"num_hidden_layers": 10**6}, {}, "num_hidden_layers must be at most 10,000; got 1000000"),
        ({"num_hidden_layers": 9999}, {}, "Expected 9,999 blocks.*the file holds 32 tensors"),
        ({"hidden_size": 10**9}, {}, "hidden_size must be at most"),
        ({"hidden_size": 10**9 + 7}, {}, "hidden_size must be at most"),
        ({"num_channels": 10**9}, {}, "num_channels must be at most"),
        ({"num_attention_heads": 10**400}, {}, "num_attention_heads must be at most"),
        ({"image_size": 3_200_000}, {}, "image_size must be at most 16,384"),
        ({}, {"size": [3_200_000, 3_200_000]}, "size must be at most 16,384"),
        ({"qkv_bias": "yes"}, {}, "qkv_bias must be True or False; got 'yes'"),
        ({"pruned_heads": [["x", [0]]]}, {}, "pruned_heads must map layers to lists of heads"),
        ({}, {"class_names": [1, 2, 3, 4, 5]}, "class_names must be text; got 1"),
        ({}, {"mean": 5}, "mean must be a list; got 5"),
    ],
)
def test_numbers_that_no_model_has(config: dict[str, Any], spec: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=what) as caught:
        load(changed_native(tmp_path, config, spec))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("file", "change", "what"),
    [
        ("config.json", {"num_hidden_layers": 10**6}, "num_hidden_layers must be at most"),
        ("config.json", {"hidden_size": 10**9 + 7}, "hidden_size must be at most"),
        ("config.json", {"num_channels": 10**9}, "num_channels must be at most"),
        ("config.json", {"image_size": "x" * 100_000}, "image_size must be a number of pixels"),
        ("config.json", {"image_size": [1, 2, 3]}, "image_size must be a number of pixels"),
        ("config.json", {"patch_size": "x" * 100_000}, "patch_size must be a whole number"),
        ("config.json", {"patch_size": 0}, "patch_size must be a whole number"),
        ("config.json", {"layer_norm_eps": 10**400}, "layer_norm_eps must be a finite number"),
        ("preprocessor_config.json", {"image_mean": [10**400]}, "mean must be a finite number"),
        ("preprocessor_config.json", {"image_mean": ["x"]}, "mean must be a finite number"),
        ("config.json", {"hidden_act": []}, "hidden_act to be one of"),
        ("config.json", {"pruned_heads": "abc"}, "pruned_heads must map layers"),
        ("config.json", {"pruned_heads": {"x": [0]}}, "pruned_heads must map layers"),
        ("config.json", {"model_type": "dinov2", "mlp_ratio": 1e308}, "cannot be understood"),
        ("preprocessor_config.json", {"size": {"height": 3_200_000, "width": 3_200_000}}, "at most 16,384"),
        ("preprocessor_config.json", {"do_center_crop": True, "crop_size": 1e308, "size": 1e308}, "whole number|under"),
        ("preprocessor_config.json", {"do_center_crop": True, "crop_size": 224, "size": [1]}, "cannot be understood"),
    ],
)
def test_wrong_values_in_json(file: str, change: dict[str, Any], what: str, tmp_path: Path) -> None:
    save(tiny.model(), tmp_path / "hf", "huggingface")
    values = json.loads((tmp_path / "hf" / file).read_text(encoding="utf-8"))
    (tmp_path / "hf" / file).write_text(json.dumps(values | change), encoding="utf-8")
    with pytest.raises(VitkitError, match=what) as caught:
        load(tmp_path / "hf")
    assert len(str(caught.value)) < 300


def test_nested_json(tmp_path: Path) -> None:
    save(tiny.model(), tmp_path / "hf", "huggingface")
    for deep in ("[" * 100_000, '{"a":' * 100_000):
        (tmp_path / "hf" / "config.json").write_text(deep, encoding="utf-8")
        with pytest.raises(UnreadableFile, match=r"config\.json is not valid JSON"):
            load(tmp_path / "hf")
    index = shards(tmp_path / "s")
    index.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(UnreadableFile, match="not the index"):
        load(index)
    weights = save(tiny.model(), tmp_path / "t.pth", "timm")
    sidecar.place(weights).write_text("[" * 100_000, encoding="utf-8")
    assert any("it is ignored" in note for note in open_checkpoint(weights, num_attention_heads=4).notes)


def test_an_index_that_names_an_index(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for name in (index.name, "other.index.json"):
        index.write_text(json.dumps({"weight_map": {"a": name}}), encoding="utf-8")
        with pytest.raises(UnreadableFile, match=f"it names an index, '{name}'"):
            load(tmp_path)


def test_a_pickle_that_contains_itself(tmp_path: Path) -> None:
    itself: dict[str, Any] = {}
    itself["model"] = itself
    torch.save(itself, tmp_path / "a.pth")
    with pytest.raises(TensorMismatch, match="Expected a state dict"):
        load(tmp_path / "a.pth")
    itself["student"] = {"a": torch.zeros(1)}
    torch.save(itself, tmp_path / "a.pth")
    with pytest.raises(TensorMismatch, match="a dictionary that contains itself"):
        load(tmp_path / "a.pth")
    assert load_student(tmp_path / "a.pth") == ["a"]


def load_student(path: Path) -> list[str]:
    return list(containers.read(path, key="student")[0])


def test_a_deep_pickle(tmp_path: Path) -> None:
    deep = pickle.dumps({}, 2)
    # {"model": {"model": ... {}}}, written by hand because pickle itself would recurse
    body = b"\x80\x02" + b"}U\x05model" * 3000 + deep[2:-1] + b"s" * 3000 + b"."
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("a/data.pkl", body)
        archive.writestr("a/version", b"3\n")
        archive.writestr("a/byteorder", b"little")
    with pytest.raises(CheckpointError, match="Expected a state dict"):
        load(tmp_path / "a.pth")


@pytest.mark.parametrize("modern", [True, False], ids=["zip", "legacy"])
def test_nested_tuples_as_a_key(tmp_path: Path, modern: bool) -> None:
    """Hashing a tuple in tuples recurses in C: two million of them ended the process."""
    body = b"\x80\x02}U\x05model})" + 2_000_000 * b"\x85" + b"K\x01ss."
    if modern:
        with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
            archive.writestr("a/data.pkl", body)
            archive.writestr("a/version", b"3\n")
    else:
        start: tuple[Any, ...] = (torch.serialization.MAGIC_NUMBER, 1001, {"little_endian": True})
        (tmp_path / "a.pth").write_bytes(b"".join(pickle.dumps(part, 2) for part in start) + body + pickle.dumps([], 2))
    program = "import sys, vitkit; vitkit.load(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "a.pth"], capture_output=True, text=True)
    assert done.returncode == 1, done.returncode
    assert "UnreadableFile" in done.stderr
    assert "more than 100 tuples inside each other" in done.stderr


def test_a_decompression_bomb(tmp_path: Path) -> None:
    size = 2 * 2**30
    head = (
        np.lib.format.magic(1, 0)
        + b"\x76\x00"
        + b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d,), }" % (size // 4)
    )
    with (
        zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("embedding/kernel.npy", "w", force_zip64=True) as file,
    ):
        file.write(head.ljust(127) + b"\n")
        for _ in range(size // 2**24):
            file.write(bytes(2**24))
    with pytest.raises(UnreadableFile, match=r"would grow from [\d,]+ bytes to 2,147,\d+,\d+ when decompressed"):
        load(tmp_path / "a.npz")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_only_regular_files_of_weights(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "pipe.safetensors"}}')
    with pytest.raises(UnreadableFile, match=r"pipe\.safetensors is not a regular file"):
        load(tmp_path)
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    for name in ("pipe.safetensors", "loop.safetensors"):
        with pytest.raises(UnreadableFile, match=f"^Expected a file or folder of weights; '.*{name}' is neither"):
            load(tmp_path / name)


def test_long_names_make_short_messages(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({f"{n}{'x' * 90_000}": torch.zeros(1) for n in range(4)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "a.safetensors")
    assert len(str(caught.value)) < 1600
    tensors = {name: t.clone() for name, t in to_dialect(tiny.model(), "timm").items()}
    torch.save({**tensors, f"blocks.{'9' * 5000}.norm1.bias": torch.zeros(32)}, tmp_path / "a.pth")
    with pytest.raises(TensorMismatch, match="blocks are missing"):
        load(tmp_path / "a.pth", num_attention_heads=4)
