"""The graph against the model and against a sequence without the erased patches; the file; what is refused."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import Command
from tests.explore.conftest import NAMES, noise, tiny
from vitkit.checkpoints import save
from vitkit.data.preprocess import preprocess
from vitkit.errors import CannotExpress, ConfigError, InputError
from vitkit.explore import runtime
from vitkit.explore.examples import compute, packed
from vitkit.explore.graph import MAX_MEGABYTES, OUTPUTS, Explored, check
from vitkit.explore.sixteen import rounded
from vitkit.jobs.explore import MOST_PHOTOS, Built, build
from vitkit.model.create import create
from vitkit.model.vit import ViT

MEAN = {"pool": "mean", "class_token": False}


def outputs(model: ViT, x: torch.Tensor, keep: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return dict(zip(OUTPUTS, Explored(model)(x, keep), strict=True))


@pytest.mark.parametrize(
    "changes", [{}, MEAN, {"pool": "mean"}, {"positions": "none"}, {"hidden_act": "swiglu"}], ids=str
)
def test_outputs_are_those_of_the_model(changes: dict[str, object]) -> None:
    """In fp64: rounding, which is not the same on all CPUs, takes fp32 to the edge of what `assert_close` allows."""
    model, x = check(tiny(**changes).double()), torch.randn(1, 3, 32, 32).double()
    assert isinstance(model, ViT)
    found = outputs(model, x, torch.ones(16))
    with torch.inference_mode():
        torch.testing.assert_close(found["logits"], model(x)[0])
        torch.testing.assert_close(found["states"], torch.cat(model.hidden_states(x)))
        torch.testing.assert_close(found["attention"], torch.cat(list(model.attention(x).values())))
        torch.testing.assert_close(found["embedded"], model.patch_embedding(x)[0][0])
        for layer, z in enumerate(model.hidden_states(x)):
            torch.testing.assert_close(found["read"][layer], model.read(z)[0])
            torch.testing.assert_close(found["lens"][layer], model.classify(model.read(z))[0])
        torch.testing.assert_close(found["middles"][0], model.blocks[0].attend(model.embed(x), (4, 4))[0])
        scores = found["q"] @ found["k"].mT / model.config.head_size**0.5
        torch.testing.assert_close(scores.softmax(-1), found["attention"])
        torch.testing.assert_close(
            found["v"][0], model.blocks[0].msa.project(model.blocks[0].norm1(model.embed(x)), (4, 4))[2][0]
        )


@pytest.mark.parametrize("changes", [{}, MEAN, {"pool": "mean"}], ids=str)
def test_an_erased_patch_might_as_well_not_be_there(changes: dict[str, object]) -> None:
    """The oracle is another computation: the blocks on a shorter sequence."""
    model, x, keep = tiny(**changes), torch.randn(1, 3, 32, 32), torch.ones(16)
    keep[[2, 3, 11]] = 0
    found = outputs(model, x, keep)
    n = model.config.num_prefix_tokens
    left = torch.cat([torch.arange(n), n + keep.nonzero()[:, 0]])
    with torch.inference_mode():
        z = model.embed(x)[:, left]
        for block in model.blocks:
            z = block(z, (1, len(left) - n))
        logits = model.classify(model.read(z))[0]
    torch.testing.assert_close(found["logits"], logits)
    torch.testing.assert_close(found["states"][-1][left], z[0])
    assert found["attention"][..., n + torch.tensor([2, 3, 11])].max() == 0
    assert (found["logits"] - outputs(model, x, torch.ones(16))["logits"]).abs().max() > 1e-3


def test_the_file_computes_the_same(built: Built) -> None:
    runtime_ = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model, x, keep = tiny(), torch.randn(1, 3, 32, 32), torch.ones(16)
    keep[5] = 0
    session = runtime_.InferenceSession(built.folder / "model/model.onnx", providers=["CPUExecutionProvider"])
    found = session.run(list(OUTPUTS), {"pixels": x.numpy(), "keep": keep.numpy()})
    for name, expected in outputs(model, x, keep).items():
        np.testing.assert_allclose(found[OUTPUTS.index(name)], expected, atol=2e-3, err_msg=name)


def test_matrices_have_16_bits(built: Built) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    tensors = onnx.load(built.folder / "model/model.onnx").graph.initializer
    large = [t for t in tensors if len(t.dims) > 1 and t.dims[-1] > 1 and t.data_type == onnx.TensorProto.FLOAT]
    assert not large
    assert sum(t.data_type == onnx.TensorProto.INT16 for t in tensors) >= 8


def test_rounding_is_finer_than_float16() -> None:
    values = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    values[3] = 0
    whole, scale = rounded(values)
    error = np.abs(whole * scale - values)
    assert error.max() <= scale.max() / 2 * 1.001
    half = np.sqrt(((values.astype(np.float16).astype(np.float32) - values) ** 2).mean())
    assert np.sqrt((error**2).mean()) < half / 4
    assert (whole[3] == 0).all()


def test_examples_are_what_the_model_gives() -> None:
    model = tiny()
    graph, x = Explored(model), preprocess(noise(0), model.input_spec)[None]
    found = compute(graph, x)
    raw = gzip.decompress(packed(found))
    L, T, K, h = 2, 17, 3, 4
    sizes = [(L + 1) * K, (L + 1) * T, L * h * T]
    numbers = np.frombuffer(raw[: 4 * sum(sizes)], "<f4")
    lens, norms, most = np.split(numbers, np.cumsum(sizes)[:-1])
    np.testing.assert_array_equal(lens, found["lens"].ravel())
    np.testing.assert_allclose(norms, np.linalg.norm(found["states"], axis=-1).ravel(), rtol=1e-6)
    small = np.frombuffer(raw[4 * sum(sizes) :], np.uint8).reshape(L, h, T, T)
    attention = (small / 255) ** 2 * most.reshape(L, h, T, 1)
    assert np.abs(attention - found["attention"]).max() < 0.004


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_classes": 0}, "needs a model with a classification head"),
        ({"num_register_tokens": 2}, "num_register_tokens=2"),
        ({"layer_scale": 0.1}, "layer_scale=0.1"),
        ({"pruned_heads": {0: [1]}}, "pruned heads"),
        ({"pre_logits": True}, "pre_logits"),
        ({"relative": "eva02"}, "relative=eva02"),
        ({"block": "parallel"}, "block=parallel"),
        ({"pool": "map"}, "pool=map"),
        ({"norms": ("final", "first")}, "norms=first"),
        ({"hidden_size": 3072, "intermediate_size": 3072}, f"at most {MAX_MEGABYTES} MB"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_models_that_the_page_cannot_show_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(CannotExpress, match=says):
        check(tiny(**changes))


def test_other_inputs_are_refused() -> None:
    with pytest.raises(ConfigError, match="ResNet"):
        check(create("r50x1", num_classes=3))
    model = tiny()
    model.input_spec = replace(model.input_spec, size=(64, 64))
    with pytest.raises(CannotExpress, match="64 x 64"):
        check(model)
    model.input_spec = replace(model.input_spec, size=(32, 32), thresholds=(0.5, 0.5, 0.5))
    with pytest.raises(CannotExpress, match="several labels"):
        check(model)
    with pytest.raises(CannotExpress, match="RGB or gray"):
        check(ViT(replace(tiny().config, num_channels=4)))


def test_the_runtime_is_the_one_of_npm() -> None:
    for name, content in runtime.files().items():
        raw = gzip.decompress(content) if name == runtime.WASM else content
        assert hashlib.sha256(raw).hexdigest() == runtime.SHA256[name], name
    assert f"v{runtime.VERSION}" in runtime.files()["ort.js"].decode()[:200]
    assert "MIT License" in runtime.files()["ort-LICENSE.txt"].decode()
    assert sum(map(len, runtime.files().values())) < 4e6


def test_the_folder_is_whole_and_tells_nothing_about_this_machine(built: Built, photos: list[Path]) -> None:
    found = [file for file in built.folder.rglob("*") if file.is_file()]
    assert {str(file.relative_to(built.folder)): file.stat().st_size for file in found} == built.sizes
    card = json.loads((built.folder / "model" / "card.json").read_text(encoding="utf-8"))
    assert card["classes"] == list(NAMES)
    assert [example["title"] for example in card["examples"]] == ["photo 0", "photo 1"]
    for file in found:
        if file.name not in runtime.SHA256:
            assert str(photos[0].parent).encode() not in file.read_bytes(), file.name
            assert b"site-packages" not in file.read_bytes(), file.name
    page = (built.folder / "index.html").read_text(encoding="utf-8")
    for name in built.sizes:  # every module is preloaded: nothing is found out one after the other
        if name.endswith(".js") and name not in ("app.js", "ort.js", "worker.js", "opened-from-a-file.js"):
            assert f'<link rel="modulepreload" href="{name}">' in page, name


def test_too_many_photos(tmp_path: Path) -> None:
    for i in range(MOST_PHOTOS + 1):
        noise(i, 8, 8).save(tmp_path / f"{i}.png")
    with pytest.raises(InputError, match=f"at most {MOST_PHOTOS} example photos; got {MOST_PHOTOS + 1}"):
        build(tiny(), tmp_path / "out", [tmp_path])
    assert not (tmp_path / "out").exists()


def test_the_model_is_not_changed(given: ViT, built: Built) -> None:
    assert given.training
    assert all(p.requires_grad for p in given.parameters())


def test_command(tmp_path: Path, photos: list[Path], vitkit: Command) -> None:
    save(tiny(), tmp_path / "tiny.safetensors")
    done = vitkit(
        "explore",
        "--from",
        str(tmp_path / "tiny.safetensors"),
        "--build",
        str(tmp_path / "page"),
        "--photos",
        str(photos[0]),
    )
    assert done.returncode == 0, done.stderr
    assert f"wrote {tmp_path / 'page'}" in done.stdout
    assert (tmp_path / "page" / "model/model.onnx").is_file()
    save(tiny(num_classes=0), tmp_path / "headless.safetensors")
    done = vitkit("explore", "--from", str(tmp_path / "headless.safetensors"), "--build", str(tmp_path / "no"))
    assert done.returncode == 2
    assert "classification head" in done.stderr
    assert not (tmp_path / "no").exists()
