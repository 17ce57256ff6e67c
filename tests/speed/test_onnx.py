"""ONNX files: any batch and image size, the plain model's answers, and the metadata in the file."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.families import FAMILIES
from tests.speed.exports import model, need, write
from tests.speed.test_fused import relative
from vitkit import ViT, optional
from vitkit.data import decode, preprocess
from vitkit.errors import ConfigError, InputError, MissingDependency, UnreadableFile
from vitkit.model.classifier import Classifier
from vitkit.speed.engines import ENGINES
from vitkit.speed.exported import EXPORTS, Exported, export, is_exported, open_exported, through
from vitkit.speed.graph import Graph

EVERYTHING = {"layer_scale": 0.5, "num_register_tokens": 2, "pre_logits": True, "position_resize": "timm"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[ViT, Path]:
    return write(tmp_path_factory.mktemp("onnx"), "tiny.onnx", "onnx", **EVERYTHING)


@pytest.fixture(scope="module")
def opened(written: tuple[ViT, Path]) -> Exported:
    return open_exported(written[1])


@pytest.mark.parametrize("shape", [(1, 32, 32), (2, 32, 32), (5, 32, 32), (2, 48, 24), (1, 8, 64), (3, 8, 8)])
def test_any_batch_and_any_size(written, opened, shape) -> None:
    x = torch.randn(shape[0], 3, *shape[1:])
    with torch.inference_mode():
        assert relative(opened(x), written[0](x)) <= EXPORTS["onnx"].tolerance


def test_it_is_a_classifier_that_knows_its_classes(written, opened) -> None:
    model, _ = written
    assert isinstance(opened, Classifier)
    assert opened.input_spec == model.input_spec
    assert opened.config == model.config
    assert (opened.card.form, opened.card.merge, opened.card.any_size) == ("onnx", 0, True)
    assert opened(torch.zeros(1, 3, 32, 32, dtype=torch.float64)).dtype == torch.float32


def test_bad_pixels_are_refused(opened) -> None:
    with pytest.raises(InputError, match="multiples of the patch size"):
        opened(torch.zeros(1, 3, 33, 32))
    with pytest.raises(InputError, match="3, height, width"):
        opened(torch.zeros(1, 1, 32, 32))
    with pytest.raises(InputError, match="batch of 0"):
        opened(torch.zeros(0, 3, 32, 32))


def test_feed_changes_the_preprocessing(written) -> None:
    opened = open_exported(written[1]).feed(48, mean=(0.25,), std=(0.5, 0.25, 0.125))
    assert opened.input_spec.size == (48, 48)
    assert opened.input_spec.mean == (0.25, 0.25, 0.25)
    assert opened.input_spec.std == (0.5, 0.25, 0.125)
    with pytest.raises(ConfigError, match="multiple of patch_size"):
        opened.feed(50)


def test_the_graph_is_plain_onnx(written) -> None:
    """Another runtime needs nothing of ours: standard operators, named input and output, free sides."""
    import onnx

    model = onnx.load(str(written[1]))
    onnx.checker.check_model(model)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    assert not {"Resize"} & {node.op_type for node in model.graph.node}
    assert [value.name for value in model.graph.input] == ["pixels"]
    assert [value.name for value in model.graph.output] == ["logits"]
    assert sides(model.graph.input[0]) == ["batch", 3, "height", "width"]
    assert sides(model.graph.output[0]) == ["batch", 5]
    inner = {side for value in model.graph.value_info for side in sides(value) if isinstance(side, str)}
    assert "batch" in inner  # and nothing that only the exporter understands
    assert {word for side in inner for word in re.findall(r"[A-Za-z_]\w*", side)} == {"batch", "height", "width"}


def sides(value) -> list[int | str]:
    return [side.dim_param or side.dim_value for side in value.type.tensor_type.shape.dim if side.WhichOneof("value")]


@pytest.mark.parametrize(
    "spec",
    [
        {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)},
        {"resize": "crop", "crop": 0.9, "interpolation": "bicubic", "class_names": ("a", "b", "c", "d", "e")},
    ],
)
def test_the_docs_run_the_file_without_vitkit(tmp_path: Path, monkeypatch, capsys, spec: dict[str, object]) -> None:
    """The block of docs/speed.md that onnxruntime runs alone, on a photo that is not square, against our own answer."""
    need()
    page = (Path(__file__).parents[2] / "docs" / "speed.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(import json\n.*?)^```$", page, re.M | re.S)
    assert not re.search("import (torch|vitkit)|from (torch|vitkit)", code)
    plain = model()
    plain.input_spec = dataclasses.replace(plain.input_spec, **{"class_names": (), **spec})
    export(plain, "onnx", tmp_path / "small.onnx")
    photo = tmp_path / "photos" / "0" / "0.png"
    photo.parent.mkdir(parents=True)
    Image.effect_noise((61, 47), 90).convert("RGB").save(photo)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(code, "speed.md", "exec"), names)
    x = preprocess(decode(photo.read_bytes(), photo.name), plain.input_spec)
    with torch.inference_mode():
        logits = plain(x[None])
    assert relative(torch.from_numpy(names["logits"]), logits) <= EXPORTS["onnx"].tolerance
    best = int(logits.argmax())
    assert capsys.readouterr().out == f"{spec['class_names'][best] if 'class_names' in spec else best}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mean", {"pool": "mean", "position_resize": "huggingface"}),
        ("no class token", {"pool": "mean", "class_token": False, "position_resize": "dinov2"}),
        ("pruned", {"pruned_heads": {0: [1], 1: [0, 2]}, "position_resize": "torchvision"}),
        ("gray", {"num_channels": 1, "hidden_act": "gelu_tanh", "position_resize": "timm-npz"}),
        ("padded", {"pad_input": True, "image_size": 30}),
        ("one patch", {"image_size": 8}),
    ],
)
def test_other_kinds(tmp_path: Path, name: str, changes: dict) -> None:
    model, path = write(tmp_path, "tiny.onnx", "onnx", **changes)
    opened = open_exported(path)
    with torch.inference_mode():
        for size in (model.config.image_hw, (40, 24)):
            x = torch.randn(2, model.config.num_channels, *size)
            assert relative(opened(x), model(x)) <= EXPORTS["onnx"].tolerance


@pytest.mark.parametrize("to", ["onnx", pytest.param("openvino", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        *("dinov3", "beit"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in ("dinov3", "beit")),
    ],
)
def test_families(tmp_path: Path, name: str, to: str) -> None:
    """Rotations take any image size; BEiT's table, offsets and 2-D positions only their own."""
    need()
    changes = {**FAMILIES[name], **({"relative_grid": (4, 4)} if name == "eva02" else {})}
    vit = model(**changes)
    card = export(vit, to, path := tmp_path / f"model{EXPORTS[to].ending}")
    opened = open_exported(path)
    assert card.any_size == (name not in ("beit", "offsets", "2d-every", "sincos-shared"))
    P, grid = vit.config.patch_size, vit.config.grid
    for size in (grid, (grid[0] + 1, grid[1] + 3)) if card.any_size else (grid,):
        x = torch.randn(3, vit.config.num_channels, size[0] * P, size[1] * P)
        with torch.inference_mode():
            assert relative(opened(x), vit(x)) < 1e-5


