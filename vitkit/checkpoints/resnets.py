"""Files of ResNets (Big Transfer): RESNET_DIALECTS, and which model a file holds.

The words are those of DIALECTS, because the library is the same; the model decides which table applies. `google` is
Big Transfer's own `.npz`, `timm` its `resnetv2_*_bit`, `huggingface` the `BitModel` and `BitForImageClassification` of
transformers, whose base-model files have no `bit.` prefix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitkit.checkpoints.rules import CONV, SAME, Dialect, Form, Rule, Tensors
from vitkit.errors import CannotExpress, ConfigError, TensorMismatch
from vitkit.model.resnet_config import MOST_STAGES, ResNetConfig

Fields = dict[str, Any]
HEAD_KERNEL = Form(lambda kernel: kernel.flatten(0, 2).T, lambda w, c: (w.T[None, None],))  # [1, 1, F, K] -> [K, F]
HEAD_CONV = Form(lambda kernel: kernel.flatten(1), lambda w, c: (w[:, :, None, None],))  # [K, F, 1, 1] -> [K, F]


def _table(
    root: str,
    unit: str,
    conv: str,
    norm: str,
    projection: str,
    last: str,
    head: str,
    kinds: Mapping[str, str],
    kernel: Form = SAME,
    dense: Form = SAME,
) -> tuple[Rule, ...]:
    """Return the rules of a dialect.

    Args:
        root: name of the first convolution.
        unit: prefix of a unit; STAGE and STAGE+1 stand for the stage's number from 0 or from 1, {i} for the unit's.
        conv: name of a convolution inside a unit; NUMBER stands for 1 to 3, LETTER for a to c.
        norm: name of the GroupNorm before or after it.
        projection: name of the convolution of the shortcut inside a unit.
        last: name of the last GroupNorm.
        head: name of the head.
        kinds: the dialect's words for a kernel, and for the weight and bias of a norm.
        kernel: layout of a convolution's kernel.
        dense: layout of the head's kernel.
    """
    weight, scale, bias = kinds["kernel"], kinds["weight"], kinds["bias"]
    rules = [Rule("root.conv.weight", (f"{root}{weight}",), kernel)]
    for stage in range(MOST_STAGES):
        ours, theirs = f"stages.{stage}.{{i}}.", unit.replace("STAGE+1", str(stage + 1)).replace("STAGE", str(stage))
        for number, letter in zip("123", "abc", strict=True):
            at = [name.replace("NUMBER", number).replace("LETTER", letter) for name in (conv, norm)]
            rules += [
                Rule(f"{ours}conv{number}.weight", (f"{theirs}{at[0]}{weight}",), kernel),
                Rule(f"{ours}gn{number}.weight", (f"{theirs}{at[1]}{scale}",)),
                Rule(f"{ours}gn{number}.bias", (f"{theirs}{at[1]}{bias}",)),
            ]
        rules.append(Rule(f"{ours}projection.weight", (f"{theirs}{projection}{weight}",), kernel))
    return (
        *rules,
        Rule("norm.weight", (f"{last}{scale}",)),
        Rule("norm.bias", (f"{last}{bias}",)),
        Rule("head.weight", (f"{head}{weight}",), dense),
        Rule("head.bias", (f"{head}{kinds['head bias']}",)),
    )


def stem(
    root: str,
    root_norm: str,
    unit: str,
    conv: str,
    norm: str,
    projection: str,
    projection_norm: str,
    kinds: Mapping[str, str],
    kernel: Form = SAME,
) -> tuple[Rule, ...]:
    """Return the rules of a hybrid's stem, in a dialect of ViTs. The arguments are those of `_table`."""
    weight, scale, bias = kinds["kernel"], kinds["weight"], kinds["bias"]
    ours = "patch_embedding.stem."

    def group_norm(mine: str, theirs: str) -> list[Rule]:
        return [Rule(f"{mine}.weight", (f"{theirs}{scale}",)), Rule(f"{mine}.bias", (f"{theirs}{bias}",))]

    rules = [Rule(f"{ours}root.conv.weight", (f"{root}{weight}",), kernel), *group_norm(f"{ours}root.norm", root_norm)]
    for stage in range(MOST_STAGES):
        mine = f"{ours}stages.{stage}.{{i}}."
        theirs = unit.replace("STAGE+1", str(stage + 1)).replace("STAGE", str(stage))
        for number in "123":
            at = [name.replace("NUMBER", number) for name in (conv, norm)]
            rules.append(Rule(f"{mine}conv{number}.weight", (f"{theirs}{at[0]}{weight}",), kernel))
            rules += group_norm(f"{mine}gn{number}", f"{theirs}{at[1]}")
        rules.append(Rule(f"{mine}projection.weight", (f"{theirs}{projection}{weight}",), kernel))
        rules += group_norm(f"{mine}projection_norm", f"{theirs}{projection_norm}")
    return tuple(rules)


