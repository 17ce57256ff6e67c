"""Models whose class token and registers have no position, as DeiT III, FlexiViT and most of timm's with registers."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import tiny
from tests.checkpoints.test_timm_names import small
from tests.peers import peer
from tests.test_parts import CONSUMERS, close, model_of
from vitkit import ViT, as_huggingface, as_paper, as_vit
from vitkit.checkpoints import from_dialect, load, save, sidecar, to_dialect
from vitkit.checkpoints.verify import BAR, compare
from vitkit.errors import ConfigError
from vitkit.huggingface import ViTModel
from vitkit.model.config import ViTConfig, variant
from vitkit.model.count import parameters
from vitkit.speed.fused import Fused
from vitkit.speed.graph import Graph
from vitkit.speed.training import fused_forward

NAMES = {  # timm's, with class token, with class token and registers, with registers alone
    "deit3_small_patch16_224": (True, 0),
    "flexivit_small": (True, 0),
    "vit_small_patch14_reg4_dinov2": (True, 4),
    "vit_wee_patch16_reg1_gap_256": (False, 1),
    "vit_pwee_patch16_reg1_gap_256": (False, 1),
}
KINDS: dict[str, dict[str, Any]] = {
    "class token": {},
    "registers": {"num_register_tokens": 3},
    "registers alone": {"num_register_tokens": 3, "class_token": False, "pool": "mean"},
}
TIMM = {"layer_norm_eps": 1e-6, "position_resize": "timm"}


def model(kind: str = "class token", **fields: Any) -> ViT:
    return tiny.model(**{**TIMM, **KINDS[kind], "prefix_positions": False, **fields})


@pytest.mark.parametrize("name", NAMES)
def test_timm_reads_back_its_own_file(name: str, tmp_path: Path) -> None:
    theirs, again = small(name), small(name)
    peer("timm").models.save_for_hf(theirs, tmp_path / "a", safe_serialization=True)
    ours = load(tmp_path / "a")
    c = ours.config
    assert (c.class_token, c.num_register_tokens, c.prefix_positions) == (*NAMES[name], False)
    assert parameters(c) == sum(p.numel() for p in theirs.parameters())
    written, expected = to_dialect(ours, "timm"), theirs.state_dict()
    assert set(written) == set(expected)
    assert all(torch.equal(written[key], expected[key]) for key in expected)
    save(ours, tmp_path / "b.pth", "timm")
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict(torch.load(tmp_path / "b.pth", weights_only=True), strict=True)
    x = torch.randn(2, 3, *c.image_hw)
    with torch.inference_mode():
        assert tiny.difference(ours(x), again(x)) <= 1e-5


@pytest.mark.parametrize(
    ("name", "fields"),
    [("deit3_small_patch16_224", {"layer_scale": 1e-6}), ("flexivit_small", {"image_size": 240})],
)
def test_parameters_are_as_many_as_timm_counts(name: str, fields: dict[str, Any]) -> None:
    with torch.device("meta"):
        theirs = peer("timm").create_model(name)
    count = sum(p.numel() for p in theirs.parameters())
    assert parameters(variant("vit-s/16", prefix_positions=False, **fields)) == count
    assert parameters(variant("vit-s/16", **fields)) == count + 384


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [None, 48])
def test_timm_runs_our_file(kind: str, size: int | None, tmp_path: Path) -> None:
    save(model(kind), tmp_path / "a.pth", "timm")
    rows = compare(tmp_path / "a.pth", **({} if size is None else {"image_size": size}))
    assert rows
    assert max(row.difference for row in rows) <= BAR, rows


@pytest.mark.parametrize("name", [name for name in CONSUMERS if not name.startswith("dialect")])
@pytest.mark.filterwarnings("ignore:.*FlopCounter.*")
def test_everything_that_takes_a_model(name: str) -> None:
    CONSUMERS[name](model_of("pool=cls", prefix_positions=False))


@pytest.mark.parametrize("positions_in", ["every", "shared"])
def test_positions_in_every_block(positions_in: str) -> None:
    m, x = model("registers", positions_in=positions_in), torch.randn(2, 3, 48, 40)
    assert parameters(m.config) == sum(p.numel() for p in m.parameters())
    expected = m(x)
    m.set_image_size((48, 40))
    close(m(x), expected)


def step(m: ViT, forward: Any, x: Tensor) -> dict[str, Tensor]:
    m.zero_grad()
    forward(m, x).square().sum().backward()
    return {name: p.grad.clone() for name, p in m.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_fused_forward(kind: str) -> None:
    m, x = model(kind), torch.randn(2, 3, 32, 32)
    expected, found = step(m, lambda m, x: m(x), x), step(m, fused_forward, x)
    assert set(found) == set(expected) == {name for name, _ in m.named_parameters()}
    for name, gradient in expected.items():
        close(found[name], gradient, 1e-4)


def test_training_leaves_the_class_token_without_a_position() -> None:
    m = model().train()
    step(m, lambda m, x: m(x), torch.randn(2, 3, 32, 32))
    torch.optim.SGD(m.parameters(), lr=0.1).step()
    added = m.positions(m.config.grid)
    assert not added[:, :1].any()
    assert added.shape == (1, 17, 32)
    assert m.positions.table.shape == (1, 16, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_other_sizes(kind: str, tmp_path: Path) -> None:
    m, x = model(kind), torch.randn(2, 3, 48, 40)
    expected = m(x)
    close(Graph(m, any_size=True)(x), expected)
    close(Fused(m)(x), expected)
    save(m, tmp_path / "a.safetensors")
    close(load(tmp_path / "a.safetensors", image_size=(48, 40))(x), expected)
    with torch.no_grad():
        m.remember_size((48, 40))
        assert torch.equal(m(x), expected)
        assert (6, 5) in m.positions._kept
    m.set_image_size((48, 40))
    assert m.positions.table.shape == (1, 30, 32)
    close(m(x), expected)


def test_copies_compiling_and_pruning() -> None:
    m, x = model(), torch.randn(2, 3, 32, 32)
    expected = m(x)
    assert torch.equal(copy.deepcopy(m)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(m))(x), expected)
    close(torch.compile(m, backend="eager", fullgraph=True)(x), expected)
    silent = torch.ones(2, 4)
    silent[0, 1] = 0
    expected = m(x, silent)
    m.prune_heads({0: [1]})
    close(m(x), expected)
    assert as_vit(m).config.prefix_positions is False


@pytest.mark.parametrize("dialect", ["huggingface", "google", "torchvision", "course"])
def test_other_libraries_get_a_row_of_zeros(dialect: str, tmp_path: Path) -> None:
    m, x = model(), torch.randn(2, 3, 32, 32)
    path = tmp_path / tiny.destination(dialect)
    save(m, path, dialect)
    found = load(path)
    assert found.config == dataclasses.replace(m.config, prefix_positions=True)
    assert torch.equal(found.positions.table[:, 1:], m.positions.table)
    assert not found.positions.table[:, 0].any()
    assert torch.equal(found(x), m(x))
    beside = sidecar.place(path)
    assert "prefix_positions" not in (beside if beside.is_file() else path / "config.json").read_text()
    if dialect in ("huggingface", "torchvision"):
        assert max(row.difference for row in compare(path)) <= BAR


def test_the_other_interfaces() -> None:
    m, x = model(), torch.randn(2, 3, 32, 32)
    close(as_paper(m)(x), m(x))
    twelve = as_huggingface(m)
    close(twelve(x).logits, m(x))
    assert twelve.config.prefix_positions
    assert as_vit(twelve).config.prefix_positions
    close(as_vit(twelve)(x), m(x))
    with pytest.raises(ConfigError, match="no place for prefix_positions=False"):
        ViTModel(m.config)


PLAIN = ("native", "huggingface", "timm", "torchvision", "google", "dinov2", "dinov2-hf", "course")


@pytest.mark.parametrize("dialect", PLAIN)
def test_tensors_of_a_dialect_fit_either_form(dialect: str) -> None:
    """A position that the class token does not have is zero; one that it has becomes part of it."""
    m = model(num_classes=0, layer_scale=0.5) if dialect.startswith("dinov2") else model()
    for config in (m.config, dataclasses.replace(m.config, prefix_positions=True)):
        other = ViT(config).eval()
        other.load_state_dict(from_dialect(to_dialect(m, dialect), dialect, config))
        close(other(tiny.pixels(m)), m(tiny.pixels(m)))


@pytest.mark.parametrize("dialect", ["dinov2", "dinov2-hf"])
def test_registers_of_other_libraries_reach_timm(dialect: str, tmp_path: Path) -> None:
    """timm's models with a class token and registers have no positions for them, so the token takes its own."""
    name = "vit_small_patch14_reg4_dinov2"
    theirs = small(name)
    peer("timm").models.save_for_hf(theirs, tmp_path / "timm", safe_serialization=True)
    own = load(tmp_path / "timm", num_classes=0)
    with_row = ViT(dataclasses.replace(own.config, prefix_positions=True)).eval()
    table = torch.cat([torch.randn(1, 1, 384), own.positions.table], dim=1)
    with_row.load_state_dict({**own.state_dict(), "positions.table": table})
    path = tmp_path / tiny.destination(dialect)
    save(with_row, path, dialect)
    read, x = load(path), torch.randn(2, 3, *own.config.image_hw)
    assert read.config.prefix_positions
    written = to_dialect(read, "timm")
    headless = peer("timm").create_model(name, depth=1, num_classes=0, img_size=own.config.image_hw)
    headless.load_state_dict(written, strict=True)
    assert tiny.difference(read(x), headless.eval()(x)) <= 1e-5
    assert torch.equal(written["cls_token"], with_row.class_token + table[:, :1])
    save(read, tmp_path / "b.pth", "timm")
    again = load(tmp_path / "b.pth")
    assert not again.config.prefix_positions
    assert torch.equal(again(x), read(x))