@pytest.mark.slow
def test_merged(tmp_path: Path) -> None:
    import onnx

    model, path = write(tmp_path, "tiny.onnx", "onnx", merge=4, num_hidden_layers=3)
    graph = onnx.load(str(path)).graph
    assert sides(graph.input[0]) == ["batch", 3, 32, 32]
    assert sides(graph.output[0]) == ["batch", 5]
    opened = open_exported(path)
    with torch.inference_mode():
        for batch in (1, 3):
            x = torch.randn(batch, 3, 32, 32)
            assert relative(opened(x), Graph(model, 4)(x)) < 1e-5
    with pytest.raises(InputError, match=r"exported for images of 32 x 32; got 40 x 32"):
        opened(torch.zeros(1, 3, 40, 32))
    with pytest.raises(ConfigError, match="accepts only images of 32 x 32; got --image-size"):
        opened.feed(48)


@pytest.mark.slow
def test_half_precision_weights_run_in_full(tmp_path: Path) -> None:
    need()
    half = model().bfloat16()
    export(half, "onnx", tmp_path / "half.onnx")
    assert next(half.parameters()).dtype == torch.bfloat16  # the model itself is left as it was
    assert next(half.parameters()).requires_grad
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert relative(open_exported(tmp_path / "half.onnx")(x), half.float()(x)) <= EXPORTS["onnx"].tolerance


