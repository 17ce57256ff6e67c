"""A licence that a checkpoint's files state travels with the model into what is saved of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny
from tests.checkpoints.test_cli import vitkit  # noqa: F401
from tests.training.test_loop import stop_at
from tests.training.tiny import SETTINGS
from vitkit.checkpoints import inspect, load, save
from vitkit.jobs.train import train

CARD = (
    "---\nlicense: other\nlicense_name: 'some-license'\nlicense_link: https://example.com/terms\ntags: [a]\n---\n# x\n"
)


def folder(
    path: Path, readme: str = "", config: dict[str, Any] | None = None, metadata: dict[str, str] | None = None
) -> Path:
    """A folder of transformers with these statements."""
    save(tiny.model(), path, "huggingface")
    if readme:
        (path / "README.md").write_text(readme)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | (config or {})))
    save_file(load_file(path / "model.safetensors"), path / "model.safetensors", {"format": "pt", **(metadata or {})})
    return path


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"readme": CARD}, "some-license (https://example.com/terms)"),
        ({"readme": "---\nlicense: apache-2.0\n---\n"}, "apache-2.0"),
        ({"readme": "license: mit, in the text"}, ""),
        ({"config": {"license": "mit"}, "readme": CARD}, "mit"),
        ({"metadata": {"license": "cc-by-nc-4.0"}, "config": {"license": "mit"}}, "cc-by-nc-4.0"),
        ({}, ""),
    ],
    ids=["front matter with a link", "front matter", "no front matter", "config.json first", "metadata first", "none"],
)
def test_it_is_found_where_files_state_it(stated: dict[str, Any], expected: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "hub", **stated)
    assert inspect(path)["licence"] == load(path).licence == expected


def test_the_terms_of_dinov3_are_known_by_its_name(tmp_path: Path) -> None:
    """Meta's files of weights state nothing themselves, and the agreement must accompany derivatives."""
    save(tiny.model(), tmp_path / "dinov3_vits16_pretrain_lvd1689m-08c60483.pth", "timm")
    (tmp_path / "dinov3_vits16_pretrain_lvd1689m-08c60483.pth.vitkit.json").unlink()
    found = inspect(tmp_path / "dinov3_vits16_pretrain_lvd1689m-08c60483.pth", num_attention_heads=4)
    assert found["licence"].startswith("DINOv3 License (https://")


@pytest.mark.parametrize("dialect", ["native", "huggingface", "timm"])
def test_it_is_written_with_the_weights(dialect: str, tmp_path: Path) -> None:
    model = load(folder(tmp_path / "hub", CARD))
    there = save(model, tmp_path / tiny.destination(dialect, "copy"), dialect)
    again = load(there if dialect != "huggingface" else there.parent)
    assert again.licence == "some-license (https://example.com/terms)"


def test_a_model_without_one_writes_nothing_about_it(tmp_path: Path) -> None:
    save(tiny.model(), tmp_path / "a.safetensors")
    assert b"licence" not in (tmp_path / "a.safetensors").read_bytes()


def test_it_survives_training_and_resuming(tmp_path: Path) -> None:
    """A run that is resumed takes its weights from its own state, not from the file that it started from."""
    save(load(folder(tmp_path / "hub", CARD), num_channels=1), tmp_path / "a.safetensors")
    how: dict[str, Any] = {"settings": SETTINGS, "changes": {"steps": 4, "warmup": 0, "batch_size": 4}}
    run, _ = train("digits", tmp_path / "run", weights=tmp_path / "a.safetensors", watch=stop_at(2), **how)
    assert load(run.path).licence == "some-license (https://example.com/terms)"
    run, _ = train(None, tmp_path / "run", resume=True, settings=SETTINGS)
    assert load(run.path).licence == "some-license (https://example.com/terms)"


def test_commands_show_it(vitkit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    path, native = folder(tmp_path / "hub", CARD), tmp_path / "a.safetensors"
    assert "licence   some-license (https://example.com/terms)" in vitkit("inspect", path)[1]
    code, out, _ = vitkit("convert", path, native)
    assert code == 0
    assert "licence: some-license (https://example.com/terms). It applies to the new file too" in out
    assert "some-license" in vitkit("inspect", native)[1]
