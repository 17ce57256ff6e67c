"""OpenVINO files in fp32 and int8."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.speed.exports import write
from tests.speed.test_fused import relative
from vitkit import ViT, cpu_features
from vitkit.errors import DataError, InputError, UnreadableFile
from vitkit.speed.exported import EXPORTS, export, open_exported
from vitkit.speed.graph import Graph


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[ViT, Path]:
    return write(tmp_path_factory.mktemp("openvino"), "tiny.xml", "openvino", num_register_tokens=1)


@pytest.fixture(scope="module")
def written_int8(tmp_path_factory: pytest.TempPathFactory) -> tuple[ViT, Path]:
    return write(tmp_path_factory.mktemp("int8"), "tiny.xml", "openvino-int8", merge=3)


def test_any_batch_and_any_size(written) -> None:
    model, path = written
    opened = open_exported(path)
    with torch.inference_mode():
        for shape in ((1, 32, 32), (3, 32, 32), (2, 48, 24), (1, 8, 8), (1, 16, 16), (1, 24, 24), (2, 32, 32)):
            x = torch.randn(shape[0], 3, *shape[1:])  # more sizes than stay compiled
            assert relative(opened(x), model(x)) <= EXPORTS["openvino"].tolerance
    assert opened.input_spec == model.input_spec
    assert opened.card.form == "openvino"


def test_int8_with_merging(written_int8) -> None:
    model, path = written_int8
    opened, x = open_exported(path), torch.randn(16, 3, 32, 32)
    with torch.inference_mode():
        assert relative(opened(x), Graph(model, 3)(x)) < 0.2
        assert opened(x[:1]).shape == (1, 5)
    assert (opened.card.merge, opened.card.any_size) == (3, False)
    assert opened.input_spec.class_names == model.input_spec.class_names
    with pytest.raises(InputError, match="exported for images of 32 x 32"):
        opened(torch.zeros(1, 3, 48, 48))


def test_int8_holds_its_weights_in_8_bits(written, written_int8) -> None:
    import openvino

    kinds = [
        node.get_element_type().get_type_name()
        for node in openvino.Core().read_model(str(written_int8[1])).get_ops()
        if node.get_type_name() == "Constant" and len(node.shape) == 2
    ]
    assert kinds.count("i8") == 4 + 1  # qkv, out, fc1, fc2 of one layer, keys and values of the last
    small, large = (path.with_suffix(".bin").stat().st_size for path in (written_int8[1], written[1]))
    assert small < large


def test_int8_needs_images(tmp_path: Path, written) -> None:
    with pytest.raises(DataError, match="--images DATA"):
        export(written[0], "openvino-int8", tmp_path / "model.xml")


def test_what_is_not_an_openvino_file(tmp_path: Path, written) -> None:
    (tmp_path / "some.xml").write_text("<html></html>")
    with pytest.raises(UnreadableFile, match="is not an OpenVINO file"):
        open_exported(tmp_path / "some.xml")
    (tmp_path / "alone.xml").write_bytes(written[1].read_bytes())  # its .bin is missing
    with pytest.raises(UnreadableFile):
        open_exported(tmp_path / "alone.xml")


@pytest.mark.parametrize(("code", "expected"), [(-4, "AVX512_CORE_FP16"), (0, None)])
def test_instructions_that_cannot_run_are_left_out(monkeypatch: pytest.MonkeyPatch, code: int, expected) -> None:
    monkeypatch.delenv(cpu_features.ISA, raising=False)
    monkeypatch.setattr(cpu_features, "has_amx", lambda: True)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, code))
    cpu_features.check_instructions.__wrapped__()
    assert os.environ.get(cpu_features.ISA) == expected
    monkeypatch.setenv(cpu_features.ISA, "AVX2")
    cpu_features.check_instructions.__wrapped__()
    assert os.environ[cpu_features.ISA] == "AVX2"  # the user's own choice stays
