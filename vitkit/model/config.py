"""The configuration of a model: ViTConfig, InputSpec, the rows of Table 1, and the libraries' numerics.

Nothing here imports torch, so that names and numbers can be listed without delay.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from vitkit.errors import ConfigError, UnreadableFile, nearest, pick
from vitkit.model import checks
from vitkit.model.checks import pair
from vitkit.model.resnet_config import (
    STANDARDISED,
    STEM_PIXELS,
    ResNetConfig,
    Standardisation,
    resnet_name,
    resnet_of,
)

C = TypeVar("C", bound="ViTConfig | InputSpec")

# The rows of the tables in model/parts/; of each the first is the paper's.
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "selu", "silu", "swiglu"]
BlockKind = Literal["pre-norm", "res-post-norm", "parallel"]
NormKind = Literal["layer", "rms"]
NormPlace = Literal["final", "patches", "first", "queries", "heads", "hidden"]
Biasless = Literal["patches", "keys", "out", "mlp", "head"]
Stem = Literal["none", "r/4", "r14/32", "r26/32", "r50/16", "r50/32"]
Positions = Literal["1d", "none", "2d", "sincos"]
PositionsIn = Literal["first", "every", "shared"]
Relative = Literal["none", "offsets", "bias", "eva02", "dinov3", "axial", "perception", "perception-g", "mixed"]
ROTATIONS = ("eva02", "dinov3", "axial", "perception", "perception-g", "mixed")
Pool = Literal["cls", "mean", "cls+mean", "map", "distilled", "aimv2"]
GELUS = ("gelu", "gelu_tanh")  # what fused kernels, and the files of most libraries, can hold
ACTIVATION_ALIASES = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}  # Hugging Face's words
PositionRule = Literal["google", "timm-npz", "timm", "huggingface", "torchvision", "dinov2", "siglip2"]
Resize = Literal["squash", "crop"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Channels = Literal["rgb", "gray", "raw"]
Backend = Literal["pillow", "tensor"]

# A file holds the fields that differ from the defaults of its format. To change a default, raise FORMAT and keep the
# old one: FORMER_DEFAULTS[f] are the defaults that files up to format f were written with.
FORMAT = 1
FORMER_DEFAULTS: dict[int, dict[str, Any]] = {}


def _from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
    known = [f.name for f in fields(cls)]
    for key in values:
        if key not in known:
            raise ConfigError(f"{cls.__name__} has no field {key!r}{nearest(key, known) or '.'}")
    return cls(**values)


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _to_dict(self: C) -> dict[str, Any]:
    return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def also_called(**second: str) -> Any:
    """Let fields of a dataclass be given, and read, under a second name (a class decorator).

    Args:
        second: the field by its second name, such as `num_labels="num_classes"`.
    """

    def decorate(cls: type[C]) -> type[C]:
        init: Any = cls.__init__

        @functools.wraps(init)
        def renamed(self: C, **values: Any) -> None:
            for other, name in second.items():
                if other in values:
                    value = values.pop(other)
                    if values.setdefault(name, value) != value:
                        raise ConfigError(
                            f"{other} and {name} are two names for the same field; got {other}={value!r} and "
                            f"{name}={values[name]!r}. Give only {name}."
                        )
            init(self, **values)

        cls.__init__ = renamed  # type: ignore[method-assign, assignment]
        for other, name in second.items():
            setattr(cls, other, property(operator.attrgetter(name)))
        return cls

    return decorate


@also_called(num_labels="num_classes")
@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The architecture of a Vision Transformer; frozen, and validated when it is created.

    The first group of fields has Hugging Face's names and defaults; the second is what the model needs beyond them.

    Args:
        hidden_size: D, the width of a token.
        num_hidden_layers: L, the number of encoder blocks.
        num_attention_heads: h, the heads of each block; divides hidden_size.
        intermediate_size: width of the MLP's hidden layer.
        hidden_act: a row of `parts.layers.ACTIVATIONS`: `gelu` (exact), `gelu_tanh` (Google's approximation; also
            called gelu_new and gelu_pytorch_tanh), `quick_gelu`, `relu`, `selu`, `silu`, or `swiglu`, which is gated:
            the MLP's first layer is then twice as wide as intermediate_size.
        hidden_dropout_prob: dropout rate after dense layers and after adding positions.
        attention_probs_dropout_prob: dropout rate of the attention matrix A of Eq. 6.
        initializer_range: standard deviation of the truncated normal initialisation in `vitkit.huggingface`.
        layer_norm_eps: epsilon of every norm.
        image_size: in pixels, one number or (height, width).
        patch_size: P, the side of a patch in pixels.
        num_channels: C, the channels of an image.
        qkv_bias: whether U_qkv of Eq. 5 has a bias.
        num_classes: K, the number of outputs of the head (also accepted as `num_labels`); 0 means no head.
        chunk_size_feed_forward: number of tokens the MLP processes at once; 0 means all.
        pruned_heads: the removed heads, {layer: heads}; stored as a sorted tuple of (layer, heads).
        pool: what y of Eq. 4 is, a row of `parts.pools.POOLS`: the class token (`cls`), the mean of the patch tokens
            (`mean`), both side by side (`cls+mean`), attention pooling (`map`, SigLIP; `aimv2`, a plainer kind), or
            class and distillation token, each with its own head (`distilled`, DeiT; the first register is the
            distillation token).
        norm_after_pool: with `mean`, whether the LayerNorm comes after the mean (timm's fc_norm) or before it.
        class_token: whether there is a class token; without one, pool must be `mean`.
        pre_logits: whether the head has the paper's pre-training hidden layer (dense, tanh).
        layer_scale: initial value of the learned factor on each residual branch; None means no such factor.
        num_register_tokens: extra tokens after the class token, without positions (DINOv2).
        drop_path_rate: rate of stochastic depth in the last block; earlier blocks have proportionally lower rates.
        position_resize: rule for resizing E_pos to another image size, a row of `positions.RULES`.
        pad_input: whether images that are not a multiple of the patch size are padded with zeros (right and bottom).
        block: the order of norm, branch and sum, a row of `parts.blocks.BLOCKS`: `pre-norm` (the paper),
            `res-post-norm` (a norm after each branch) or `parallel` (attention and MLP side by side).
        norm: a row of `parts.layers.NORMS`: `layer` (the paper) or `rms`.
        norms: where norms are besides the two of each block: `final` (the paper), on the `patches`, before the
            `first` block, on `queries` and keys, on the `heads` before U_msa, on the `hidden` layer of the MLP.
        without_bias: the layers that have no bias: `patches`, `keys`, `out` (U_msa), `mlp`, `head`. For q, k and v
            together, use qkv_bias.
        stem: what pixels pass through before they are cut into patches, a row of `parts.stems.STEMS`: `none` (the
            paper's ViT), or a ResNet (its hybrids), such as `r50/16`; patch_size stays that in pixels of the image.
        standardisation: numerics of that ResNet, a row of `resnet.STANDARDISATIONS`: `google` (the authors' hybrids),
            `bit` or `timm`.
        positions: what is added to the tokens, a row of `parts.positions.POSITIONS`: `1d` (the paper), `none`, `2d`
            (appendix D.4) or `sincos` (fixed).
        positions_in: where they are added: before the `first` block (the paper), before `every` block, each with its
            own, or before every block, `shared` by all (Table 8).
        prefix_positions: with `1d`, whether E_pos has a row for the class token (the paper) and, in timm's files, rows
            for registers. DeiT III, FlexiViT and most of timm's models with registers have rows for patches only.
        relative: what positions do inside attention, a row of `parts.relative.RELATIVE`: `none` (the paper),
            `offsets` (appendix D.4), `bias` (BEiT), or a rotation of q and k: `eva02`, `dinov3`, `axial`,
            `perception`, `perception-g`, `mixed`.
        relative_grid: (rows, columns) of patches that a rotation was trained on; other grids are stretched to it. None
            means that they are not.
        pool_prefix: with `map`, whether class token and registers are pooled too.
        pool_heads: with `map`, its number of heads; None means num_attention_heads.
        pool_intermediate_size: with `map`, the width of its MLP's hidden layer; None means intermediate_size.
    """

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: Activation = "gelu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    image_size: int | tuple[int, int] = 224
    patch_size: int = 16
    num_channels: int = 3
    qkv_bias: bool = True
    num_classes: int = 1000
    chunk_size_feed_forward: int = 0
    pruned_heads: tuple[tuple[int, tuple[int, ...]], ...] = ()

    pool: Pool = "cls"
    norm_after_pool: bool = False
    class_token: bool = True
    pre_logits: bool = False
    layer_scale: float | None = None
    num_register_tokens: int = 0
    drop_path_rate: float = 0.0
    position_resize: PositionRule = "google"
    pad_input: bool = False

    block: BlockKind = "pre-norm"
    norm: NormKind = "layer"
    norms: tuple[NormPlace, ...] = ("final",)
    without_bias: tuple[Biasless, ...] = ()
    stem: Stem = "none"
    standardisation: Standardisation = "google"
    positions: Positions = "1d"
    positions_in: PositionsIn = "first"
    prefix_positions: bool = True
    relative: Relative = "none"
    relative_grid: tuple[int, int] | None = None
    pool_prefix: bool = False
    pool_heads: int | None = None
    pool_intermediate_size: int | None = None

    def __post_init__(self) -> None:
        checks.flags(self)
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "patch_size",
            "num_channels",
        ):
            checks.whole(name, getattr(self, name), 1)
        for name in ("num_classes", "chunk_size_feed_forward", "num_register_tokens"):
            checks.whole(name, getattr(self, name), 0)
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"):
            checks.number(name, getattr(self, name), 0, 1)
        checks.number("initializer_range", self.initializer_range, 0)
        checks.number("layer_norm_eps", self.layer_norm_eps, 0, open_low=True)
        if self.layer_scale is not None:
            checks.number("layer_scale", self.layer_scale, -math.inf)
        if isinstance(self.hidden_act, str):  # anything else, a function for instance, is refused by the next line
            object.__setattr__(self, "hidden_act", ACTIVATION_ALIASES.get(self.hidden_act, self.hidden_act))
        for name, rows in WORDS.items():
            checks.one_of(name, getattr(self, name), rows)
        for name, rows in SETS.items():
            object.__setattr__(self, name, checks.some_of(name, getattr(self, name), rows))
        checks.one_of("position_resize", self.position_resize, PositionRule)
        object.__setattr__(self, "image_size", checks.size("image_size", self.image_size))
        object.__setattr__(self, "pruned_heads", self._checked_pruned_heads())
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"num_attention_heads must divide hidden_size; {self.num_attention_heads} heads do not divide "
                f"{self.hidden_size}. Try {self._near_heads()} heads."
            )
        if not self.pad_input:
            for side in self.image_hw:
                if side % self.patch_size:
                    near = side // self.patch_size * self.patch_size, -(-side // self.patch_size) * self.patch_size
                    raise ConfigError(
                        f"image_size must be a multiple of patch_size; {side} pixels are not a multiple of "
                        f"{self.patch_size}. Use {' or '.join(str(n) for n in near if n)}, or pad_input=True in Python."
                    )
        self._check_pool()
        self._check_parts()

    def _check_pool(self) -> None:
        if not self.class_token and self.pool not in ("mean", "map", "aimv2"):
            raise ConfigError(f"pool={self.pool!r} needs a class token; use pool='mean' with class_token=False.")
        if self.pool == "distilled" and not self.num_register_tokens:
            raise ConfigError("pool='distilled' needs a distillation token; set num_register_tokens=1.")
        if self.norm_after_pool and self.pool != "mean":
            raise ConfigError(f"norm_after_pool needs pool='mean'; got pool={self.pool!r}.")
        if self.norm_after_pool and "final" not in self.norms:
            raise ConfigError("norm_after_pool needs the norm 'final' in norms: it says where that norm is.")
        of_map = ("pool_prefix", "pool_heads", "pool_intermediate_size")
        if self.pool != "map" and (given := [name for name in of_map if getattr(self, name)]):
            raise ConfigError(f"{given[0]} needs pool='map'; got pool={self.pool!r}.")
        for name in ("pool_heads", "pool_intermediate_size"):
            if getattr(self, name) is not None:
                checks.whole(name, getattr(self, name), 1)
        if self.pool_heads is not None and self.hidden_size % self.pool_heads:
            raise ConfigError(
                f"pool_heads must divide hidden_size; {self.pool_heads} heads do not divide {self.hidden_size}."
            )
        if self.pool in ("distilled", "cls+mean") and self.pre_logits:
            raise ConfigError(f"pre_logits needs features as wide as a token; pool={self.pool!r} gives two of them.")

    def _check_parts(self) -> None:
        checks.one_of("standardisation", self.standardisation, Standardisation)
        if self.patch_size % (pixels := STEM_PIXELS.get(self.stem, 1)):
            raise ConfigError(
                f"patch_size must be a multiple of {pixels} with stem={self.stem!r}, which makes one output of "
                f"{pixels} x {pixels} pixels; got {self.patch_size}."
            )
        if "keys" in self.without_bias and not self.qkv_bias:
            raise ConfigError("without_bias='keys' needs qkv_bias=True; with qkv_bias=False no key has a bias anyway.")
        if self.positions_in != "first" and (self.positions == "none" or self.block != "pre-norm"):
            raise ConfigError(
                f"positions_in={self.positions_in!r} needs positions and block='pre-norm'; got "
                f"positions={self.positions!r} and block={self.block!r}."
            )
        if not self.prefix_positions and (self.positions != "1d" or not self.num_prefix_tokens):
            raise ConfigError(
                f"prefix_positions=False needs positions='1d' and a class token or registers; got "
                f"positions={self.positions!r}, class_token={self.class_token} and "
                f"num_register_tokens={self.num_register_tokens}. Leave it out."
            )
        for name, value, part in (("positions", "2d", 2), ("positions", "sincos", 4)):
            if getattr(self, name) == value and self.hidden_size % part:
                raise ConfigError(f"{name}={value!r} needs a hidden_size divisible by {part}; got {self.hidden_size}.")
        if self.positions == "sincos" and self.hidden_size < 8:
            raise ConfigError(f"positions='sincos' needs a hidden_size of at least 8; got {self.hidden_size}.")
        if self.relative in ROTATIONS and self.head_size % 4:
            raise ConfigError(
                f"relative={self.relative!r} turns pairs of lanes by row and by column, so the width of a head, "
                f"hidden_size / num_attention_heads, must be divisible by 4; got {self.head_size}."
            )
        if self.relative == "bias" and self.num_prefix_tokens != 1:
            raise ConfigError("relative='bias' needs a class token and no registers, as in BEiT.")
        if self.relative_grid is not None:
            if self.relative not in ROTATIONS:
                raise ConfigError(f"relative_grid needs a rotation; got relative={self.relative!r}.")
            object.__setattr__(self, "relative_grid", pair(checks.size("relative_grid", self.relative_grid)))

    def _near_heads(self) -> int:
        divisors = [n for n in range(1, self.hidden_size + 1) if self.hidden_size % n == 0]
        return min(divisors, key=lambda n: abs(n - self.num_attention_heads))

    def _checked_pruned_heads(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        given = self.pruned_heads.items() if isinstance(self.pruned_heads, Mapping) else self.pruned_heads
        result = {}
        try:
            numbers = [(int(layer), tuple(sorted({int(head) for head in heads}))) for layer, heads in given]
        except (TypeError, ValueError):
            raise ConfigError(
                f"pruned_heads must map layers to lists of heads; got {checks.brief(self.pruned_heads)}."
            ) from None
        for layer, heads in numbers:
            if not 0 <= layer < self.num_hidden_layers:
                raise ConfigError(
                    f"pruned_heads must name layers from 0 to {self.num_hidden_layers - 1}; got layer {layer}."
                )
            if any(not 0 <= head < self.num_attention_heads for head in heads):
                raise ConfigError(
                    f"pruned_heads must name heads from 0 to {self.num_attention_heads - 1}; "
                    f"got {list(heads)} in layer {layer}."
                )
            if len(heads) == self.num_attention_heads:
                raise ConfigError(
                    f"pruned_heads must leave at least one head in each layer; it leaves no head in layer {layer}."
                )
            if heads:
                result[layer] = heads
        return tuple(sorted(result.items()))

    @property
    def image_hw(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return pair(self.image_size)

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of the grid of patches."""
        height, width = self.image_hw
        return -(-height // self.patch_size), -(-width // self.patch_size)

    @property
    def num_patches(self) -> int:
        """N = HW / P^2."""
        return math.prod(self.grid)

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches: the class token and the registers."""
        return self.class_token + self.num_register_tokens

    @property
    def width(self) -> int:
        """Number of features: D, or 2 D where the pool gives two tokens side by side."""
        return self.hidden_size * (2 if self.pool in ("cls+mean", "distilled") else 1)

    @property
    def head_size(self) -> int:
        """d = D / h, the width of one head."""
        return self.hidden_size // self.num_attention_heads

    def heads_of(self, layer: int) -> tuple[int, ...]:
        """Return the original numbers of the heads that `layer` still has."""
        pruned = dict(self.pruned_heads).get(layer, ())
        return tuple(head for head in range(self.num_attention_heads) if head not in pruned)

    def to_dict(self, *, whole: bool = False) -> dict[str, Any]:
        """Return the fields that differ from the defaults, and the format, as JSON-compatible values.

        Args:
            whole: return all fields, without the format (default: False).
        """
        if whole:
            return _to_dict(self)
        default = {f.name: f.default for f in fields(self)}
        return {"format": FORMAT} | {k: v for k, v in _to_dict(self).items() if getattr(self, k) != default[k]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ViTConfig:
        """Build from the result of `to_dict`, or from a whole config.json of the hub.

        A field that is not given has the default of the dictionary's format. The hub's files also hold fields that do
        not describe the architecture; these are ignored. In any other dictionary an unknown field is refused by name.

        Raises:
            ConfigError: an unknown field, or values that cannot work.
            UnreadableFile: the format is newer than this version.
        """
        values = dict(values)
        written = values.pop("format", 1)  # before formats were written, files held all fields
        if not isinstance(written, int) or not 1 <= written <= FORMAT:
            raise UnreadableFile(
                f"Expected a configuration of format 1 to {FORMAT}; got format {written!r}, which a newer version of "
                f"vitkit writes. Install the newest vitkit."
            )
        for last in sorted(FORMER_DEFAULTS):  # the oldest that still applies wins
            if written <= last:
                values = FORMER_DEFAULTS[last] | values
        if "model_type" in values or "architectures" in values:
            own = {field.name for field in fields(cls)} | {"num_labels"}
            labels = {"num_labels": len(values["id2label"])} if "id2label" in values else {}
            values = labels | {name: value for name, value in values.items() if name in own}
            values["num_classes"] = values.pop("num_labels", values.get("num_classes", 2))  # the hub's default is 2
        return _from_dict(cls, values)


# The fields of ViTConfig that name parts. `SETS` hold several rows each, or none.
WORDS: dict[str, Any] = {
    "hidden_act": Activation,
    "block": BlockKind,
    "norm": NormKind,
    "stem": Stem,
    "positions": Positions,
    "positions_in": PositionsIn,
    "relative": Relative,
    "pool": Pool,
}
SETS: dict[str, Any] = {"norms": NormPlace, "without_bias": Biasless}


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """The input that a model expects, and the names of its outputs. Stored in every checkpoint.

    Args:
        size: (height, width) of the input in pixels.
        resize: `squash` resizes both sides to `size`; `crop` resizes to size / crop, keeping the aspect ratio, and
            takes the centre.
        crop: share of the resized image's side that the centre crop keeps (timm's crop_pct); 1.0 with `squash`.
        interpolation: filter used for resizing.
        mean: subtracted from pixels in 0..1, one number per channel.
        std: divisor after that, one number per channel.
        channels: what images are converted to: `rgb`, `gray`, or `raw` (as many channels as `mean` has numbers).
        backend: `pillow`, or `tensor` (resizes like Hugging Face's default processor, within one level of Pillow).
        class_names: names of the outputs, in order; empty if unknown.
        thresholds: for a model that gives an image any number of labels, the probability from which each output counts
            as present, in order; each output is then a probability of its own (a sigmoid). Empty for a model that names
            one class per image (a softmax). Written to files only if it is not empty.
    """

    size: tuple[int, int] = (224, 224)
    resize: Resize = "squash"
    crop: float = 1.0
    interpolation: Interpolation = "bilinear"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    channels: Channels = "rgb"
    backend: Backend = "pillow"
    class_names: tuple[str, ...] = ()
    thresholds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", pair(checks.size("size", self.size)))
        for name in ("mean", "std", "class_names", "thresholds"):
            if not isinstance(values := getattr(self, name), Iterable) or isinstance(values, str):
                raise ConfigError(f"{name} must be a list; got {checks.brief(values)}.")
            object.__setattr__(self, name, tuple(values))
        if odd := [name for name in self.class_names if not isinstance(name, str)]:
            raise ConfigError(f"class_names must be text; got {checks.brief(odd[0])}.")
        checks.one_of("resize", self.resize, Resize)
        checks.one_of("interpolation", self.interpolation, Interpolation)
        checks.one_of("channels", self.channels, Channels)
        checks.one_of("backend", self.backend, Backend)
        checks.number("crop", self.crop, 0, 1, open_low=True)
        if self.resize == "squash" and self.crop != 1.0:
            raise ConfigError(f"crop must be 1.0 with resize='squash'; got {self.crop!r}. Use resize='crop'.")
        for value in self.mean:
            checks.number("mean", value, -math.inf)
        for value in self.std:
            checks.number("std", value, 0, open_low=True)
        wanted = {"rgb": 3, "gray": 1}.get(self.channels, len(self.mean))
        if len(self.mean) != wanted or len(self.std) != wanted:
            raise ConfigError(
                f"channels={self.channels!r} needs {wanted} numbers in mean and in std; "
                f"got {len(self.mean)} and {len(self.std)}."
            )
        if len(set(self.class_names)) != len(self.class_names):
            twice = next(n for n in self.class_names if self.class_names.count(n) > 1)
            raise ConfigError(f"class_names must all be different; {twice!r} occurs twice.")
        for value in self.thresholds:
            checks.number("thresholds", value, 0, 1)

    @property
    def several(self) -> bool:
        """Whether the model gives an image any number of labels, and not exactly one class."""
        return bool(self.thresholds)

    @property
    def of_images(self) -> InputSpec:
        """The part that is about images alone: without class names and thresholds."""
        return dataclasses.replace(self, class_names=(), thresholds=())

    @property
    def preprocessing(self) -> dict[str, Any]:
        """The same as JSON-compatible values."""
        return {name: value for name, value in self.to_dict().items() if name not in ("class_names", "thresholds")}

    @classmethod
    def of(cls, config: ViTConfig | ResNetConfig) -> InputSpec:
        """Return the default for a new model: its size and channels, and Google's preprocessing (squash, mean 0.5)."""
        count = config.num_channels
        channels: Channels = "rgb" if count == 3 else "gray" if count == 1 else "raw"
        return cls(size=config.image_hw, channels=channels, mean=(0.5,) * count, std=(0.5,) * count)

    def check(self, config: ViTConfig | ResNetConfig) -> InputSpec:
        """Return self if it fits `config`; otherwise raise a ConfigError that names both sides."""
        if len(self.mean) != config.num_channels:
            raise ConfigError(
                f"The model takes {config.num_channels} channels, but its InputSpec has "
                f"{len(self.mean)} ({self.channels}); set num_channels or the InputSpec's channels."
            )
        if self.class_names and len(self.class_names) != config.num_classes:
            raise ConfigError(
                f"The model has {config.num_classes} classes, but its InputSpec names "
                f"{len(self.class_names)}; give one name per class, or none."
            )
        if self.thresholds and len(self.thresholds) != config.num_classes:
            raise ConfigError(
                f"The model has {config.num_classes} labels, but its InputSpec has {len(self.thresholds)} thresholds; "
                f"give one per label."
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON-compatible values; `thresholds` only if there are some, so that files without them
        can be read by every version."""
        return {name: value for name, value in _to_dict(self).items() if name != "thresholds" or value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> InputSpec:
        """Build from the result of `to_dict`; refuse an unknown field by name."""
        return _from_dict(cls, values)


# What the public libraries compute with around the same weights (their defaults).
NUMERICS: dict[str, dict[str, Any]] = {
    "paper": {"layer_norm_eps": 1e-6, "hidden_act": "gelu", "position_resize": "google"},
    "google": {"layer_norm_eps": 1e-6, "hidden_act": "gelu_tanh", "position_resize": "google"},
    "timm": {"layer_norm_eps": 1e-6, "hidden_act": "gelu", "position_resize": "timm"},
    "huggingface": {"layer_norm_eps": 1e-12, "hidden_act": "gelu", "position_resize": "huggingface"},
    "torchvision": {"layer_norm_eps": 1e-6, "hidden_act": "gelu", "position_resize": "torchvision"},
    "dinov2": {"layer_norm_eps": 1e-6, "hidden_act": "gelu", "position_resize": "dinov2"},
    "clip": {"layer_norm_eps": 1e-5, "hidden_act": "quick_gelu", "position_resize": "huggingface"},
    "siglip": {"layer_norm_eps": 1e-6, "hidden_act": "gelu_tanh", "position_resize": "huggingface"},
    "dinov3": {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "position_resize": "huggingface"},
    "aimv2": {"layer_norm_eps": 1e-5, "hidden_act": "swiglu", "position_resize": "huggingface"},
    "beit": {"layer_norm_eps": 1e-12, "hidden_act": "gelu", "position_resize": "huggingface"},
    "course": {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "position_resize": "google"},
}


def _shape(width: int, depth: int, mlp: int, heads: int) -> dict[str, Any]:
    return {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": mlp, "num_attention_heads": heads}


# Table 1 of the paper (b, l, h), and sizes that its authors published later: "How to train your ViT?" (ti, s),
# "Scaling Vision Transformers" (g, G), "Getting ViT in Shape" (so400m).
SHAPES: dict[str, dict[str, Any]] = {
    "ti": _shape(192, 12, 768, 3),
    "s": _shape(384, 12, 1536, 6),
    "b": _shape(768, 12, 3072, 12),
    "l": _shape(1024, 24, 4096, 16),
    "h": _shape(1280, 32, 5120, 16),
    "so400m": _shape(1152, 27, 4304, 16),
    "g": _shape(1408, 40, 6144, 16),
    "G": _shape(1664, 48, 8192, 16),
}
PATCHES: dict[str, tuple[int, ...]] = {
    "ti": (16,),
    "s": (8, 14, 16, 32),
    "b": (8, 14, 16, 32),
    "l": (14, 16, 32),
    "h": (14, 16),
    "so400m": (14, 16),
    "g": (14,),
    "G": (14,),
}
# Section 3.1, "Hybrid Architecture", and "How to train your ViT?" (R, R26): the stem, the size, and the pixels per side
# of a token. R+ViT-Ti/16 has 32, whatever its name says: its patches are 8 x 8 outputs of 4 x 4 pixels each.
HYBRIDS: dict[str, tuple[Stem, str, int]] = {
    "r+vit-ti/16": ("r/4", "ti", 32),
    "r26+vit-s/32": ("r26/32", "s", 32),
    "r26+vit-b/32": ("r26/32", "b", 32),
    "r50+vit-b/16": ("r50/16", "b", 16),
    "r50+vit-b/32": ("r50/32", "b", 32),
    "r50+vit-l/16": ("r50/16", "l", 16),
    "r50+vit-l/32": ("r50/32", "l", 32),
}
VARIANTS: dict[str, ViTConfig] = {
    **{
        f"vit-{size}/{patch}": ViTConfig(patch_size=patch, **SHAPES[size], **NUMERICS["paper"])
        for size, patches in PATCHES.items()
        for patch in patches
    },
    **{
        name: ViTConfig(stem=stem, patch_size=patch, **SHAPES[size], **NUMERICS["paper"])
        for name, (stem, size, patch) in HYBRIDS.items()
    },
}

_TIMM_SIZES = {
    "tiny": "ti",
    "small": "s",
    "base": "b",
    "large": "l",
    "huge": "h",
    "so400m": "so400m",
    "giant": "g",
    "gigantic": "G",
}
_NAME = re.compile(r"(?:vit[-_ ]?)?([a-z]+|so400m)(?:[-_/ ](\d+))?", re.IGNORECASE)  # ViT-Base, B/16, vit_b_16
_HYBRID = re.compile(r"(r\d*)\+(?:vit[-_ ]?)?([a-z]+)[-_/ ](\d+)", re.IGNORECASE)  # R50+ViT-B/16, R+Ti_16
_TIMM_HYBRID = re.compile(r"(?:timm/)?vit_(\w+?)_(r\d*)_s(\d+)(?:_p8)?(?:_(\d+))?", re.IGNORECASE)
_TIMM_NAME = re.compile(r"(?:\w+/)?vit[-_](\w+?)[-_]patch(\d+)(?:[-_](\d+))?", re.IGNORECASE)


def check_fields(values: Mapping[str, Any], who: str, kind: Any = None) -> dict[str, Any]:
    """Return fields of a configuration by their own names; refuse an unknown one by name.

    Args:
        values: the fields; `num_labels` is accepted for num_classes.
        who: what takes them, for the message.
        kind: the class of the configuration (default: ViTConfig).
    """
    values = {"num_classes" if name == "num_labels" else name: value for name, value in values.items()}
    known = [f.name for f in fields(kind or ViTConfig)]
    for name in values:
        if name not in known:
            raise ConfigError(f"{who} has no field {name!r}{nearest(name, known) or '.'} It takes {', '.join(known)}.")
    return values


def variant(name: str, *, numerics: str | None = None, **overrides: Any) -> ViTConfig:
    """Return the configuration of a named variant.

    Args:
        name: a row of VARIANTS in any spelling (`vit-b/16`, `B/16`, `ViT-Base`, `vit_b_16`), or timm's or Hugging
            Face's name for the same architecture (`vit_base_patch16_384`, `google/vit-base-patch16-224`).
        numerics: a row of NUMERICS (default: `paper`, with eps 1e-6 and exact GELU).
        overrides: any field of ViTConfig.

    Raises:
        UnknownName: there is no such variant; lists those there are.
        ConfigError: the fields do not work together.
    """
    key, found = str(name), dict[str, Any]()
    if resnet_name(key):
        raise ConfigError(f"Expected a Vision Transformer, such as vit-b/16; {name!r} is a ResNet.")
    if match := _HYBRID.fullmatch(key):
        key = f"{match[1]}+vit-{_TIMM_SIZES.get(match[2].lower(), match[2])}/{match[3]}".lower()
    elif (match := _TIMM_HYBRID.fullmatch(key)) and match[1].lower() in _TIMM_SIZES:
        key = f"{match[2]}+vit-{_TIMM_SIZES[match[1].lower()]}/{match[3]}".lower()
        if match[4]:
            found["image_size"] = int(match[4])
    elif match := _TIMM_NAME.fullmatch(key):
        size = _TIMM_SIZES.get(match[1].lower())
        key = f"vit-{size}/{match[2]}" if size else key
        if match[3]:
            found["image_size"] = int(match[3])
    elif "patch" in key and "." in key:
        raise ConfigError(
            f"{name!r} is the name of trained weights, but create() makes new ones. Use vitkit.load('timm/{name}') "
            f"for the weights, or {key.split('.')[0]!r} for the architecture."
        )
    elif match := _NAME.fullmatch(key):
        size = {"g": "g", "G": "G"}.get(match[1]) or _TIMM_SIZES.get(match[1].lower(), match[1].lower())
        patch = match[2] or {"h": "14", "g": "14", "G": "14", "so400m": "14"}.get(size, "16")  # the paper's H has 14
        key = f"vit-{size}/{patch}" if size in SHAPES else key  # g and G differ only in case
    row = pick(VARIANTS, key, "variant")
    if row.stem != "none" and numerics in STANDARDISED and numerics != "paper":
        found["standardisation"] = STANDARDISED[numerics]
    changes = found | (pick(NUMERICS, numerics, "numerics") if numerics else {}) | overrides
    return dataclasses.replace(row, **check_fields(changes, "A model"))


def config_from_dict(values: Mapping[str, Any]) -> ViTConfig | ResNetConfig:
    """Build a configuration from the result of its `to_dict`; the fields tell a ResNet from a ViT."""
    return ResNetConfig.from_dict(values) if "depths" in values else ViTConfig.from_dict(values)


def variant_of(config: ViTConfig | ResNetConfig) -> str:
    """Return the name of the published variant that a model is, or an empty string."""
    if isinstance(config, ResNetConfig):
        return resnet_of(config)
    same = ("stem", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size")
    return next(
        (
            name
            for name, row in VARIANTS.items()
            if all(getattr(row, field) == getattr(config, field) for field in same)
        ),
        "",
    )
