"""What each dialect can express: a property that its library has no place for is refused by name, never dropped."""

from __future__ import annotations

from collections.abc import Callable

from vitkit.errors import CannotExpress
from vitkit.model.config import ViTConfig

PROPERTIES: dict[str, Callable[[ViTConfig], bool]] = {  # what a model may be
    "no class token": lambda c: not c.class_token,
    "mean pooling beside a class token": lambda c: c.class_token and c.pool == "mean",
    "a LayerNorm after the mean": lambda c: c.norm_after_pool,
    "no head": lambda c: c.num_classes == 0,
    "a head": lambda c: c.num_classes > 0,
    "pre-logits without a head": lambda c: c.pre_logits and c.num_classes == 0,
    "pre-logits under a head": lambda c: c.pre_logits and c.num_classes > 0,
    "layer scale": lambda c: c.layer_scale is not None,
    "no layer scale": lambda c: c.layer_scale is None,
    "register tokens": lambda c: c.num_register_tokens > 0,
    "q, k, v without bias": lambda c: not c.qkv_bias,
    "pruned heads": lambda c: bool(c.pruned_heads),
    "a non-square image": lambda c: c.grid[0] != c.grid[1],
    "channels other than three": lambda c: c.num_channels != 3,
    "an MLP of no whole multiple": lambda c: c.intermediate_size % c.hidden_size != 0,
}

# What each dialect's library has a place for.
COLUMNS = ("native", "huggingface", "timm", "torchvision", "google", "dinov2", "dinov2-hf", "course")
EXPRESSES: dict[str, str] = {
    #                                      nat hf  tim tv  goo din dhf cou
    "no class token": " x   -   x   -   x   -   -   - ",
    "mean pooling beside a class token": " x   -   x   -   -   -   -   - ",
    "a LayerNorm after the mean": " x   -   x   -   -   -   -   - ",
    "no head": " x   x   x   -   x   x   x   - ",
    "a head": " x   x   x   x   x   -   -   x ",
    "pre-logits without a head": " x   x   -   -   x   -   -   - ",
    "pre-logits under a head": " x   -   -   x   x   -   -   - ",
    "layer scale": " x   -   x   -   -   x   x   - ",
    "no layer scale": " x   x   x   x   x   x   -   x ",
    "register tokens": " x   -   x   -   -   x   x   - ",
    "q, k, v without bias": " x   x   x   -   -   x   x   - ",
    "pruned heads": " x   x   -   -   -   -   -   - ",
    "a non-square image": " x   x   x   -   x   -   -   - ",
    "channels other than three": " x   x   x   -   x   x   x   x ",
    "an MLP of no whole multiple": " x   x   x   x   x   x   -   x ",
}


def can_express(name: str, dialect: str) -> bool:
    """Whether a dialect has a place for a property, a row of EXPRESSES."""
    return EXPRESSES[name].split()[COLUMNS.index(dialect)] == "x"


def cannot(config: ViTConfig, dialect: str) -> list[str]:
    """The properties of a model that a dialect has no place for."""
    return [name for name, has in PROPERTIES.items() if has(config) and not can_express(name, dialect)]


def check_expressible(config: ViTConfig, dialect: str) -> None:
    """Refuse what the dialect cannot hold.

    Args:
        config: the model's configuration.
        dialect: a row of DIALECTS.

    Raises:
        CannotExpress: names the properties and the dialects that have a place for all of them.
    """
    if names := cannot(config, dialect):
        fits = [other for other in COLUMNS if not cannot(config, other)]
        raise CannotExpress(
            f"The {dialect} dialect cannot express {', '.join(names)}, which this model has. "
            f"Dialects that can: {', '.join(fits)}."
        )
