"""Every class of plain Vision Transformers in transformers: saved by its own save_pretrained, read by us, equal."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.families import CLASSES
from tests.checkpoints import tiny
from tests.peers import peer
from vitkit.checkpoints import DIALECTS, convert, load, open_checkpoint, recognise, save
from vitkit.checkpoints.verify import BAR, compare
from vitkit.errors import CannotExpress, ConfigError

BAR_A = 1e-5  # of attention, whose entries are at most one


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Save a class's model once, and return the folder and the model."""
    library, kept = peer("transformers"), dict[str, Any]()
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()

    def make(name: str) -> tuple[Path, Any]:
        if name not in kept:
            model = CLASSES[name].make(library)
            folder = tmp_path_factory.mktemp("class")
            model.save_pretrained(folder)
            kept[name] = folder, model
        return kept[name]

    return make


def pixels(seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_a_class_is_equal(name: str, saved: Any, tmp_path: Path) -> None:
    folder, theirs = saved(name)
    ours, x = load(folder), pixels()
    out, tokens, attention = CLASSES[name].answer(theirs, x)
    assert out is not None or tokens is not None
    if out is not None:
        assert tiny.difference(ours(x), out) <= BAR
    if tokens is not None:
        normed, plain = tiny.difference(ours.tokens(x), tokens), tiny.difference(ours.encode(x), tokens)
        assert min(normed, plain) <= BAR  # CLIP and BEiT show tokens without the final norm
    found = ours.attention(x)
    assert all((A.sum(-1) - 1).abs().max() < 1e-5 for A in found.values())
    if attention:
        assert max(float((found[i] - A).abs().max()) for i, A in enumerate(attention)) < BAR_A
    assert len(attention) == 2, "transformers shows the attention of every layer"


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_written_back(name: str, saved: Any, tmp_path: Path) -> None:
    """In its own dialect, where that can hold it; transformers reads the result, and it is equal."""
    folder, _ = saved(name)
    found = open_checkpoint(folder)
    dialect, model = found.dialect.name, load(folder)
    if name == "CLIPForImageClassification":
        with pytest.raises(CannotExpress, match=r"pool=mean, norms=no final, .* Dialects that can: native"):
            save(model, tmp_path / "out", dialect)
        return
    save(model, tmp_path / "out", dialect)
    again = load(tmp_path / "out")
    assert tiny.same_tensors(again, model)
    assert again.config == model.config
    assert max(row.difference for row in compare(tmp_path / "out")) <= BAR
    save(model, tmp_path / "a.safetensors")
    assert tiny.same_tensors(load(tmp_path / "a.safetensors"), model)


def test_other_sizes_as_transformers_does_it(saved: Any) -> None:
    """Rotary positions take any size; tables are resized by transformers' own rule."""
    x = torch.randn(2, 3, 48, 32)
    for name, how in {
        "DINOv3ViTModel": {},
        "CLIPVisionModel": {"interpolate_pos_encoding": True},
        "SiglipVisionModel": {"interpolate_pos_encoding": True},
    }.items():
        folder, theirs = saved(name)
        with torch.no_grad():
            assert tiny.difference(load(folder)(x), theirs(x, **how).pooler_output) <= BAR, name
            assert tiny.difference(load(folder, image_size=(48, 32))(x), theirs(x, **how).pooler_output) <= BAR, name


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("CLIPModel", "the scale of image-text scores (1 tensor), a text tower (21 tensors)"),
        ("SiglipModel", "the scale of image-text scores (2 tensors), a text tower (22 tensors)"),
        ("SiglipForImageClassification", "parts that this classifier does not use (11 tensors)"),
        ("ViTMAEForPreTraining", "a decoder of masked pre-training (24 tensors)"),
        ("DINOv3ViTModel", "a mask token (1 tensor)"),
    ],
)
def test_what_is_left_out_is_said(name: str, what: str, saved: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vitkit"):
        load(saved(name)[0])
    assert f"Left out of the model: {what}." in caplog.text


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("CLIPVisionModel", "hidden_act and num_attention_heads"),
        ("SiglipVisionModel", "num_attention_heads"),
        ("DINOv3ViTModel", "num_attention_heads"),
    ],
)
def test_a_bare_file_is_refused_with_what_to_give(name: str, asked: str, saved: Any, tmp_path: Path) -> None:
    folder, theirs = saved(name)
    save_file(load_file(folder / "model.safetensors"), tmp_path / "bare.safetensors")
    with pytest.raises(ConfigError, match=f"do not tell {asked}. Put its config.json next to it, or give"):
        load(tmp_path / "bare.safetensors")
    model = load(tmp_path / "bare.safetensors", num_attention_heads=4, hidden_act=load(folder).config.hidden_act)
    model.set_image_size(32)
    assert tiny.difference(model(pixels()), theirs(pixels()).pooler_output) <= BAR


