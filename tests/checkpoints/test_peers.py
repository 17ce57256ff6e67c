"""Files that we write are read by the real libraries, theirs by us, and the outputs are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import tiny
from tests.peers import peer
from vitkit.checkpoints import load, save
from vitkit.checkpoints.verify import BAR, compare
from vitkit.errors import CannotExpress
from vitkit.jobs.convert import photos

NO_PEER = {"google": ("pre-logits", "pooler")}  # timm reads these files but drops the layer
# timm builds these by an architecture's name, which tiny models lack; test_timm_names.py compares real names.
BY_NAME = {
    "timm": {
        "deit with teacher",
        "clip",
        "clip projected",
        "siglip",
        "siglip 2",
        "dinov3",
        "dinov3 gated",
        "aimv2 without a head",
        "beit",
        "beit classifier",
        "beit, class token",
        "data2vec",
    }
}
ROWS = [
    (dialect, label)
    for dialect in ("huggingface", "timm", "torchvision", "google", "dinov2", "dinov2-hf")
    for label, fields in tiny.MODELS.items()
    if dialect in tiny.expressible(tiny.config(**fields)) and label not in NO_PEER.get(dialect, ())
]
LIBRARIES = {
    "huggingface": "transformers",
    "timm": "timm",
    "torchvision": "torchvision",
    "google": "timm",
    "dinov2": "timm",
    "dinov2-hf": "transformers",
}
NUMERICS = {"huggingface": {}, "dinov2-hf": {}, "google": {"layer_norm_eps": 1e-6, "hidden_act": "gelu_tanh"}}


@pytest.mark.parametrize(("dialect", "label"), ROWS, ids=[f"{d}: {name}" for d, name in ROWS])
def test_the_library_gives_our_outputs(dialect: str, label: str, tmp_path: Path) -> None:
    """`compare` lets the library itself read the file; transformers also takes its numbers from our config.json."""
    peer(LIBRARIES[dialect])
    numerics = NUMERICS.get(dialect, {"layer_norm_eps": 1e-6, "hidden_act": "gelu"})
    model = tiny.model(**{**tiny.MODELS[label], **numerics})
    save(model, tmp_path / tiny.destination(dialect), dialect)
    if label in BY_NAME.get(dialect, ()):
        with pytest.raises(CannotExpress, match="timm's name for a model with"):
            compare(tmp_path / tiny.destination(dialect), model, photos(model.config))
        return
    rows = compare(tmp_path / tiny.destination(dialect), model, photos(model.config))
    assert [row.images for row in rows] == ["random", "photos"]
    assert max(row.difference for row in rows) <= BAR, rows


@pytest.mark.parametrize(
    ("field", "value", "dialect"),
    [
        ("layer_norm_eps", 1e-2, "timm"),
        ("hidden_act", "gelu_tanh", "timm"),
        ("hidden_act", "gelu", "google"),
        ("layer_norm_eps", 1e-2, "torchvision"),
    ],
)
def test_a_difference_is_explained(field: str, value: Any, dialect: str, tmp_path: Path) -> None:
    """What a library cannot be told shows as a difference, and its cause is named."""
    peer(LIBRARIES[dialect])
    numerics = {"layer_norm_eps": 1e-6, "hidden_act": "gelu_tanh" if dialect == "google" else "gelu", field: value}
    model = tiny.model(**numerics)
    save(model, tmp_path / tiny.destination(dialect), dialect)
    for row in compare(tmp_path / tiny.destination(dialect), model):
        assert not row.equal
        assert f"explained by {field}" in row.explanation


def test_a_damaged_weight_is_not_explained_away(tmp_path: Path) -> None:
    peer("timm")
    model = tiny.model(layer_norm_eps=1e-6)
    save(model, tmp_path / "a.pth", "timm")
    with torch.no_grad():
        model.blocks[1].mlp.fc2.weight[3, 4] += 1
    assert all(not row.equal and not row.explanation for row in compare(tmp_path / "a.pth", model))


def test_what_the_library_cannot_run_is_said(tmp_path: Path) -> None:
    peer("timm")
    save(tiny.model(pre_logits=True), tmp_path / "a.npz", "google")
    with pytest.raises(CannotExpress, match="timm has no pre-logits"):
        compare(tmp_path / "a.npz")


def test_transformers_loads_the_folder(tmp_path: Path) -> None:
    library = peer("transformers")
    model = tiny.model()
    model.input_spec = type(model.input_spec)(
        size=(32, 32),
        mean=(0.1, 0.2, 0.3),
        std=(0.4, 0.5, 0.6),
        interpolation="bicubic",
        class_names=("a", "b", "c", "d", "e"),
    )
    save(model, tmp_path / "hf", "huggingface")
    theirs, told = library.AutoModelForImageClassification.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert theirs.config.id2label == {0: "a", 1: "b", 2: "c", 3: "d", 4: "e"}
    x = tiny.pixels(model)
    assert tiny.difference(model(x), theirs.eval()(x).logits) <= BAR
    processor = library.AutoImageProcessor.from_pretrained(tmp_path / "hf")
    assert (list(processor.image_mean), list(processor.image_std)) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert processor.resample == 3


def test_we_load_what_transformers_saves(tmp_path: Path) -> None:
    library = peer("transformers")
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 32,
        "patch_size": 8,
    }
    x = torch.randn(2, 3, 32, 32)
    for kind, settings, ours in (
        ("ViTForImageClassification", library.ViTConfig(**shape, num_labels=4, hidden_act="gelu_new"), {}),
        ("ViTModel", library.ViTConfig(**shape, qkv_bias=False), {}),
        ("Dinov2Model", library.Dinov2Config(**shape | {"mlp_ratio": 2}), {}),
        ("Dinov2WithRegistersModel", library.Dinov2WithRegistersConfig(**shape | {"mlp_ratio": 2}), {}),
    ):
        theirs = getattr(library, kind)(settings).eval()
        theirs.save_pretrained(tmp_path / kind)
        model = load(tmp_path / kind, **ours)
        out = theirs(x)
        expected = out.logits if kind == "ViTForImageClassification" else out.pooler_output
        if "Dinov2" in kind:
            expected = out.last_hidden_state[:, 0]
            assert model.config.layer_scale == 1.0
        assert tiny.difference(model(x), expected) <= BAR
        assert model.config.layer_norm_eps == settings.layer_norm_eps


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"global_pool": "avg"},
        {"init_values": 0.3, "reg_tokens": 2},
        {"init_values": 0.3, "no_embed_class": True},
        {"reg_tokens": 3, "no_embed_class": True},
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
    ],
    ids=["plain", "fc_norm", "registers", "no_embed_class", "registers without positions", "no class token"],
)
def test_we_load_what_timm_has(fields: dict[str, Any], tmp_path: Path) -> None:
    timm = peer("timm")
    theirs = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, mlp_ratio=2, num_classes=5, **fields
    ).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    torch.save({"state_dict": {f"module.{name}": t for name, t in theirs.state_dict().items()}}, tmp_path / "a.pth")
    model, x = load(tmp_path / "a.pth", num_attention_heads=4), torch.randn(2, 3, 32, 32)
    assert tiny.difference(model(x), theirs(x)) <= BAR


@pytest.mark.parametrize("size", [48, 24])
@pytest.mark.parametrize("dialect", ["huggingface", "timm", "torchvision"])
def test_another_resolution_as_the_library_does_it(dialect: str, size: int, tmp_path: Path) -> None:
    peer(LIBRARIES[dialect])
    rule = {"position_resize": dialect}
    model = tiny.model(**rule, **({} if dialect == "huggingface" else {"layer_norm_eps": 1e-6}))
    save(model, tmp_path / tiny.destination(dialect), dialect)
    rows = compare(tmp_path / tiny.destination(dialect), image_size=size)
    assert max(row.difference for row in rows) <= BAR, rows
    (wrong, *_) = compare(tmp_path / tiny.destination(dialect), image_size=size, position_resize="google")
    assert "explained by position_resize" in wrong.explanation


def test_the_course_is_the_plain_replication(tmp_path: Path) -> None:
    from vitkit import paper

    theirs = paper.ViT(
        img_size=32, patch_size=8, num_transformer_layers=2, embedding_dim=32, mlp_size=64, num_heads=4, num_classes=5
    ).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    torch.save(theirs.state_dict(), tmp_path / "a.pth")
    model, x = load(tmp_path / "a.pth", num_attention_heads=4), torch.randn(2, 3, 32, 32)
    assert model.config.layer_norm_eps == 1e-5
    assert tiny.difference(model(x), theirs(x)) <= BAR
    save(model, tmp_path / "b.pth", "course")
    theirs.load_state_dict(torch.load(tmp_path / "b.pth", weights_only=True))
    assert tiny.difference(model(x), theirs(x)) <= BAR
