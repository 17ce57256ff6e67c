"""transformers' classes beyond ViT and DINOv2: what their config.json says of a model, both ways.

FAMILIES is keyed by `model_type`. The config of a whole CLIP or SigLIP holds that of its vision half, which states only
what differs from the class's defaults, so these stand here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vitkit.checkpoints.dinov3 import THETA
from vitkit.checkpoints.siglip import second
from vitkit.errors import CannotExpress
from vitkit.model.config import ViTConfig

Fields = dict[str, Any]
VIT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
IMAGE = {"image_size": 224, "num_channels": 3}
KEPT = ("initializer_range", "hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps")
# Names that classes give to fields of ViTConfig.
RENAMED = {"attention_dropout": "attention_probs_dropout_prob", "rms_norm_eps": "layer_norm_eps"}
# transformers wants the config of a text tower even where a file has none.
_TEXT = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "swiglu": "silu"}


@dataclass(frozen=True)
class Family:
    """The classes of one `model_type`.

    Args:
        dialect: how their files are spelled.
        defaults: what their config.json may leave out.
        read: config.json with its defaults -> fields of ViTConfig that do not have the same meaning and name there.
        write: a configuration -> config.json.
    """

    dialect: str
    defaults: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], Fields] = lambda values: {}
    write: Callable[[ViTConfig], Fields] = field(default=lambda config: {})


def read(values: Mapping[str, Any], activations: Mapping[str, str]) -> Fields:
    """Return the fields of ViTConfig that a config.json of one of the FAMILIES states.

    Args:
        values: config.json; of a whole CLIP or SigLIP, its `vision_config`.
        activations: transformers' names -> ours.
    """
    family = FAMILIES[values["model_type"]]
    values = {**family.defaults, **{name: value for name, value in values.items() if value is not None}}
    names = {**{name: name for name in (*VIT, *IMAGE, *KEPT, "patch_size", "drop_path_rate")}, **RENAMED}
    fields = {ours: values[theirs] for theirs, ours in names.items() if theirs in values}
    if isinstance(fields.get("image_size"), list):
        fields["image_size"] = tuple(fields["image_size"])
    if values["hidden_act"] not in activations:
        raise CannotExpress(
            f"Expected hidden_act to be one of {', '.join(activations)}; config.json has {values['hidden_act']!r}, "
            f"which vitkit does not support."
        )
    fields["hidden_act"] = activations[values["hidden_act"]]
    return {**fields, "position_resize": "huggingface", **family.read(values)}


def write(config: ViTConfig, dialect: str) -> Fields:
    """Return the config.json with which transformers reads a model of one of the FAMILIES."""
    return FAMILIES[WRITTEN[dialect](config)].write(config)


def _numbers(config: ViTConfig, *more: str) -> Fields:
    same = {name: getattr(config, name) for name in (*VIT, *IMAGE, "patch_size", "layer_norm_eps", *more)}
    return same | {"hidden_act": ACTIVATIONS.get(config.hidden_act, config.hidden_act)}


def _refuse(values: Mapping[str, Any], **expected: Any) -> None:
    for name, value in expected.items():
        if values.get(name, value) != value:
            raise CannotExpress(
                f"Expected {name}={value!r}; config.json has {values[name]!r}, which vitkit does not support."
            )


def _gated(values: Mapping[str, Any]) -> Fields:
    """Return the activation of a gated MLP; only SiLU makes it a SwiGLU."""
    if values["hidden_act"] not in ("silu", "swish"):
        raise CannotExpress(
            f"Expected hidden_act='silu' in a gated MLP (SwiGLU); config.json has {values['hidden_act']!r}, which "
            f"vitkit does not support."
        )
    return {"hidden_act": "swiglu"}


def _clip_written(config: ViTConfig) -> Fields:
    named = {"architectures": ["CLIPVisionModelWithProjection"], "projection_dim": config.num_classes}
    return {
        **_numbers(config, "initializer_range"),
        "model_type": "clip_vision_model",
        "attention_dropout": config.attention_probs_dropout_prob,
        **(named if config.num_classes else {"architectures": ["CLIPVisionModel"]}),
    }


def _siglip2(values: Mapping[str, Any]) -> Fields:
    side = math.isqrt(values["num_patches"])
    if side * side != values["num_patches"]:
        raise CannotExpress(f"Expected num_patches to be a square; config.json has {values['num_patches']}.")
    return {"position_resize": "siglip2", "image_size": side * values["patch_size"]}


def _siglip_written(config: ViTConfig) -> Fields:
    """Return the vision model's config, or one that has it inside: transformers' classifiers need a whole SigLIP's."""
    kind, own = ("Siglip2", "siglip2") if second(config) else ("Siglip", "siglip")
    vision: Fields = {
        **_numbers(config),
        "model_type": f"{own}_vision_model",
        "attention_dropout": config.attention_probs_dropout_prob,
        "vision_use_head": config.pool == "map",
    }
    if second(config):
        vision["num_patches"] = config.num_patches
    if not config.num_classes:
        return {**vision, "architectures": [f"{kind}VisionModel"]}
    return {
        "architectures": [f"{kind}ForImageClassification"],
        "model_type": own,
        "vision_config": vision,
        "text_config": {**_TEXT, "model_type": f"{own}_text_model"},
    }


