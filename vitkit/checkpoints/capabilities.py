"""What each dialect can express. A property its library has no place for is refused by name, never dropped."""

from __future__ import annotations

from collections.abc import Callable

from vitkit.errors import CannotExpress
from vitkit.model.config import GELUS, ViTConfig
from vitkit.model.parts.fit import EVERY_PART, Takes, unfit

ALL = "native huggingface timm torchvision google dinov2 dinov2-hf course"

# A property that a model may have: how to tell, and the dialects that have a place for it.
PROPERTIES: dict[str, tuple[Callable[[ViTConfig], bool], str]] = {
    "no class token": (lambda c: not c.class_token, "native timm google"),
    "mean pooling with a class token": (lambda c: c.class_token and c.pool == "mean", "native timm"),
    "a LayerNorm after the mean": (lambda c: c.norm_after_pool, "native timm"),
    "no head": (lambda c: c.num_classes == 0, "native huggingface timm google dinov2 dinov2-hf"),
    "a head": (lambda c: c.num_classes > 0, "native huggingface timm torchvision google course"),
    "pre-logits without a head": (lambda c: c.pre_logits and c.num_classes == 0, "native huggingface google"),
    "pre-logits with a head": (lambda c: c.pre_logits and c.num_classes > 0, "native torchvision google"),
    "layer scale": (lambda c: c.layer_scale is not None, "native timm dinov2 dinov2-hf"),
    "no layer scale": (
        lambda c: c.layer_scale is None,
        "native huggingface timm torchvision google dinov2 course",
    ),
    "register tokens": (lambda c: c.num_register_tokens > 0, "native timm dinov2 dinov2-hf"),
    "q, k, v without bias": (lambda c: not c.qkv_bias, "native huggingface timm dinov2 dinov2-hf"),
    "pruned heads": (lambda c: bool(c.pruned_heads), "native huggingface"),
    "a non-square image": (lambda c: c.grid[0] != c.grid[1], "native huggingface timm google"),
    "channels other than three": (
        lambda c: c.num_channels != 3,
        "native huggingface timm google dinov2 dinov2-hf course",
    ),
    "an MLP width that is not a multiple of the model's width": (
        lambda c: c.intermediate_size % c.hidden_size != 0,
        "native huggingface timm torchvision google dinov2 course",
    ),
}

# The parts that dialects have a place for, besides the paper's.
PLAIN: Takes = {"hidden_act": GELUS, "pool": ("mean",)}
PARTS: dict[str, Takes] = {
    "native": EVERY_PART,
    "timm": {
        "hidden_act": ("gelu_tanh", "quick_gelu", "swiglu"),
        "block": EVERY_PART["block"],
        "norm": EVERY_PART["norm"],
        "norms": EVERY_PART["norms"],
        "without_bias": EVERY_PART["without_bias"],
        "positions": ("none",),
        "relative": tuple(row for row in EVERY_PART["relative"] if row != "offsets"),
        "pool": ("mean", "map", "distilled"),
    },
    "huggingface": {**PLAIN, "hidden_act": ("gelu_tanh", "quick_gelu", "relu", "selu", "silu")},
}


def can_express(name: str, dialect: str) -> bool:
    """Whether a dialect has a place for a property (a row of PROPERTIES)."""
    return dialect in PROPERTIES[name][1].split()


def cannot(config: ViTConfig, dialect: str) -> list[str]:
    """List the properties of a model that a dialect has no place for."""
    names = [name for name, (has, _) in PROPERTIES.items() if has(config) and not can_express(name, dialect)]
    return names + unfit(config, PARTS.get(dialect, PLAIN))


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