TORCH = {"kernel": ".weight", "weight": ".weight", "bias": ".bias", "head bias": ".bias"}
REFUSED = {r"running_(mean|var)$": "batch normalisation", r"num_batches_tracked$": "batch normalisation"}


def _without_prefix(tensors: Tensors, config: Any) -> Tensors:
    """Drop the prefix for a model without a head: it becomes a base-model file."""
    if config.num_classes:
        return tensors
    return {name.removeprefix("bit."): tensor for name, tensor in tensors.items()}


RESNET_DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            name="native",
            numerics="bit",
            suffixes=(".safetensors",),
            signature=("root.conv.weight", "stages.0.0.conv1.weight"),
            rules=_table(
                "root.conv", "stages.STAGE.{i}.", "convNUMBER", "gnNUMBER", "projection", "norm", "head", TORCH
            ),
            refused=REFUSED,
        ),
        Dialect(
            name="huggingface",
            numerics="timm",
            suffixes=("",),
            signature=("bit.embedder.convolution.weight", "bit.encoder.stages.0.layers.0.conv1.weight"),
            rules=_table(
                "bit.embedder.convolution",
                "bit.encoder.stages.STAGE.layers.{i}.",
                "convNUMBER",
                "normNUMBER",
                "downsample.conv",
                "bit.norm",
                "classifier.1",
                TORCH,
            ),
            respell=((r"^(?=(embedder|encoder|norm)\.)", "bit."),),
            finish=_without_prefix,
            refused=REFUSED,
        ),
        Dialect(
            name="timm",
            numerics="timm",
            suffixes=(".pth", ".pt", ".bin", ".safetensors"),
            signature=("stem.conv.weight", "stages.0.blocks.0.conv1.weight", "stages.0.blocks.0.norm3.weight"),
            rules=_table(
                "stem.conv",
                "stages.STAGE.blocks.{i}.",
                "convNUMBER",
                "normNUMBER",
                "downsample.conv",
                "norm",
                "head.fc",
                TORCH,
                dense=HEAD_CONV,
            ),
            refused=REFUSED,
        ),
        Dialect(
            name="google",
            numerics="bit",
            suffixes=(".npz",),
            signature=("resnet/root_block/standardized_conv2d/kernel", "resnet/group_norm/gamma"),
            rules=_table(
                "resnet/root_block/standardized_conv2d",
                "resnet/blockSTAGE+1/unit{i+1:02}/",
                "LETTER/standardized_conv2d",
                "LETTER/group_norm",
                "a/proj/standardized_conv2d",
                "resnet/group_norm",
                "resnet/head/conv2d",
                {"kernel": "/kernel", "weight": "/gamma", "bias": "/beta", "head bias": "/bias"},
                CONV,
                HEAD_KERNEL,
            ),
            refused=REFUSED,
        ),
    )
}


def check_resnet(config: ResNetConfig, dialect: str) -> None:
    """Refuse a ResNet that a dialect cannot hold.

    Args:
        config: the model's configuration.
        dialect: a row of DIALECTS.

    Raises:
        CannotExpress: names the property.
    """
    if dialect not in RESNET_DIALECTS:
        raise CannotExpress(
            f"This model is a ResNet, which the {dialect} dialect cannot express. Dialects that can: "
            f"{', '.join(RESNET_DIALECTS)}."
        )
    if config.num_groups != 32 and dialect in ("timm", "google"):
        raise CannotExpress(
            f"This model has {config.num_groups} groups per GroupNorm, but the {dialect} dialect always has 32. "
            f"Dialects that can express it: native, huggingface."
        )
    if not config.num_classes and dialect == "google":
        raise CannotExpress("This model has no head, which a google file of a ResNet always has. Use native or timm.")


