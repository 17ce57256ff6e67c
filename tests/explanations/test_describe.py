"""Rows of `describe`, drawings, and patches."""

from __future__ import annotations

import base64
import dataclasses
import io
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit import ViTConfig, huggingface, paper
from vitkit.cli import app
from vitkit.errors import ConfigError, InputError
from vitkit.explanations.describe import Row, describe, rows_of
from vitkit.explanations.diagram import DIAGRAMS, paper_parts
from vitkit.explanations.overview import overview
from vitkit.explanations.patches import cut
from vitkit.model.config import VARIANTS, variant
from vitkit.model.count import parameters

ODD = ViTConfig(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=100,
    image_size=(64, 32),
    patch_size=8,
    num_channels=1,
    num_classes=0,
    num_register_tokens=2,
    pre_logits=True,
)
REGISTERS = dataclasses.replace(ODD, pool="mean", class_token=False, layer_scale=0.1, num_classes=7)


def test_rows_follow_an_image() -> None:
    rows = {row.name: row for row in describe(VARIANTS["vit-b/16"], batch=2)}
    assert rows[""].parameters == parameters(VARIANTS["vit-b/16"])
    assert rows["patch_embedding"].output == (2, 196, 768)
    assert rows["blocks.11.mlp.fc1"].output == (2, 197, 3072)
    assert rows["blocks.11.msa.qkv"].input == (2, 197, 768)
    assert rows["head"].input == (2, 768)
    names = list(rows)
    assert names.index("blocks.0.msa") < names.index("blocks.0.norm2") < names.index("blocks.1")


def adds_up(rows: list[Row], depth: int) -> int:
    """Sum the rows that `--depth` shows and that have nothing shown inside them."""
    shown = [row for row in rows if row.depth <= depth]
    around = {row.name.rpartition(".")[0] for row in shown if row.name}
    return sum(row.parameters for row in shown if row.name not in around)


@pytest.mark.parametrize("name", [*VARIANTS, "odd", "registers"])
def test_rows_add_up_at_every_depth(name: str) -> None:
    config = {"odd": ODD, "registers": REGISTERS}.get(name) or VARIANTS[name]
    rows = describe(config)
    total = parameters(config)
    assert [adds_up(rows, depth) for depth in range(6)] == [total] * 6
    names = {row.name: row for row in rows}
    assert len(names) == len(rows)
    assert ("class_token" in names) == config.class_token
    assert names["positions"].parameters == (config.class_token + config.num_patches) * config.hidden_size
    for row in rows:
        inside = [other.parameters for other in rows if other.name and other.name.rpartition(".")[0] == row.name]
        assert not inside or sum(inside) == row.parameters, row.name


def test_the_command_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    app(["describe", "vit-b/16", "--depth", "1"], standalone_mode=False)
    said = capsys.readouterr().out
    numbers = [int(found.replace(",", "")) for found in re.findall(r"([\d,]+) +yes", said)]
    assert numbers[0] == sum(numbers[1:]) == 86_567_656
    assert "86,567,656 parameters (330 MiB in fp32), 35.1 GFLOPs per image of 224 x 224 pixels." in said


@pytest.mark.parametrize("config", [VARIANTS["vit-b/16"], ODD], ids=["b/16", "odd"])
@pytest.mark.parametrize("diagram", ["classes", "overview"])
def test_drawings_are_svg_with_the_models_own_shapes(diagram: str, config: ViTConfig) -> None:
    drawing = DIAGRAMS[diagram](config)
    words = " ".join(node.text or "" for node in ElementTree.fromstring(drawing).iter())
    assert "class_token: Parameter" in words or diagram != "classes"
    assert str(config.num_prefix_tokens + config.num_patches) in words
    assert str(config.intermediate_size) in words


SMALL = ViTConfig(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=100,
    image_size=(64, 32),
    patch_size=8,
    num_channels=1,
    num_classes=7,
)


def words_of(drawing: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(drawing).iter() if node.tag.endswith("text")]


@pytest.mark.parametrize("classes", [0, 7])
def test_the_twelve_classes_are_drawn_nested(classes: int) -> None:
    config = dataclasses.replace(SMALL, num_classes=classes)
    words = words_of(DIAGRAMS["huggingface"](config))
    results = {name for name in huggingface.__all__ if "ModelOutput" in name} | {"ImageClassifierOutput"}
    kinds = set(huggingface.__all__) - results - {"ViTConfig"}
    assert len(kinds) == 12
    for kind in kinds - ({"ViTForImageClassification"} if not classes else set()):
        assert any(f": {kind}" in line or f"× {kind}" in line for line in words), kind
    assert f"{parameters(config):,} parameters" in words[0]
    assert "layer: 3 × ViTLayer" in words
    assert sum("ViTLayer" in line for line in words) == 1


def test_drawings_say_what_the_model_has() -> None:
    odd = dataclasses.replace(SMALL, qkv_bias=False, pruned_heads=((1, (0, 3)),), hidden_act="relu")
    assert "2 to 4 heads of 12, no bias in Eq. 5" in words_of(DIAGRAMS["overview"](odd))
    assert "4 heads of 12" in words_of(DIAGRAMS["overview"](SMALL))
    for change, words in (
        ({"qkv_bias": False}, "qkv_bias=False"),
        ({"pruned_heads": ((1, (0,)),)}, "pruned_heads"),
        ({"hidden_act": "relu"}, "hidden_act=relu"),
        ({"layer_scale": 0.1}, "layer_scale=0.1"),
    ):
        with pytest.raises(ConfigError, match=f"no place for {words}"):
            DIAGRAMS["paper-MLPBlock"](dataclasses.replace(SMALL, **change))
    tanh = words_of(DIAGRAMS["paper-MLPBlock"](dataclasses.replace(SMALL, hidden_act="gelu_tanh")))
    assert "mlp.1: GELU (tanh form), then dropout" in tanh
    assert "mlp.1: GELU, then dropout" in words_of(DIAGRAMS["paper-MLPBlock"](SMALL))


