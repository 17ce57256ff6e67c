"""Other libraries' JSON files: transformers' config.json and preprocessor_config.json, timm's, and open_clip's.

`read_*` return fields of ViTConfig and InputSpec; `write_*` return what transformers reads. Fields that transformers
does not have are kept under `vitkit` in config.json.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from vitkit.checkpoints import architectures, families
from vitkit.checkpoints.dinov2 import mlp_ratio, two_thirds
from vitkit.checkpoints.resnets import read_bit_config, write_bit_config
from vitkit.errors import CannotExpress, UnreadableFile
from vitkit.model.backbone import Config
from vitkit.model.checks import brief
from vitkit.model.config import InputSpec
from vitkit.model.resnet_config import ResNetConfig, resnet_name

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
OURS = ("position_resize", "pad_input", "drop_path_rate")  # not in transformers' ViTConfig
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "selu": "selu",
    "silu": "silu",
    "swish": "silu",
}
POOLS = {"token": "cls", "avg": "mean", "map": "map"}  # timm's global_pool
# Arguments of timm's models that the tensors or this file show, or that do not change what a trained model computes.
KNOWN_ARGUMENTS = {
    *(
        "num_heads",
        "global_pool",
        "num_classes",
        "in_chans",
        "img_size",
        "patch_size",
        "embed_dim",
        "depth",
        "mlp_ratio",
    ),
    *("class_token", "reg_tokens", "no_embed_class", "qkv_bias", "init_values", "fc_norm", "weight_init"),
    *("dynamic_img_size", "drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"),
}
SEVERAL = "multi_label_classification"  # transformers' problem_type for any number of labels per image
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
Fields = dict[str, Any]


def read_json(
    config: Mapping[str, Any], preprocessor: Mapping[str, Any] | None, notes: list[str]
) -> tuple[Fields, Fields]:
    """Read the JSON files in a checkpoint's folder.

    Args:
        config: the parsed config.json, transformers' or timm's, or open_clip's open_clip_config.json.
        preprocessor: the parsed preprocessor_config.json; None without one.
        notes: receives a sentence for each assumption.

    Returns:
        Fields of ViTConfig, and fields of InputSpec.

    Raises:
        UnreadableFile: the JSON is of another kind.
        CannotExpress: an architecture that the model does not have.
    """
    try:
        if config.get("model_type") == "bit":
            return read_bit_config(config), _read_transformers({**config, "hidden_act": None}, preprocessor)[1]
        if "architecture" in config:
            return _read_timm(config, notes)
        if "model_cfg" in config:
            return _read_open_clip(config)
        return _read_transformers(config, preprocessor)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise UnreadableFile(f"config.json cannot be understood ({brief(error)}); correct or remove it.") from None


def _read_transformers(config: Mapping[str, Any], preprocessor: Mapping[str, Any] | None) -> tuple[Fields, Fields]:
    spec = read_preprocessor(preprocessor) if preprocessor is not None else {}
    if names := _labels(config.get("id2label")):
        spec["class_names"] = names
    own = config.get("vitkit")
    if config.get("problem_type") == SEVERAL and isinstance(config.get("id2label"), Mapping):
        stated = own.get("thresholds") if isinstance(own, Mapping) else None
        spec["thresholds"] = tuple(stated or (0.5,) * len(config["id2label"]))
    if isinstance(own, Mapping):
        spec |= {name: own[name] for name in ("channels", "backend") if name in own}
        exact = own.get("crop")  # the edge in pixels does not determine the exact share
        if spec.get("resize") == "crop" and exact and _edge(spec["size"], exact) == _edge(spec["size"], spec["crop"]):
            spec["crop"] = exact
    return read_config(config), spec


def read_config(values: Mapping[str, Any]) -> Fields:
    """Return the fields of ViTConfig that transformers' config.json states."""
    inside = values.get("vision_config")
    if isinstance(inside, Mapping):  # a whole CLIP or SigLIP
        kind = {"model_type": families.VISION.get(str(values.get("model_type")), "")}
        values = {**values, **kind, **{name: value for name, value in inside.items() if name != "id2label"}}
    if values.get("model_type") in families.FAMILIES:
        fields = families.read(values, ACTIVATIONS)
        return fields | _classes_and_ours(values)
    fields = {name: values[name] for name in SAME if values.get(name) is not None}
    if (act := values.get("hidden_act")) is not None:
        if not isinstance(act, str) or act not in ACTIVATIONS:
            raise CannotExpress(
                f"Expected hidden_act to be one of {', '.join(ACTIVATIONS)}; config.json has {brief(act)}, which "
                f"vitkit does not support."
            )
        fields["hidden_act"] = ACTIVATIONS[act]
    if values.get("pooler_act", "tanh") != "tanh":
        raise CannotExpress(
            f"Expected pooler_act='tanh'; config.json has {values['pooler_act']!r}, which vitkit does not support."
        )
    if str(values.get("model_type", "")).startswith("dinov2"):
        fields["intermediate_size"] = int(values.get("hidden_size", 768) * values.get("mlp_ratio", 4))
        if values.get("use_swiglu_ffn"):
            fields["hidden_act"], fields["intermediate_size"] = "swiglu", two_thirds(fields["intermediate_size"])
        fields |= {
            "layer_scale": float(values.get("layerscale_value", 1.0)),
            "drop_path_rate": values.get("drop_path_rate", 0.0),
        }
        if values["model_type"] == "dinov2_with_registers":
            fields["num_register_tokens"] = values.get("num_register_tokens", 4)
    return fields | _classes_and_ours(values)


