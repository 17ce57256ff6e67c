"""Other libraries' JSON beside weights: transformers' config.json and preprocessor_config.json, timm's config.json.

`read_*` give fields of ViTConfig and InputSpec; `write_*` give what transformers reads. Fields for which transformers
has no word stand under `vitkit` in config.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from vitkit.errors import CannotExpress, ConfigError, UnreadableFile
from vitkit.model.config import InputSpec, ViTConfig, variant

SAME = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "initializer_range",
    "layer_norm_eps",
    "image_size",
    "patch_size",
    "num_channels",
    "qkv_bias",
    "pruned_heads",
    "chunk_size_feed_forward",
)
OURS = ("position_resize", "pad_input", "drop_path_rate")  # no word in transformers' ViTConfig
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
}
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
Fields = dict[str, Any]


def read_beside(config: Mapping[str, Any], preprocessor: Mapping[str, Any] | None) -> tuple[Fields, Fields]:
    """What the JSON files beside weights say.

    Args:
        config: the parsed config.json, transformers' or timm's.
        preprocessor: the parsed preprocessor_config.json, if there is one.

    Returns:
        Fields of ViTConfig, and fields of InputSpec.

    Raises:
        UnreadableFile: JSON of another kind.
        CannotExpress: an architecture that the model does not have.
    """
    try:
        return _read_timm(config) if "architecture" in config else _read_transformers(config, preprocessor)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UnreadableFile(f"config.json cannot be understood ({error!r}); correct or remove it.") from None


def _read_transformers(config: Mapping[str, Any], preprocessor: Mapping[str, Any] | None) -> tuple[Fields, Fields]:
    spec = read_preprocessor(preprocessor) if preprocessor is not None else {}
    if names := _labels(config.get("id2label")):
        spec["class_names"] = names
    own = config.get("vitkit")
    if isinstance(own, Mapping):
        spec |= {name: own[name] for name in ("channels", "backend") if name in own}
        exact = own.get("crop")  # a number of pixels does not tell the share that it came from
        if spec.get("resize") == "crop" and exact and _edge(spec["size"], exact) == _edge(spec["size"], spec["crop"]):
            spec["crop"] = exact
    return read_config(config), spec


def read_config(values: Mapping[str, Any]) -> Fields:
    """The fields of ViTConfig that transformers' config.json gives."""
    fields = {name: values[name] for name in SAME if values.get(name) is not None}
    if act := values.get("hidden_act"):
        if act not in ACTIVATIONS:
            raise CannotExpress(
                f"config.json has hidden_act={act!r}, which vitkit does not run; it has {', '.join(ACTIVATIONS)}."
            )
        fields["hidden_act"] = ACTIVATIONS[act]
    if values.get("pooler_act", "tanh") != "tanh":
        raise CannotExpress(f"config.json has pooler_act={values['pooler_act']!r}; vitkit's pre-logits are tanh's.")
    if str(values.get("model_type", "")).startswith("dinov2"):
        if values.get("use_swiglu_ffn"):
            raise CannotExpress("config.json has use_swiglu_ffn=true: a SwiGLU MLP, which vitkit does not run.")
        fields["intermediate_size"] = int(values.get("hidden_size", 768) * values.get("mlp_ratio", 4))
        fields |= {
            "layer_scale": float(values.get("layerscale_value", 1.0)),
            "drop_path_rate": values.get("drop_path_rate", 0.0),
        }
        if values["model_type"] == "dinov2_with_registers":
            fields["num_register_tokens"] = values.get("num_register_tokens", 4)
    if isinstance(values.get("id2label"), Mapping):
        fields["num_classes"] = len(values["id2label"])
    own = values.get("vitkit")
    if isinstance(own, Mapping):
        fields |= {name: own[name] for name in OURS if name in own}
    return fields


def _labels(id2label: Any) -> tuple[str, ...]:
    if not isinstance(id2label, Mapping):
        return ()
    try:
        ordered = {int(key): str(name) for key, name in id2label.items()}
    except ValueError:
        return ()
    names = tuple(ordered.get(i, "") for i in range(len(ordered)))
    made_up = all(name == f"LABEL_{i}" for i, name in enumerate(names))
    return () if made_up or "" in names else unique(names)