def _dinov3(values: Mapping[str, Any]) -> Fields:
    _refuse(values, rope_theta=THETA, key_bias=False, query_bias=True, value_bias=True)
    return {"layer_scale": float(values["layerscale_value"]), **(_gated(values) if values["use_gated_mlp"] else {})}


def _dinov3_written(config: ViTConfig) -> Fields:
    return {
        **_numbers(config, "initializer_range"),
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        "attention_dropout": config.attention_probs_dropout_prob,
        "layerscale_value": config.layer_scale,
        "drop_path_rate": config.drop_path_rate,
        "num_register_tokens": config.num_register_tokens,
        "use_gated_mlp": config.hidden_act == "swiglu",
        "proj_bias": "out" not in config.without_bias,
        "mlp_bias": "mlp" not in config.without_bias,
        "rope_theta": THETA,
    }


def _beit(values: Mapping[str, Any]) -> Fields:
    """BEiT and data2vec: the tensors' names tell which norms, pool and tables of positions there are."""
    scale = float(values["layer_scale_init_value"])
    return {"layer_scale": scale if scale > 0 else None}


def _beit_written(config: ViTConfig) -> Fields:
    kind = "BeitForImageClassification" if config.num_classes else "BeitModel"
    return {
        **_numbers(config, "initializer_range", "hidden_dropout_prob", "attention_probs_dropout_prob"),
        "architectures": [kind if config.norms else "Data2VecVisionModel"],
        "model_type": "beit" if config.norms else "data2vec-vision",
        "drop_path_rate": config.drop_path_rate,
        "layer_scale_init_value": config.layer_scale or 0,
        "use_absolute_position_embeddings": config.positions == "1d",
        "use_relative_position_bias": config.relative == "bias",
        "use_mean_pooling": config.pool == "mean",
    }


def _aimv2(values: Mapping[str, Any]) -> Fields:
    _refuse(values, is_native=False, qkv_bias=False, mlp_bias=False)
    return _gated(values)


def _aimv2_written(config: ViTConfig) -> Fields:
    values = _numbers(config, "initializer_range") | {
        "model_type": "aimv2_vision_model",
        "attention_dropout": config.attention_probs_dropout_prob,
        "use_head": config.pool == "aimv2",
    }
    values["rms_norm_eps"] = values.pop("layer_norm_eps")
    if not config.num_classes:
        return {**values, "architectures": ["Aimv2VisionModel"]}
    return {
        "architectures": ["Aimv2Model"],
        "model_type": "aimv2",
        "projection_dim": config.num_classes,
        "vision_config": values,
        "text_config": {**_TEXT, "model_type": "aimv2_text_model"},
    }


FAMILIES: dict[str, Family] = {
    "clip_vision_model": Family(
        "clip-hf",
        {**VIT, **IMAGE, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
        write=_clip_written,
    ),
    "siglip_vision_model": Family(
        "siglip-hf",
        {**VIT, **IMAGE, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
        write=_siglip_written,
    ),
    "siglip2_vision_model": Family(
        "siglip-hf",
        {**VIT, "num_channels": 3, "patch_size": 16, "num_patches": 256}
        | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
        _siglip2,
        _siglip_written,
    ),
    "dinov3_vit": Family(
        "dinov3-hf",
        {**VIT, **IMAGE, "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "patch_size": 16}
        | {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "layerscale_value": 1.0, "use_gated_mlp": False},
        _dinov3,
        _dinov3_written,
    ),
    "aimv2_vision_model": Family(
        "aimv2-hf",
        {**VIT, **IMAGE, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24}
        | {"num_attention_heads": 8, "patch_size": 14, "hidden_act": "silu", "rms_norm_eps": 1e-5},
        _aimv2,
        _aimv2_written,
    ),
    **dict.fromkeys(
        ("beit", "data2vec-vision"),
        Family(
            "beit-hf",
            {**VIT, **IMAGE, "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-12}
            | {"layer_scale_init_value": 0.1, "drop_path_rate": 0.1},
            _beit,
            _beit_written,
        ),
    ),
}
# A whole model's type -> that of its vision half, for configs that do not repeat it there.
VISION = {name: f"{name}_vision_model" for name in ("clip", "siglip", "siglip2", "aimv2")}
# dialect -> the row of FAMILIES that a model is written as.
WRITTEN: dict[str, Callable[[ViTConfig], str]] = {
    "clip-hf": lambda config: "clip_vision_model",
    "siglip-hf": lambda config: "siglip2_vision_model" if second(config) else "siglip_vision_model",
    "dinov3-hf": lambda config: "dinov3_vit",
    "aimv2-hf": lambda config: "aimv2_vision_model",
    "beit-hf": lambda config: "beit" if config.norms else "data2vec-vision",
}
