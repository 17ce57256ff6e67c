"""Which dialect a file is of, its other spellings, and what is refused by name."""

from __future__ import annotations

import re

import pytest
import torch

from tests.checkpoints import tiny
from vitkit.checkpoints import DIALECTS, from_dialect, recognise, to_dialect
from vitkit.errors import CannotExpress, TensorMismatch, UnknownDialect
from vitkit.model.config import ViTConfig

Tensors = dict[str, torch.Tensor]
CONFIGS = {
    "dinov2": tiny.MODELS["dinov2"],
    "dinov2-hf": tiny.MODELS["registers"],
    "clip": tiny.MODELS["clip projected"],
    "clip-hf": tiny.MODELS["clip projected"],
    "siglip-hf": tiny.MODELS["siglip"],
    "dinov3": tiny.MODELS["dinov3"],
    "dinov3-hf": tiny.MODELS["dinov3"],
    "beit-hf": tiny.MODELS["beit classifier"],
    "aimv2-hf": tiny.MODELS["aimv2"],
}
EXAMPLES = {
    name: to_dialect(tiny.model(**fields), name)
    for name, fields in {
        "native": {},
        "huggingface": {},
        "timm": {},
        "torchvision": {},
        "google": {},
        "course": {},
        **CONFIGS,
    }.items()
}


def config(dialect: str, **more: object) -> ViTConfig:
    return tiny.config(**{**CONFIGS.get(dialect, {}), **more})


@pytest.mark.parametrize("label", tiny.MODELS)
def test_exactly_one_dialect_recognises_each_file(label: str) -> None:
    model = tiny.model(**tiny.MODELS[label])
    for dialect in tiny.expressible(model.config):
        tensors = to_dialect(model, dialect)
        assert [row.name for row in DIALECTS.values() if row.recognises(tensors)] == [dialect]


def test_every_dialect_is_covered() -> None:
    assert set(EXAMPLES) == set(DIALECTS)


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    result = {}
    for name, tensor in tensors.items():
        for pattern, replacement in pairs:
            name = re.sub(pattern, replacement, name)
        result[name] = tensor
    return result


V5 = (
    (r"^vit\.encoder\.layer\.", "vit.layers."),
    (r"attention\.attention\.query", "attention.q_proj"),
    (r"attention\.attention\.key", "attention.k_proj"),
    (r"attention\.attention\.value", "attention.v_proj"),
    (r"attention\.output\.dense", "attention.o_proj"),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"(layers\.\d+)\.output\.dense", r"\1.mlp.fc2"),
)
OTHERS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "transformers 5, in memory": ("huggingface", V5),
    "transformers 5, base model": ("huggingface", (*V5, (r"^vit\.", ""))),
    "torchvision, older": ("torchvision", ((r"mlp\.0\.", "mlp.linear_1."), (r"mlp\.3\.", "mlp.linear_2."))),
    "google, opt/target": ("google", ((r"^", "opt/target/"),)),
    "DINO, inside a full checkpoint": ("timm", ((r"^", "backbone."), (r"^backbone\.head", "head"))),
    "Dinov2 under a wrapper": ("dinov2-hf", ((r"^", "dinov2_with_registers."),)),
}


@pytest.mark.parametrize("label", OTHERS)
def test_other_spellings(label: str) -> None:
    dialect, pairs = OTHERS[label]
    tensors = renamed(EXAMPLES[dialect], *pairs)
    assert set(tensors) != set(EXAMPLES[dialect])
    assert recognise(tensors).name == dialect
    state = from_dialect(tensors, dialect, config(dialect))
    expected = from_dialect(EXAMPLES[dialect], dialect, config(dialect))
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_base_model_file_has_no_prefix() -> None:
    tensors = to_dialect(tiny.model(num_classes=0), "huggingface")
    assert not any(name.startswith("vit.") for name in tensors)
    assert all(name.startswith(("vit.", "classifier.")) for name in EXAMPLES["huggingface"])