def unique(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names that differ: ImageNet has two cranes and two maillots, which get their number."""
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    return tuple(f"{name} ({i})" if name in twice else name for i, name in enumerate(names))


def _read_timm(values: Mapping[str, Any]) -> tuple[Fields, Fields]:
    cfg = values.get("pretrained_cfg") or values
    fields: Fields = {}
    with contextlib.suppress(ConfigError):  # an architecture without a row: heads are told from the width
        fields["num_attention_heads"] = variant(str(values["architecture"])).num_attention_heads
    if "num_classes" in values:
        fields["num_classes"] = values["num_classes"]
    spec: Fields = {}
    if size := cfg.get("input_size"):
        fields |= {"num_channels": size[0], "image_size": tuple(size[1:])}
        spec["size"] = tuple(size[1:])
    if values.get("global_pool") == "avg":
        fields["pool"] = "mean"
    if values.get("global_pool") == "map":
        raise CannotExpress("config.json has global_pool='map': a MAP head, which vitkit does not run.")
    spec |= {name: tuple(cfg[name]) for name in ("mean", "std") if name in cfg}
    if cfg.get("interpolation") in RESAMPLE.values():
        spec["interpolation"] = cfg["interpolation"]
    if cfg.get("crop_mode", "center") == "squash":
        spec |= {"resize": "squash", "crop": 1.0}
    elif "crop_pct" in cfg:
        spec |= {"resize": "crop", "crop": float(cfg["crop_pct"])}
    names = cfg.get("label_names") or values.get("label_names") or ()
    if names:
        spec["class_names"] = unique(tuple(str(name) for name in names))
    return fields, spec


def read_preprocessor(values: Mapping[str, Any]) -> Fields:
    """The fields of InputSpec that a preprocessor_config.json gives."""

    def sides(size: Any) -> tuple[int, int]:
        return (size["height"], size["width"]) if isinstance(size, Mapping) else (size, size)

    try:
        spec: Fields = {}
        if values.get("do_normalize", True):
            spec |= {name: tuple(values[f"image_{name}"]) for name in ("mean", "std") if f"image_{name}" in values}
        else:
            spec |= {"mean": (0.0,) * 3, "std": (1.0,) * 3}
        if values.get("resample") is not None:
            spec["interpolation"] = RESAMPLE[int(values["resample"])]
        if str(values.get("image_processor_type", "")).endswith("Fast"):
            spec["backend"] = "tensor"
        size = values.get("size")
        if values.get("do_center_crop") and values.get("crop_size"):
            spec["size"] = sides(values["crop_size"])
            edge = size.get("shortest_edge") or min(sides(size)) if isinstance(size, Mapping) else size
            spec |= {"resize": "crop", "crop": share(min(spec["size"]), int(edge or min(spec["size"])))}
        elif size and not (isinstance(size, Mapping) and "shortest_edge" in size):
            spec |= {"resize": "squash", "crop": 1.0, "size": sides(size)}
        elif size:
            edge = int(size["shortest_edge"])
            spec |= {"resize": "crop", "crop": 1.0, "size": (edge, edge)}
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableFile(
            f"preprocessor_config.json cannot be understood ({error!r}); correct or remove it."
        ) from None
    return spec


def _edge(size: tuple[int, int], crop: float) -> int:
    """The short side, in pixels, of what the centre is cut from."""
    return math.floor(min(size) / crop)


def share(size: int, edge: int) -> float:
    """The crop for which floor(size / crop) is exactly `edge`."""
    crop = min(size / edge, 1.0)
    return crop if math.floor(size / crop) == edge or crop == 1.0 else math.nextafter(crop, 0)


def write_config(config: ViTConfig, spec: InputSpec, dialect: str) -> Fields:
    """The config.json with which transformers loads the weights."""
    values: Fields = {name: getattr(config, name) for name in SAME if name != "pruned_heads"}
    values["hidden_act"] = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}[config.hidden_act]
    ours = {name: getattr(config, name) for name in OURS} | {
        "channels": spec.channels,
        "backend": spec.backend,
        "crop": spec.crop,
    }
    if config.pruned_heads:
        values["pruned_heads"] = {str(layer): list(heads) for layer, heads in config.pruned_heads}
    if not config.chunk_size_feed_forward:
        del values["chunk_size_feed_forward"]
    if dialect == "dinov2-hf":
        registers = config.num_register_tokens
        del values["intermediate_size"]
        values |= {
            "architectures": ["Dinov2WithRegistersModel" if registers else "Dinov2Model"],
            "model_type": "dinov2_with_registers" if registers else "dinov2",
            "mlp_ratio": config.intermediate_size // config.hidden_size,
            "layerscale_value": config.layer_scale,
            "drop_path_rate": config.drop_path_rate,
            "use_swiglu_ffn": False,
        }
        if registers:
            values["num_register_tokens"] = registers
    else:
        kind = "ViTForImageClassification" if config.num_classes else "ViTModel"
        values |= {
            "architectures": [kind],
            "model_type": "vit",
            "encoder_stride": config.patch_size,
            "pooler_act": "tanh",
            "pooler_output_size": config.hidden_size,
        }
        if config.num_classes:
            names = spec.class_names or tuple(f"LABEL_{i}" for i in range(config.num_classes))
            values |= {
                "id2label": {str(i): name for i, name in enumerate(names)},
                "label2id": {name: i for i, name in enumerate(names)},
            }
    return {**values, "vitkit": ours}


def write_preprocessor(spec: InputSpec) -> Fields:
    """The preprocessor_config.json with which transformers prepares images."""
    numbers = {name: number for number, name in RESAMPLE.items()}
    kind = "ViTImageProcessor" if spec.resize == "squash" else "BitImageProcessor"
    values: Fields = {
        "image_processor_type": kind + ("Fast" if spec.backend == "tensor" else ""),
        "do_resize": True,
        "resample": numbers[spec.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
    }
    height, width = spec.size
    box = {"height": height, "width": width}
    if spec.resize == "squash":
        return {**values, "size": box}
    return {
        **values,
        "size": {"shortest_edge": _edge(spec.size, spec.crop)},
        "do_center_crop": True,
        "crop_size": box,
        "do_convert_rgb": spec.channels == "rgb",
    }


def spec_of(config: ViTConfig, fields: Mapping[str, Any]) -> InputSpec:
    """An InputSpec for a model from fields that may have been made for three channels."""
    base = InputSpec.of(config)
    fields = {name: value for name, value in fields.items() if value is not None}
    channels = fields.get("channels", base.channels)
    for name in ("mean", "std"):
        given = tuple(fields.get(name, ()))
        if given and len(given) != config.num_channels:  # statistics of other channels: their mean, once a channel
            fields[name] = (round(sum(given) / len(given), 6),) * config.num_channels
            channels = base.channels
    return dataclasses.replace(base, **{**fields, "channels": channels})
