"""What each dialect can express. A property its library has no place for is refused by name, never dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from vitkit.checkpoints.dinov2 import mlp_ratio
from vitkit.errors import CannotExpress
from vitkit.model.config import GELUS, SETS, WORDS, ViTConfig
from vitkit.model.parts.fit import EVERY_PART, Takes, unfit

ALL = (
    "native huggingface timm torchvision google dinov2 dinov2-hf course "
    + "clip clip-hf siglip-hf dinov3 dinov3-hf beit-hf aimv2-hf"
)

ANY: tuple[Any, ...] = ("any",)  # any value

# A property that a model may have: how to tell, and the dialects that have a place for it.
PROPERTIES: dict[str, tuple[Callable[[ViTConfig], bool], str]] = {
    "no class token": (lambda c: not c.class_token, "native huggingface timm google"),
    "mean pooling with a class token": (lambda c: c.class_token and c.pool == "mean", "native timm"),
    "a LayerNorm after the mean": (lambda c: c.norm_after_pool, "native timm"),
    "no head": (lambda c: c.num_classes == 0, "native huggingface timm google dinov2 dinov2-hf"),
    "a head": (lambda c: c.num_classes > 0, "native huggingface timm torchvision google course dinov2-hf"),
    "pre-logits without a head": (lambda c: c.pre_logits and c.num_classes == 0, "native huggingface google"),
    "pre-logits with a head": (lambda c: c.pre_logits and c.num_classes > 0, "native torchvision google"),
    "layer scale": (lambda c: c.layer_scale is not None, "native timm dinov2 dinov2-hf"),
    "no layer scale": (
        lambda c: c.layer_scale is None,
        "native huggingface timm torchvision google dinov2 course",
    ),
    "register tokens": (lambda c: c.num_register_tokens > 1, "native timm dinov2 dinov2-hf"),
    "one register token": (lambda c: c.num_register_tokens == 1, "native huggingface timm dinov2 dinov2-hf"),
    "q, k, v without bias": (lambda c: not c.qkv_bias, "native huggingface timm dinov2 dinov2-hf"),
    "pruned heads": (lambda c: bool(c.pruned_heads), "native huggingface"),
    "a non-square image": (lambda c: c.grid[0] != c.grid[1], "native huggingface timm google"),
    "channels other than three": (
        lambda c: c.num_channels != 3,
        "native huggingface timm google dinov2 dinov2-hf course",
    ),
    "an MLP width that transformers' DINOv2 does not have": (
        lambda c: mlp_ratio(c) is None,
        "native huggingface timm torchvision google dinov2 course",
    ),
}

# The parts that dialects have a place for, besides the paper's.
PLAIN: Takes = {"hidden_act": GELUS, "pool": ("mean",)}
OTHER_ACTS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "selu", "silu")
PARTS: dict[str, Takes] = {
    "native": EVERY_PART,
    "timm": {
        "hidden_act": ("gelu_tanh", "quick_gelu", "swiglu"),
        "block": EVERY_PART["block"],
        "norm": EVERY_PART["norm"],
        "norms": EVERY_PART["norms"],
        "without_bias": EVERY_PART["without_bias"],
        "stem": EVERY_PART["stem"],
        "positions": ("none",),
        "relative": tuple(row for row in EVERY_PART["relative"] if row != "offsets"),
        "pool": ("mean", "map", "distilled"),
    },
    "google": {**PLAIN, "stem": EVERY_PART["stem"]},
    "huggingface": {"hidden_act": OTHER_ACTS, "pool": ("mean", "distilled")},
    "dinov2": {**PLAIN, "hidden_act": (*GELUS, "swiglu")},
    "dinov2-hf": {"hidden_act": (*GELUS, "swiglu"), "pool": ("cls+mean",)},
}
# Dialects of one family each: what its models are, field by field. A field that is not listed has the paper's row.
_FIXED: dict[str, tuple[Any, ...]] = {
    **{name: (get_args(rows)[0],) for name, rows in WORDS.items()},
    **{"norms": (("final",),), "without_bias": ((),), "qkv_bias": (True,), "class_token": (True,)},
    **{"norm_after_pool": (False,), "pre_logits": (False,), "layer_scale": (None,), "num_register_tokens": (0,)},
    **{"pruned_heads": ((),), "relative_grid": (None,), "pool_prefix": (False,), "pool_heads": (None,)},
    **{"pool_intermediate_size": (None,), "pad_input": (False,)},
}
_CLIP: dict[str, tuple[Any, ...]] = {
    "hidden_act": OTHER_ACTS,
    "norms": (("final", "first"),),
    "without_bias": (("patches",), ("patches", "head")),
}
_DINOV3: dict[str, tuple[Any, ...]] = {
    **{"hidden_act": ("gelu", "swiglu"), "positions": ("none",), "relative": ("dinov3",), "layer_scale": ANY},
    **{"num_register_tokens": ANY, "without_bias": (("keys",),), "num_classes": (0,)},
}
FAMILIES: dict[str, dict[str, tuple[Any, ...]]] = {
    "clip": {**_CLIP, "layer_scale": ANY},
    "clip-hf": _CLIP,
    "siglip-hf": {"hidden_act": OTHER_ACTS, "pool": ("map", "mean"), "class_token": (False,)},
    "dinov3": _DINOV3,
    "dinov3-hf": _DINOV3,
    "beit-hf": {
        **{"hidden_act": OTHER_ACTS, "positions": ("none", "1d"), "relative": ("bias", "none"), "layer_scale": ANY},
        **{"pool": ("cls", "mean"), "norm_after_pool": ANY, "without_bias": (("keys",),)},
        "norms": (("final",), ()),  # data2vec's base model has none
    },
}
FAMILIES["aimv2-hf"] = {
    **{"hidden_act": ("swiglu",), "norm": ("rms",), "norms": (("final", "patches"),), "pool": ("aimv2", "mean")},
    **{"qkv_bias": (False,), "class_token": (False,), "without_bias": (("out", "mlp"), ("out", "mlp", "head"))},
}
# What no single field says: dialect -> a property, and how to tell.
ALSO: dict[str, dict[str, Callable[[ViTConfig], bool]]] = {
    "clip": {
        "a head that is not a projection": lambda c: bool(c.num_classes) and "head" not in c.without_bias,
        "a non-square image": lambda c: c.grid[0] != c.grid[1],
    },
    "siglip-hf": {
        "a head on attention pooling": lambda c: c.pool == "map" and c.num_classes > 0,
        "mean pooling without a head": lambda c: c.pool == "mean" and c.num_classes == 0,
        "a non-square image": lambda c: c.grid[0] != c.grid[1],
    },
    "dinov3": {"no layer scale": lambda c: c.layer_scale is None},
    "beit-hf": {
        "mean pooling after the norm": lambda c: c.pool == "mean" and not c.norm_after_pool and bool(c.norms),
        "norms=no final, with a head or a class token": lambda c: (
            not c.norms and (c.num_classes > 0 or c.pool == "cls")
        ),
        "a non-square image": lambda c: c.grid[0] != c.grid[1],
    },
}
ALSO["aimv2-hf"] = ALSO["clip"]
ALSO["dinov2-hf"] = {
    "a head that is not on pool=cls+mean": lambda c: c.num_classes > 0 and c.pool != "cls+mean",
    "pool=cls+mean without a head": lambda c: c.num_classes == 0 and c.pool == "cls+mean",
}
ALSO["huggingface"] = {
    "pool=distilled without a head": lambda c: c.num_classes == 0 and c.pool == "distilled",
    "pre-logits without a class token": lambda c: c.pre_logits and not c.class_token,
    "a register token without a class token": lambda c: c.num_register_tokens > 0 and not c.class_token,
}
ALSO |= {"clip-hf": ALSO["clip"], "dinov3-hf": ALSO["dinov3"]}


def can_express(name: str, dialect: str) -> bool:
    """Whether a dialect has a place for a property (a row of PROPERTIES)."""
    return dialect in PROPERTIES[name][1].split()


def cannot(config: ViTConfig, dialect: str) -> list[str]:
    """List the properties of a model that a dialect has no place for."""
    if dialect in FAMILIES:
        return _unlike(config, dialect)
    names = [name for name, (has, _) in PROPERTIES.items() if has(config) and not can_express(name, dialect)]
    return names + unfit(config, PARTS.get(dialect, PLAIN)) + _also(config, dialect)


def _unlike(config: ViTConfig, dialect: str) -> list[str]:
    """List what a model has that models of a family do not have."""
    names = ["pruned heads"] * bool(config.pruned_heads)
    for name, allowed in (_FIXED | FAMILIES[dialect]).items():
        value = getattr(config, name)
        if allowed is ANY or value in allowed or name == "pruned_heads":
            continue
        if name in SETS:
            more = [row for row in value if not any(row in rows for rows in allowed)]
            less = [row for row in allowed[0] if row not in value and all(row in rows for rows in allowed)]
            names += [f"{name}={row}" for row in more] + [f"{name}=no {row}" for row in less]
        else:
            names.append(f"{name}={value}")
    return names + _also(config, dialect)


def _also(config: ViTConfig, dialect: str) -> list[str]:
    return [what for what, has in ALSO.get(dialect, {}).items() if has(config)]


def check_expressible(config: ViTConfig, dialect: str) -> None:
    """Refuse a model that a dialect cannot hold.

    Args:
        config: the model's configuration.
        dialect: a row of DIALECTS.

    Raises:
        CannotExpress: names the properties, and the dialects that have a place for all of them.
    """
    if names := cannot(config, dialect):
        fits = [other for other in ALL.split() if not cannot(config, other)]
        raise CannotExpress(
            f"This model has {', '.join(names)}, which the {dialect} dialect cannot express. "
            f"Dialects that can: {', '.join(fits)}."
        )