def test_the_table_decides_whatever_is_stated(tmp_path: Path) -> None:
    for name, stated in (("a", True), ("b", False)):
        m = model(prefix_positions=not stated)
        save(m, tmp_path / f"{name}.pth", "timm")
        beside = sidecar.place(tmp_path / f"{name}.pth")
        values = json.loads(beside.read_text())
        assert values["config"].get("prefix_positions", True) is not stated
        values["config"]["prefix_positions"] = stated
        beside.write_text(json.dumps(values))
        found = load(tmp_path / f"{name}.pth")
        assert found.config == m.config
        assert tiny.same_tensors(found, m)


def test_native_files_keep_it(tmp_path: Path) -> None:
    """Files that were written before there was the field have a row of zeros, and load as they are."""
    m = model()
    save(m, tmp_path / "new.safetensors")
    found = load(tmp_path / "new.safetensors")
    assert found.config == m.config
    assert tiny.same_tensors(found, m)
    old = ViT(dataclasses.replace(m.config, prefix_positions=True)).eval()
    table = torch.cat([torch.zeros(1, 1, 32), m.positions.table], dim=1)
    old.load_state_dict({**m.state_dict(), "positions.table": table})
    save(old, tmp_path / "old.safetensors")
    assert "prefix_positions" not in sidecar.describe(old.config, old.input_spec)
    found = load(tmp_path / "old.safetensors")
    assert found.config == old.config
    assert tiny.same_tensors(found, old)
    assert torch.equal(found(tiny.pixels(m)), m(tiny.pixels(m)))


@pytest.mark.parametrize(
    "fields",
    [{"positions": "none"}, {"positions": "2d"}, {"positions": "sincos"}, {"class_token": False, "pool": "mean"}],
    ids=str,
)
def test_what_it_needs(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"prefix_positions=False needs positions='1d' and a class token or reg.*out"):
        ViTConfig(prefix_positions=False, **fields)
