"""The configuration of a ResNet: ResNetConfig, the rows of RESNETS, and the depths of a hybrid's stem.

Nothing here imports torch, so that names and numbers can be listed without delay.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from vitkit.errors import ConfigError, nearest, pick
from vitkit.model import checks

Standardisation = Literal["bit", "google", "timm"]


@dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """The architecture of a ResNet as Big Transfer has it; frozen, and validated when it is created.

    Where transformers' BitConfig has a field for the same thing, the name is the same.

    Args:
        depths: units in each stage.
        hidden_sizes: channels after each stage; a unit's 3 x 3 convolution has a quarter of them.
        embedding_size: channels after the first convolution.
        num_groups: groups of every GroupNorm.
        standardisation: numerics of convolutions and GroupNorm, a row of `resnet.STANDARDISATIONS`: `bit` (Big
            Transfer's code), `google` (the hybrids of the ViT authors) or `timm` (also transformers).
        image_size: in pixels, one number or (height, width); any other size works too.
        num_channels: C, the channels of an image.
        num_classes: K, the number of outputs of the head; 0 means no head.
        hidden_dropout_prob: dropout rate of the features before the head.
        drop_path_rate: rate of stochastic depth in the last unit; earlier units have proportionally lower rates.
    """

    depths: tuple[int, ...] = (3, 4, 6, 3)
    hidden_sizes: tuple[int, ...] = (256, 512, 1024, 2048)
    embedding_size: int = 64
    num_groups: int = 32
    standardisation: Standardisation = "bit"
    image_size: int | tuple[int, int] = 224
    num_channels: int = 3
    num_classes: int = 1000
    hidden_dropout_prob: float = 0.0
    drop_path_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("depths", "hidden_sizes"):
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or not 1 <= len(values) <= MOST_STAGES:
                raise ConfigError(
                    f"{name} must be one to {MOST_STAGES} whole numbers, one per stage; got {checks.brief(values)}."
                )
            for value in values:
                checks.whole(name, value, 1)
            object.__setattr__(self, name, tuple(values))
        for name in ("embedding_size", "num_groups", "num_channels"):
            checks.whole(name, getattr(self, name), 1)
        checks.whole("num_classes", self.num_classes, 0)
        for name in ("hidden_dropout_prob", "drop_path_rate"):
            checks.number(name, getattr(self, name), 0, 1)
        checks.one_of("standardisation", self.standardisation, Standardisation)
        object.__setattr__(self, "image_size", checks.size("image_size", self.image_size))
        if len(self.depths) != len(self.hidden_sizes):
            raise ConfigError(
                f"depths and hidden_sizes must have one number per stage each; got {len(self.depths)} and "
                f"{len(self.hidden_sizes)}."
            )
        for name, width, step in (
            ("embedding_size", self.embedding_size, self.num_groups),
            *(("hidden_sizes", width, 4 * self.num_groups) for width in self.hidden_sizes),
        ):
            if width % step:
                raise ConfigError(f"{name} must be a multiple of {step}, for {self.num_groups} groups; got {width}.")

    @property
    def image_hw(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return checks.pair(self.image_size)

    @property
    def pixels(self) -> int:
        """Side of the square of pixels that one place of the last feature map stands for: 32 for four stages."""
        return 2 ** (len(self.depths) + 1)

    @property
    def width(self) -> int:
        """Number of features: the channels after the last stage."""
        return self.hidden_sizes[-1]

    def to_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """Return all fields as JSON-compatible values, whatever `whole` says."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ResNetConfig:
        """Build from the result of `to_dict`; refuse an unknown field by name."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"ResNetConfig has no field {key!r}{nearest(key, known) or '.'}")
        return cls(**values)


MOST_STAGES = 4
# What comes before a hybrid's Transformer: units per stage of a ResNet. The number is the pixels per side of one of its
# outputs; R50/16 has the units of its fourth stage in the third (section 4.1). `r/4` is a first convolution alone.
STEM_DEPTHS: dict[str, tuple[int, ...]] = {
    "r/4": (),
    "r14/32": (1, 1, 1, 1),
    "r26/32": (2, 2, 2, 2),
    "r50/16": (3, 4, 9),
    "r50/32": (3, 4, 6, 3),
}
STEM_PIXELS = {name: int(name.rpartition("/")[2]) for name in STEM_DEPTHS}
STEM_CHANNELS = {name: 64 * 4 * 2 ** (len(depths) - 1) if depths else 64 for name, depths in STEM_DEPTHS.items()}
# Units per stage, from "Deep Residual Learning" (50, 101, 152) and "Identity Mappings" (200).
DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
# The ResNets of the paper's Tables 2, 3 and 6, and those that Big Transfer (arXiv 1912.11370) published.
RESNETS: dict[str, ResNetConfig] = {
    f"r{layers}x{times}": ResNetConfig(
        depths=DEPTHS[layers],
        hidden_sizes=tuple(64 * times * 2 ** (stage + 2) for stage in range(4)),
        embedding_size=64 * times,
    )
    for layers, times in ((50, 1), (50, 2), (50, 3), (101, 1), (101, 3), (152, 1), (152, 2), (152, 4), (200, 3))
}

_NAME = re.compile(r"(?:bit-)?(?:[sml]-)?r(\d+)x(\d+)|resnetv2_(\d+)x(\d+)_bit", re.IGNORECASE)
# The standardisation that goes with a row of `config.NUMERICS`; the rows of its own stand for themselves.
STANDARDISED: dict[str, Standardisation] = {
    "paper": "bit",
    "bit": "bit",
    "google": "google",
    "timm": "timm",
    "huggingface": "timm",
}


def resnet_name(name: str) -> str:
    """Return the row of RESNETS that a name means (`R50x1`, `BiT-M-R50x1`, timm's `resnetv2_50x1_bit`), or ""."""
    match = _NAME.fullmatch(name)
    return f"r{match[1] or match[3]}x{match[2] or match[4]}" if match else ""


def resnet_variant(name: str, *, numerics: str | None = None, **overrides: Any) -> ResNetConfig:
    """Return the configuration of a named ResNet.

    Args:
        name: a row of RESNETS in any spelling.
        numerics: a row of STANDARDISED (default: `bit`).
        overrides: any field of ResNetConfig.

    Raises:
        UnknownName: there is no such ResNet; lists those there are.
        ConfigError: the fields do not work together.
    """
    row = pick(RESNETS, resnet_name(name) or name, "ResNet")
    if numerics:
        overrides = {"standardisation": pick(STANDARDISED, numerics, "numerics"), **overrides}
    known = [f.name for f in fields(ResNetConfig)]
    for key in overrides:
        if key not in known:
            raise ConfigError(f"A ResNet has no field {key!r}{nearest(key, known) or '.'} It takes {', '.join(known)}.")
    return dataclasses.replace(row, **overrides)


def resnet_of(config: ResNetConfig) -> str:
    """Return the name of the published ResNet that a model is, or an empty string."""
    same = ("depths", "hidden_sizes", "embedding_size", "num_groups")
    return next(
        (name for name, row in RESNETS.items() if all(getattr(row, f) == getattr(config, f) for f in same)),
        "",
    )