def _classes_and_ours(values: Mapping[str, Any]) -> Fields:
    """Return the number of classes that config.json names, and the fields that only vitkit writes into it."""
    fields = {"num_classes": len(values["id2label"])} if isinstance(values.get("id2label"), Mapping) else {}
    own = values.get("vitkit")
    if isinstance(own, Mapping):
        fields |= {name: own[name] for name in (*OURS, *families.KEPT) if name in own}
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
    """Append its index to each name that occurs twice, such as ImageNet's two cranes and two maillots."""
    count = Counter(names)
    return tuple(f"{name} ({i})" if count[name] > 1 else name for i, name in enumerate(names))


def _read_timm(values: Mapping[str, Any], notes: list[str]) -> tuple[Fields, Fields]:
    cfg, name = values.get("pretrained_cfg") or values, str(values["architecture"])
    fields = architectures.facts(name, values.get("num_features"))
    arguments = dict(values.get("model_args") or {})
    if "num_heads" in arguments:
        fields["num_attention_heads"] = arguments["num_heads"]
    if odd := sorted(set(arguments) - KNOWN_ARGUMENTS):
        raise CannotExpress(
            f"config.json changes the architecture {name!r} by model_args {', '.join(odd)}, which vitkit does not "
            f"support."
        )
    if "hidden_act" not in fields and not resnet_name(name):
        notes.append(
            f"config.json names the architecture {name!r}, which vitkit does not know; timm's usual numerics are "
            f"assumed (exact GELU, layer_norm_eps 1e-6)."
        )
    if "num_classes" in values:
        fields["num_classes"] = values["num_classes"]
    spec: Fields = {}
    if size := cfg.get("input_size"):
        side = arguments.get("img_size", tuple(size[1:]))
        spec["size"] = fields["image_size"] = (side, side) if isinstance(side, int) else tuple(side)
        fields["num_channels"] = arguments.get("in_chans", size[0])
    pool = arguments.get("global_pool", values.get("global_pool"))
    if pool is not None and pool not in POOLS:
        raise CannotExpress(f"config.json has global_pool={pool!r}: a way of pooling that vitkit does not support.")
    if pool is not None and fields.get("pool") != "distilled":  # whose global_pool is token, too
        fields["pool"] = POOLS[pool]
    if fields.get("pool") != "map":
        fields = {name: value for name, value in fields.items() if not name.startswith("pool_")}
    spec |= {name: tuple(cfg[name]) for name in ("mean", "std") if name in cfg}
    if cfg.get("interpolation") in RESAMPLE.values():
        spec["interpolation"] = cfg["interpolation"]
    mode, crop = cfg.get("crop_mode", "center"), float(cfg.get("crop_pct", 1.0))
    if mode == "squash":
        spec |= {"resize": "squash", "crop": 1.0}
        if crop != 1.0:
            notes.append(f"timm resizes to {crop:g} of the input size and crops; vitkit resizes to the input size.")
    elif mode == "center" and "crop_pct" in cfg:
        spec |= {"resize": "crop", "crop": crop}
    names = cfg.get("label_names") or values.get("label_names") or ()
    if names:
        spec["class_names"] = unique(tuple(str(name) for name in names))
    return fields, spec


def _read_open_clip(values: Mapping[str, Any]) -> tuple[Fields, Fields]:
    """Read open_clip's open_clip_config.json: the image half."""
    model, prepared = values["model_cfg"], values.get("preprocess_cfg") or {}
    vision = model["vision_cfg"]
    if "timm_model_name" in vision:
        raise CannotExpress(
            f"The image half of this file is timm's {vision['timm_model_name']!r}; load timm's own file of it."
        )
    known = {"layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size", "ls_init_value", "patch_dropout"}
    plain = {"pool_type": "tok", "pos_embed_type": "learnable", "output_tokens": vision.get("output_tokens")}
    if odd := [name for name in vision if name not in known and vision[name] and vision[name] != plain.get(name)]:
        raise CannotExpress(
            f"open_clip_config.json has {odd[0]}={vision[odd[0]]!r} for images, which vitkit does not support."
        )
    width = vision.get("width", 768)
    fields = {
        "hidden_size": width,
        "num_hidden_layers": vision.get("layers", 12),
        "num_attention_heads": width // vision.get("head_width", 64),
        "intermediate_size": int(width * vision.get("mlp_ratio", 4.0)),
        "patch_size": vision.get("patch_size", 16),
        "image_size": vision.get("image_size", 224),
        "hidden_act": "quick_gelu" if model.get("quick_gelu") else "gelu",
        "layer_norm_eps": 1e-5,
        "layer_scale": vision.get("ls_init_value"),
    }
    side = fields["image_size"]
    fields["image_size"] = side if isinstance(side, int) else tuple(side)
    spec: Fields = {name: tuple(prepared[name]) for name in ("mean", "std") if name in prepared}
    spec["interpolation"] = prepared.get("interpolation", "bicubic")
    spec |= {"resize": "squash" if prepared.get("resize_mode") == "squash" else "crop", "crop": 1.0}
    return fields, spec