HYBRID = variant("r50+vit-b/16")


@pytest.mark.parametrize("config", [VARIANTS["vit-ti/16"], VARIANTS["vit-l/16"], ODD, SMALL, HYBRID])
def test_the_overview_stays_inside_its_canvas(config: ViTConfig) -> None:
    root = ElementTree.fromstring(overview(config, np.zeros((*config.image_hw, 3), np.uint8)))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for node in root.iter():
        found = node.attrib
        if node.tag.endswith(("rect", "image")) and "x" in found:
            assert float(found["x"]) >= 0
            assert float(found["x"]) + float(found["width"]) <= width - 20
            assert float(found["y"]) + float(found["height"]) <= height - 20
        if node.tag.endswith("text"):
            wide = 7.4 * len(node.text or "") * {"start": 1, "middle": 0.5}[found["text-anchor"]]
            assert float(found["x"]) + wide <= width
            assert float(found["y"]) <= height - 10
    boxes = [node.attrib for node in root.iter() if "box msa" in node.attrib.get("class", "")]
    words = [n for n in root.iter() if n.tag.endswith("text") and (n.text or "").startswith("Multi-head")]
    assert float(boxes[0]["width"]) > 6.9 * len(words[0].text or "")  # it fills the box and leaves room


def test_the_overview_shows_the_photos_own_patches() -> None:
    photo = np.zeros((64, 32, 3), np.uint8)
    photo[:8, 8:16, 0], photo[-8:, -8:, 2] = 255, 255  # the second patch is red, the last one blue
    whole, *patches = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(found))), float).mean((0, 1))
        for found in sorted(re.findall(r"base64,([^\"]+)", overview(SMALL, photo)), key=len, reverse=True)
    ]
    assert len(patches) == 4
    assert sorted(int(colour.argmax()) for colour in patches if colour.max() > 200) == [0, 2]
    assert whole.max() < 30
    assert "<image" not in overview(SMALL)


def test_the_overview_of_a_hybrid_has_its_stem() -> None:
    words = words_of(overview(HYBRID))
    assert "ResNet stem: r50/16" in words
    assert "feature map [B, 1024, 14, 14]" in words
    assert "Eq. 1   [B, 196, 1² · 1024] E → [B, 196, 768]" in words
    assert "cut" not in "".join(words)


def test_a_photo_is_for_the_drawings(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--photo is for the drawings; give a folder for them with --draw"):
        app(["describe", "vit-ti/16", "--photo", "x.jpg"], standalone_mode=False)
    Image.new("RGB", (50, 40), (250, 10, 10)).save(tmp_path / "red.png")
    args = ["describe", "vit-ti/16", "--depth", "0", "--photo", str(tmp_path / "red.png"), "--draw", str(tmp_path)]
    app(args, standalone_mode=False)
    assert (tmp_path / "overview.svg").read_text(encoding="utf-8").count("<image") == 5


@pytest.mark.parametrize("pre_logits", [False, True])
def test_the_five_classes_are_drawn_with_the_shapes_that_they_have(pre_logits: bool) -> None:
    config = dataclasses.replace(SMALL, pre_logits=pre_logits)
    with torch.device("meta"):
        model = paper.ViT((64, 32), 1, 8, 3, 48, 100, 4, 7, pre_logits=pre_logits).eval()
        rows = {row.name: row for row in rows_of(model, torch.empty(1, 1, 64, 32))}
    inside = {
        "PatchEmbedding": "patch_embedding",
        "MultiheadSelfAttentionBlock": "transformer_encoder.0.msa_block",
        "MLPBlock": "transformer_encoder.0.mlp_block",
        "TransformerEncoderBlock": "transformer_encoder.0",
        "ViT": "",
    }
    assert {f"paper-{name}" for name in inside} == {name for name in DIAGRAMS if name.startswith("paper-")}
    for name, (_, start, parts) in paper_parts(config).items():
        whole = rows[inside[name]]
        assert whole.kind == name
        assert (whole.input, whole.output) == ((1, *start), (1, *parts[-1].result))
        named = [part for part in parts if re.match(r"[\w.]+:", part.words)]
        assert named
        for part in named:
            row = rows[".".join(filter(None, (inside[name], part.words.partition(":")[0])))]
            assert row.output == (1, *part.result), part.words
        words = words_of(DIAGRAMS[f"paper-{name}"](config))
        assert all(part.words in words for part in parts)
        assert sum(line == "+" for line in words) == (2 if name == "TransformerEncoderBlock" else 0)


@pytest.mark.parametrize("diagram", [name for name in DIAGRAMS if name not in ("classes", "overview")])
def test_what_other_interfaces_have_no_place_for_is_not_drawn(diagram: str) -> None:
    with pytest.raises(ConfigError, match="no place for"):
        DIAGRAMS[diagram](ODD)


def test_cut_is_row_by_row() -> None:
    image = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
    parts = cut(image, 2)
    assert parts.shape == (3, 2, 2, 2, 3)
    assert np.array_equal(parts[2, 1], image[4:6, 2:4])
    with pytest.raises(InputError, match="multiples of the patch size 4; got 6 x 4"):
        cut(image, 4)