def test_beit_tells_everything_itself(saved: Any, tmp_path: Path) -> None:
    folder, _ = saved("BeitModel")
    save_file(load_file(folder / "model.safetensors"), tmp_path / "bare.safetensors")
    c = load(tmp_path / "bare.safetensors").config
    assert (c.num_attention_heads, c.image_size, c.relative, c.pool) == (4, 32, "bias", "mean")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("DINOv3ViTModel", {"rope_theta": 10000.0}, "Expected rope_theta=100.0; config.json has 10000.0"),
        ("DINOv3ViTModel", {"key_bias": True}, "Expected key_bias=False"),
        ("DINOv3ViTModel, SwiGLU", {"hidden_act": "gelu"}, r"Expected hidden_act='silu' in a gated MLP"),
        ("Siglip2VisionModel", {"num_patches": 15}, "Expected num_patches to be a square"),
        ("Aimv2VisionModel", {"is_native": True}, "Expected is_native=False; config.json has True"),
        ("CLIPVisionModel", {"hidden_act": "mish"}, "Expected hidden_act to be one of"),
    ],
)
def test_what_a_config_cannot_mean_is_refused(
    name: str, change: dict[str, Any], message: str, saved: Any, tmp_path: Path
) -> None:
    folder, _ = saved(name)
    values = json.loads((folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CannotExpress, match=message):
        load(tmp_path)


def test_a_whole_model_states_only_what_differs_from_its_defaults(saved: Any, tmp_path: Path) -> None:
    """google/siglip-base-patch16-224 has an empty vision_config; the defaults of the class count."""
    folder, _ = saved("SiglipModel")
    values = json.loads((folder / "config.json").read_text())
    for name in ("hidden_act", "layer_norm_eps", "num_channels", "model_type"):
        del values["vision_config"][name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert load(tmp_path).config == load(folder).config


def test_one_table_for_all_layers_is_copied(saved: Any) -> None:
    folder, theirs = saved("BeitModel, one table for all layers")
    state = load(folder).state_dict()
    table = theirs.shared_position_bias.relative_position_bias_table
    assert all(torch.equal(state[f"blocks.{i}.msa.relative.table"], table) for i in range(2))


@pytest.mark.parametrize("name", [n for n in tiny.MODELS if any(w in n for w in ("clip", "siglip", "dinov3", "beit"))])
def test_files_are_recognised_by_one_dialect(name: str, tmp_path: Path) -> None:
    model = tiny.model(**tiny.MODELS[name])
    for dialect in tiny.expressible(model.config):
        names = DIALECTS[dialect].write(model.state_dict(), model.config)
        assert [row.name for row in DIALECTS.values() if row.recognises(names)] == [dialect]
        assert recognise(names).name == dialect


def test_clip_between_its_dialects_is_equal_in_timm(tmp_path: Path) -> None:
    """OpenAI's names, as timm reads them; text tensors are left out."""
    peer("timm")
    model = tiny.model(**tiny.CLIP)
    save(model, tmp_path / "hf", "clip-hf")
    convert(tmp_path / "hf", tmp_path / "a.pt", "clip")
    assert max(row.difference for row in compare(tmp_path / "a.pt")) <= BAR
    tensors = torch.load(tmp_path / "a.pt", weights_only=True)
    tensors |= {
        "token_embedding.weight": torch.zeros(3, 2),
        "logit_scale": torch.zeros(()),
        "ln_final.bias": torch.zeros(2),
    }
    torch.save(tensors, tmp_path / "whole.pt")
    whole = load(tmp_path / "whole.pt", num_attention_heads=4, hidden_act="quick_gelu")
    assert tiny.same_tensors(whole, model)
    with pytest.raises(ConfigError, match="do not tell hidden_act and num_attention_heads"):
        load(tmp_path / "whole.pt")


OPEN_CLIP: dict[str, Any] = {
    "model_cfg": {
        "embed_dim": 5,
        "quick_gelu": True,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 8, "mlp_ratio": 2.0, "patch_size": 8},
        "text_cfg": {"width": 16},
    },
    "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "resize_mode": "shortest"},
}


def test_open_clip_states_what_it_is(tmp_path: Path) -> None:
    model = tiny.model(**tiny.CLIP)
    save(model, tmp_path / "a.safetensors", "clip")
    save_file(load_file(tmp_path / "a.safetensors"), tmp_path / "open_clip_model.safetensors")
    for file in ("a.safetensors", "a.safetensors.vitkit.json"):
        (tmp_path / file).unlink()
    (tmp_path / "open_clip_config.json").write_text(json.dumps(OPEN_CLIP))
    found = load(tmp_path)
    assert found.config == model.config
    assert tiny.same_tensors(found, model)
    spec = found.input_spec
    assert (spec.mean, spec.resize, spec.interpolation, spec.crop) == ((0.1, 0.2, 0.3), "crop", "bicubic", 1.0)
    for change, message in (
        ({"attentional_pool": True}, "attentional_pool=True for images, which vitkit does not support"),
        ({"timm_model_name": "vit_base_patch16_siglip_224"}, "timm's 'vit_base_patch16_siglip_224'; load timm's own"),
    ):
        other = json.loads(json.dumps(OPEN_CLIP))
        other["model_cfg"]["vision_cfg"] |= change
        (tmp_path / "open_clip_config.json").write_text(json.dumps(other))
        with pytest.raises(CannotExpress, match=message):
            load(tmp_path)


def test_dinov3_between_its_dialects(tmp_path: Path) -> None:
    """Meta's files keep a bias for keys, which a mask makes zero, and the periods of the rotation."""
    model = tiny.model(**{**tiny.DINOV3, "hidden_act": "swiglu"})
    save(model, tmp_path / "dinov3.pth", "dinov3")
    tensors = torch.load(tmp_path / "dinov3.pth", weights_only=True)
    assert tensors["rope_embed.periods"].tolist() == pytest.approx([1.0, 10.0])
    assert {"blocks.0.mlp.w1.weight", "blocks.0.mlp.w2.weight", "blocks.0.mlp.w3.weight"} <= set(tensors)
    q, k, v = tensors["blocks.1.attn.qkv.bias_mask"].chunk(3)
    assert (q.all(), k.any(), v.all()) == (True, False, True)
    tensors["blocks.0.attn.qkv.bias"][32:64] = 7.0  # masked: it does not count
    (tmp_path / "dinov3.pth.vitkit.json").unlink()
    torch.save(tensors, tmp_path / "dinov3.pth")
    assert tiny.same_tensors(load(tmp_path / "dinov3.pth", image_size=32), model)
    del tensors["blocks.0.attn.qkv.bias_mask"]
    torch.save(tensors, tmp_path / "dinov3.pth")
    with pytest.raises(CannotExpress, match="Expected keys without a bias"):
        load(tmp_path / "dinov3.pth")
    tensors["rope_embed.periods"] *= 2
    tensors["blocks.0.attn.qkv.bias"][32:64] = 0.0
    torch.save(tensors, tmp_path / "dinov3.pth")
    with pytest.raises(CannotExpress, match="rotary positions, with base 100"):
        load(tmp_path / "dinov3.pth")


def test_vit_pytorch_is_refused_by_name(tmp_path: Path) -> None:
    library = peer("vit_pytorch")
    theirs = library.ViT(image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=4, mlp_dim=64)
    torch.save(theirs.state_dict(), tmp_path / "a.pth")
    with pytest.raises(CannotExpress, match=r"vit-pytorch.*LayerNorm on raw patches"):
        load(tmp_path / "a.pth")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "CLIPVisionModel",
            {"mean": (0.48145466, 0.4578275, 0.40821073), "resize": "crop", "interpolation": "bicubic"},
        ),
        ("SiglipVisionModel", {"mean": (0.5, 0.5, 0.5), "resize": "squash", "interpolation": "bicubic"}),
        ("DINOv3ViTModel", {"mean": (0.485, 0.456, 0.406), "resize": "squash", "interpolation": "bilinear"}),
        ("BeitModel", {"mean": (0.5, 0.5, 0.5), "resize": "squash", "interpolation": "bilinear"}),
    ],
)
def test_preprocessing_of_the_family(name: str, expected: dict[str, Any], saved: Any, tmp_path: Path) -> None:
    """Without a preprocessor_config.json the family's own is assumed, and said; with one, that counts."""
    folder, _ = saved(name)
    found = open_checkpoint(folder)
    assert {field: getattr(found.input_spec, field) for field in expected} == expected
    assert any("usual way is assumed" in note for note in found.notes)
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    spec = {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1], "size": {"height": 32, "width": 32}, "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(spec))
    stated = open_checkpoint(tmp_path)
    assert (stated.input_spec.mean, stated.input_spec.interpolation) == ((0.1, 0.2, 0.3), "bilinear")
    assert not any("is assumed" in note for note in stated.notes)


@pytest.mark.parametrize(
    "name", ["CLIPVisionModel", "SiglipVisionModel", "DINOv3ViTModel", "BeitForImageClassification"]
)
def test_a_new_head_and_two_steps(name: str, saved: Any) -> None:
    folder, _ = saved(name)
    model = load(folder, num_classes=3)
    assert "new and zero" in open_checkpoint(folder, num_classes=3).notes[-1]
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-2)
    before = model.state_dict()["blocks.0.mlp.fc1.weight"].clone()
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(model(pixels()), torch.tensor([0, 2]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.isfinite()
    assert not torch.equal(model.state_dict()["blocks.0.mlp.fc1.weight"], before)