def read_preprocessor(values: Mapping[str, Any]) -> Fields:
    """Return the fields of InputSpec that a preprocessor_config.json states."""

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
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UnreadableFile(
            f"preprocessor_config.json cannot be understood ({brief(error)}); correct or remove it."
        ) from None
    return spec


def _edge(size: tuple[int, int], crop: float) -> int:
    """Return the short side, in pixels, of the resized image before the centre crop."""
    return math.floor(min(size) / crop)


def share(size: int, edge: int) -> float:
    """Return the crop for which floor(size / crop) is exactly `edge`."""
    crop = min(size / edge, 1.0)
    return crop if math.floor(size / crop) == edge or crop == 1.0 else math.nextafter(crop, 0)


def write_config(config: Config, spec: InputSpec, dialect: str) -> Fields:
    """Return the config.json with which transformers loads the weights."""
    if isinstance(config, ResNetConfig):
        mine = {"standardisation": config.standardisation, "image_size": _plain_size(config.image_size)}
        return write_bit_config(config) | _names(config, spec) | {"vitkit": mine | _of_spec(spec)}
    ours = {name: getattr(config, name) for name in OURS} | _of_spec(spec)
    labels = {} if "head" in config.without_bias else _names(config, spec)  # CLIP's projection has no classes
    if dialect in families.WRITTEN:
        ours |= {name: getattr(config, name) for name in families.KEPT}
        return {**families.write(config, dialect), **labels, "vitkit": ours}
    values: Fields = {name: getattr(config, name) for name in SAME if name != "pruned_heads"}
    values["hidden_act"] = {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.hidden_act, config.hidden_act)
    if config.pruned_heads:
        values["pruned_heads"] = {str(layer): list(heads) for layer, heads in config.pruned_heads}
    if not config.chunk_size_feed_forward:
        del values["chunk_size_feed_forward"]
    if dialect == "dinov2-hf":
        registers, gated = config.num_register_tokens, config.hidden_act == "swiglu"
        del values["intermediate_size"]
        kind = "Dinov2WithRegisters" if registers else "Dinov2"
        values |= {
            "architectures": [kind + ("ForImageClassification" if config.num_classes else "Model")],
            "model_type": "dinov2_with_registers" if registers else "dinov2",
            "hidden_act": "gelu" if gated else values["hidden_act"],
            "mlp_ratio": mlp_ratio(config),
            "layerscale_value": config.layer_scale,
            "drop_path_rate": config.drop_path_rate,
            "use_swiglu_ffn": gated,
        }
        if registers:
            values["num_register_tokens"] = registers
    else:
        kind = "IJepa" if not config.class_token else "DeiT" if config.num_register_tokens else "ViT"
        end = "ForImageClassification" if config.num_classes else "Model"
        values |= {
            "architectures": [kind + end + ("WithTeacher" if config.pool == "distilled" else "")],
            "model_type": kind.lower(),
            "encoder_stride": config.patch_size,
            "pooler_act": "tanh",
            "pooler_output_size": config.hidden_size,
        }
    return {**values, **labels, "vitkit": ours}


def _of_spec(spec: InputSpec) -> Fields:
    """Return what a preprocessor_config.json cannot say exactly, and the thresholds of labels."""
    thresholds = {"thresholds": list(spec.thresholds)} if spec.several else {}
    return {"channels": spec.channels, "backend": spec.backend, "crop": spec.crop, **thresholds}


def _plain_size(size: int | tuple[int, int]) -> int | list[int]:
    return size if isinstance(size, int) else list(size)


def _names(config: Config, spec: InputSpec) -> Fields:
    """Return the class names as transformers states them; nothing for a model without a head."""
    if not config.num_classes:
        return {}
    names = spec.class_names or tuple(f"LABEL_{i}" for i in range(config.num_classes))
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        **({"problem_type": SEVERAL} if spec.several else {}),
    }


def write_preprocessor(spec: InputSpec) -> Fields:
    """Return the preprocessor_config.json with which transformers prepares images."""
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