@pytest.mark.parametrize(
    ("dialect", "extra", "what"),
    [
        ("timm", "blocks.0.attn.gate.weight", "gated attention"),
        ("timm", "rel_pos_bias.relative_position_bias_table", "relative positions"),
        ("google", "params/MAPHead_0/probe", "MAP head"),
        ("timm", "blocks.0.post_norm1.weight", "post-norm"),
        ("timm", "patch_embed.backbone.layer1.0.conv1.weight", "stem other than the authors' ResNet"),
    ],
)
def test_other_architectures_are_refused_by_name(dialect: str, extra: str, what: str) -> None:
    tensors = {**EXAMPLES[dialect], extra: torch.zeros(1, 1, 32)}
    with pytest.raises(CannotExpress, match=what) as error:
        from_dialect(tensors, dialect, config(dialect))
    assert repr(extra) in str(error.value)


def test_the_slide_form_of_the_course_is_refused() -> None:
    tensors = {name: t for name, t in EXAMPLES["course"].items() if not name.startswith("classifier.")}
    tensors |= {"classifier.0.weight": torch.zeros(5, 32), "classifier.0.bias": torch.zeros(5)}
    assert recognise(tensors).name == "course"
    with pytest.raises(CannotExpress, match=r"without the LayerNorm of Eq\. 4"):
        from_dialect(tensors, "course", tiny.config())


def test_mask_token_is_accounted_for_but_unused() -> None:
    assert "mask_token" in EXAMPLES["dinov2"]
    _, _, unused = DIALECTS["dinov2"].read(EXAMPLES["dinov2"])
    assert unused == ["mask_token"]


def test_full_mae_file() -> None:
    """Its decoder is named as unused, and its mask token does not make it a DINOv2 file."""
    tensors = {
        **to_dialect(tiny.model(num_classes=0), "timm"),
        "mask_token": torch.zeros(1, 1, 32),
        "decoder_pos_embed": torch.zeros(1, 17, 16),
        "decoder_blocks.0.norm1.weight": torch.zeros(16),
    }
    assert [row.name for row in DIALECTS.values() if row.recognises(tensors)] == ["timm"]
    _, _, unused = DIALECTS["timm"].read(tensors)
    assert unused == ["mask_token", "decoder_pos_embed", "decoder_blocks.0.norm1.weight"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_both_sides_of_the_account(dialect: str) -> None:
    tensors = EXAMPLES[dialect]
    _, _, unused = DIALECTS[dialect].read(tensors)
    for name in (name for name in tensors if name not in unused):
        less = {other: t for other, t in tensors.items() if other != name}
        with pytest.raises(TensorMismatch, match="lacks"):
            from_dialect(less, dialect, config(dialect))
    with pytest.raises(TensorMismatch, match=r"something\.else"):
        from_dialect({**tensors, "something.else": torch.zeros(1)}, dialect, config(dialect))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_wrong_shapes_are_named(dialect: str) -> None:
    with pytest.raises(TensorMismatch, match=r"Expected .* to have shape \[.*\] \(.*\); got \["):
        from_dialect(EXAMPLES[dialect], dialect, config(dialect, intermediate_size=96))
    name = next(name for name in EXAMPLES[dialect] if re.search("query|qkv|q_proj|in_proj", name))
    with pytest.raises(TensorMismatch):
        from_dialect({**EXAMPLES[dialect], name: torch.zeros(7)}, dialect, config(dialect))


def test_a_tensor_twice_is_refused() -> None:
    tensors = {**EXAMPLES["torchvision"], "encoder.layers.encoder_layer_0.mlp.linear_1.bias": torch.zeros(64)}
    with pytest.raises(TensorMismatch, match="twice"):
        from_dialect(tensors, "torchvision", tiny.config())


def test_unknown_names() -> None:
    with pytest.raises(UnknownDialect, match=r"huggingface.*Its names: 'conv1.weight', 'bn1.weight'\."):
        recognise(["conv1.weight", "bn1.weight"])
    with pytest.raises(UnknownDialect, match="has none of them"):
        recognise([])