def test_mistakes(tmp_path: Path, written) -> None:
    model, _ = written
    with pytest.raises(ConfigError, match=r"name of an onnx file must end in \.onnx; got 'model\.xml'"):
        export(model, "onnx", tmp_path / "model.xml")
    with pytest.raises(UnreadableFile, match=r"Expected an exported file; .* does not exist"):
        open_exported(tmp_path / "missing.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"no protobuf at all")
    with pytest.raises(UnreadableFile, match="is not an ONNX file"):
        open_exported(tmp_path / "broken.onnx")
    with pytest.raises(ConfigError, match="must be calibrated on your images first"):
        through("openvino-int8", model)
    assert is_exported("a/b.onnx")
    assert is_exported("b.xml")
    assert not is_exported("b.safetensors")


def test_an_onnx_file_without_a_card_is_refused(tmp_path: Path, written) -> None:
    import onnx

    model = onnx.load(str(written[1]))
    del model.metadata_props[:]
    onnx.save(model, str(tmp_path / "foreign.onnx"))
    with pytest.raises(UnreadableFile, match=r"Expected a file written by this version.* has no card"):
        open_exported(tmp_path / "foreign.onnx")


def test_a_damaged_file_that_opens_but_cannot_run(tmp_path: Path, written, capfd) -> None:
    """Found by `benchmarks.fuzz exports`, case 440: shapes that do not fit are noticed only when the file runs."""
    import onnx

    good, path = onnx.load(str(written[1])), tmp_path / "damaged.onnx"
    card = [(one.key, one.value) for one in good.metadata_props]
    pixels = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["b", 3, "h", "w"])

    def save(shape: list[int]) -> None:
        """Write a file with the good one's card, that reshapes pixels into what may not be possible."""
        to = onnx.helper.make_tensor("to", onnx.TensorProto.INT64, [len(shape)], shape)
        node = onnx.helper.make_node("Reshape", ["x", "to"], ["y"])
        logits = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
        graph = onnx.helper.make_graph([node], "g", [pixels], [logits], [to])
        damaged = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
        for key, value in card:
            damaged.metadata_props.add(key=key, value=value)
        onnx.save(damaged, str(path))

    save([7, 11])
    with pytest.raises(UnreadableFile, match=r"ONNX Runtime cannot run .*damaged\.onnx on images of 32 x 32 pixels"):
        open_exported(path)(torch.zeros(1, 3, 32, 32))
    save([3, 1024])
    with pytest.raises(UnreadableFile, match=r"Expected logits of shape \[1, \d+\]; .* returned \[3, 1024\]"):
        open_exported(path)(torch.zeros(1, 3, 32, 32))
    assert capfd.readouterr().err == ""


def test_the_engine_row(written) -> None:
    need()
    model = written[0]
    forward, x = ENGINES["onnx"].build(model), torch.randn(3, 3, 32, 32)
    with torch.inference_mode():
        assert relative(forward(x), model(x)) <= ENGINES["onnx"].tolerance


def test_a_missing_library_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"needs onnxruntime: pip install 'vitkit\[export\]'"):
        optional.library("onnxruntime", "export")