def infer_resnet(state: Mapping[str, Tensor], dialect: Dialect, stated: Fields, given: Fields) -> ResNetConfig:
    """Infer the configuration of a file.

    Args:
        state: its tensors, by the model's names.
        dialect: supplies the numerics that nothing else states.
        stated: fields of ResNetConfig that are stated next to the weights.
        given: the user's overrides; `num_groups` counts as a fact.

    Raises:
        TensorMismatch: a tensor that every ResNet has is missing.
        ConfigError: the fields do not work together.
    """
    units = sorted({(int(m[1]), int(m[2])) for name in state if (m := re.match(r"stages\.(\d)\.(-?\d+)\.", name))})
    depths = tuple(sum(stage == s for s, _ in units) for stage in range(units[-1][0] + 1)) if units else ()
    complete = [(stage, unit) for stage, depth in enumerate(depths) for unit in range(depth)]
    if not units or units != complete or "root.conv.weight" not in state:
        raise TensorMismatch("The file lacks units of this ResNet: they must be numbered without gaps in every stage.")
    last = [state.get(f"stages.{stage}.0.conv3.weight") for stage in range(len(depths))]
    root = state["root.conv.weight"]
    if root.dim() != 4 or any(kernel is None or kernel.dim() != 4 for kernel in last):
        raise TensorMismatch(
            f"Expected convolutions with 4 axes; {dialect.in_file('root.conv.weight')!r} and the last "
            f"convolution of each stage's first unit do not all have them."
        )
    head = state.get("head.weight")
    shapes: Fields = {
        "depths": depths,
        "hidden_sizes": tuple(kernel.shape[0] for kernel in last if kernel is not None),
        "embedding_size": root.shape[0],
        "num_channels": root.shape[1],
        "num_classes": 0 if head is None else head.shape[0],
    }
    classes = stated.get("num_classes", shapes["num_classes"])
    if head is not None and classes != head.shape[0] and "num_classes" not in given:
        raise TensorMismatch(
            f"The file's head has {head.shape[0]} classes, but its JSON file states {classes}; "
            f"give num_classes= to replace the head, or correct the JSON file."
        )
    facts = {name: value for name, value in stated.items() if value is not None} | {
        name: given[name] for name in ("num_groups",) if name in given
    }
    try:
        return ResNetConfig(**{"standardisation": dialect.numerics, **facts, **shapes})
    except TypeError as error:
        raise ConfigError(f"The JSON next to the weights is not a valid configuration ({error}).") from None


def read_bit_config(values: Mapping[str, Any]) -> Fields:
    """Return the fields of ResNetConfig that transformers' config.json states.

    Raises:
        CannotExpress: a variant of BiT that the model does not have.
    """
    usual = {"layer_type": "preactivation", "hidden_act": "relu", "global_padding": None, "output_stride": 32}
    for name, value in usual.items():
        if values.get(name, value) != value:
            raise CannotExpress(
                f"Expected {name}={value!r} in config.json; got {values[name]!r}, which vitkit does not support in a "
                f"ResNet of its own."
            )
    fields = {name: values[name] for name in ("num_channels", "num_groups", "drop_path_rate") if name in values}
    if isinstance(values.get("id2label"), Mapping):
        fields["num_classes"] = len(values["id2label"])
    own = values.get("vitkit")
    if isinstance(own, Mapping):
        fields |= {name: own[name] for name in ("standardisation", "image_size") if name in own}
    return fields


def write_bit_config(config: ResNetConfig) -> Fields:
    """Return the architecture as transformers' BitConfig states it."""
    return {
        "architectures": ["BitForImageClassification" if config.num_classes else "BitModel"],
        "model_type": "bit",
        "num_channels": config.num_channels,
        "embedding_size": config.embedding_size,
        "hidden_sizes": list(config.hidden_sizes),
        "depths": list(config.depths),
        "layer_type": "preactivation",
        "hidden_act": "relu",
        "global_padding": None,
        "num_groups": config.num_groups,
        "drop_path_rate": config.drop_path_rate,
        "embedding_dynamic_padding": False,
        "output_stride": 32,
        "width_factor": 1,
    }
