"""Infer the model that a file holds from its tensors' shapes, what its JSON files state, and what the user adds.

In order, weakest first: the dialect's numerics, the shapes, hints in the names, what is stated next to the weights.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoints.rules import Dialect
from vitkit.errors import CannotExpress, ConfigError, TensorMismatch
from vitkit.model import checks
from vitkit.model.backbone import Config
from vitkit.model.checks import pair
from vitkit.model.config import NUMERICS, SHAPES, ViTConfig
from vitkit.model.resnet_config import STANDARDISED, STEM_DEPTHS, STEM_PIXELS

Fields = dict[str, Any]


def infer(state: Mapping[str, Tensor], dialect: Dialect, stated: Fields, given: Fields, notes: list[str]) -> ViTConfig:
    """Infer the configuration of a file.

    Args:
        state: its tensors, by the model's names.
        dialect: supplies the numerics that nothing else states.
        stated: fields that the tensor names reveal or that are stated next to the weights.
        given: the user's overrides; heads and image size count as facts if the file does not state them.
        notes: receives a sentence for each assumption.

    Raises:
        TensorMismatch: a tensor that every model has is missing.
        ConfigError: something cannot be inferred and must be given.
    """
    stated = dict(stated)
    untold = stated.pop("untold", "")
    if missing := [name for name in dialect.needs if name not in stated and name not in given]:
        options = {"num_attention_heads": " (--heads)", "hidden_act": " (--activation)"}
        raise ConfigError(
            f"The tensors of a {dialect.name} file do not tell {' and '.join(missing)}. Put its config.json next to "
            f"it, or give {' and '.join(f'{name}={options.get(name, str())}' for name in missing)}."
        )
    if not dialect.later:
        _refuse_other_architectures(state, dialect, stated, untold)
    kernel = _needed(state, "patch_embedding.projection.weight", 4, dialect)
    if stated.get("positions", "1d") == "1d":
        _needed(state, "positions.table", 3, dialect)
    D, C, P, other = kernel.shape
    if other != P:
        raise CannotExpress(
            f"Expected square patches; this checkpoint has patches of {P} x {other} pixels, which vitkit does not "
            f"support."
        )
    stem = _stem(state, dialect)
    L = 1 + max((int(m[1][:9]) for name in state if (m := re.match(r"blocks\.(\d+)\.", name))), default=-1)
    if len(state) < L:
        raise TensorMismatch(f"The file names block {L - 1} but holds only {len(state)} tensors; blocks are missing.")
    head = state.get("head.weight", state.get("head.cls.weight"))
    fields: Fields = {
        **NUMERICS[dialect.numerics],
        "hidden_size": D,
        "num_channels": C,
        "patch_size": P,
        "num_hidden_layers": L,
        "intermediate_size": _needed(state, "blocks.0.mlp.fc1.weight", 2, dialect).shape[0]
        // (2 if stated.get("hidden_act") == "swiglu" or (dialect.later and _gated(state)) else 1),
        "qkv_bias": "blocks.0.msa.qkv.bias" in state or "blocks.0.msa.qkv.bias_q" in state,
        "class_token": "class_token" in state,
        "num_register_tokens": state["register_tokens"].shape[1] if "register_tokens" in state else 0,
        "pre_logits": "pre_logits.weight" in state,
        "layer_scale": 1.0 if "blocks.0.residual1.gamma" in state else None,
        "num_classes": 0 if head is None else head.shape[0],
        **(_parts(state) if dialect.later else {"positions": "1d"}),
    }
    if stem != "none":
        fields |= {
            "stem": stem,
            "standardisation": STANDARDISED[dialect.numerics if dialect.numerics != "paper" else "google"],
            "num_channels": state["patch_embedding.stem.root.conv.weight"].shape[1],
            "patch_size": P * STEM_PIXELS[stem],
        }
    if not fields["class_token"]:
        fields["pool"] = "mean"
    classes = stated.get("num_classes", fields["num_classes"])
    stated = {**stated, "num_classes": fields["num_classes"]}  # a base model's JSON may list classes too
    if head is not None and classes != head.shape[0] and "num_classes" not in given:
        raise TensorMismatch(
            f"The file's head has {head.shape[0]} classes, but its JSON file states {classes}; "
            f"give num_classes= to replace the head, or correct the JSON file."
        )
    fields |= {name: value for name, value in stated.items() if value is not None and name != "prefix_positions"}
    checks.whole("patch_size", fields["patch_size"], 1)  # the next lines compute with these two
    if "image_size" in fields:
        fields["image_size"] = checks.size("image_size", fields["image_size"])
    if "num_attention_heads" not in fields:
        fields["num_attention_heads"] = given.get("num_attention_heads") or _heads(fields, notes)
    if "image_size" not in stated or _whole_patches(fields, given):
        fields["image_size"] = _image_size(_rows(state, fields, dialect), fields, given.get("image_size"), notes)
    try:
        config = ViTConfig(**fields)
    except TypeError as error:
        raise ConfigError(f"The JSON next to the weights is not a valid configuration ({error}).") from None
    # Which tokens have a position is a fact of the table, whatever is stated next to the file.
    patches_only = config.positions == "1d" and _rows(state, fields, dialect) == config.num_patches
    return dataclasses.replace(config, prefix_positions=not (patches_only and config.num_prefix_tokens))


# Tensors of parts whose numerics no tensor tells: name -> what they belong to.
UNTOLD = {
    "first_norm.weight": "a norm before the first block (CLIP)",
    "patch_embedding.norm.weight": "a norm on the patches",
    "blocks.0.msa.norm_q.weight": "norms on queries and keys",
    "blocks.0.msa.norm.weight": "norms inside a block",
    "blocks.0.mlp.norm.weight": "norms inside a block",
    "blocks.0.msa.qkv.bias_q": "biases for queries and values but not for keys (BEiT, EVA, DINOv3)",
    "blocks.0.msa.relative.table": "relative positions (BEiT)",
    "blocks.0.msa.relative.frequencies": "rotary positions",
    "pool.query": "attention pooling (SigLIP)",
}


def _refuse_other_architectures(state: Mapping[str, Tensor], dialect: Dialect, stated: Fields, untold: str) -> None:
    """Refuse models whose tensors are not those of the paper, unless a name or a configuration says what they are."""
    known = "hidden_act" in stated
    found = [f"{what} ({dialect.in_file(name)!r})" for name, what in UNTOLD.items() if name in state]
    if (found or untold) and not known:
        raise CannotExpress(
            f"This checkpoint has {(found or [untold])[0]}, and its tensors do not tell its activation, its epsilon or "
            f"what its positions do. Put its library's config.json next to it; for a model of timm "
            f'{{"architecture": "NAME"}} is enough.'
        )

    def refuse(what: str, ours: str) -> None:
        raise CannotExpress(
            f"This checkpoint has {what}, which nothing next to it says: see {dialect.in_file(ours)!r}. Put its "
            f"library's config.json next to it."
        )

    fc1, fc2 = (state.get(f"blocks.0.mlp.{name}.weight") for name in ("fc1", "fc2"))
    twice = fc1 is not None and fc2 is not None and fc1.dim() == fc2.dim() == 2 and fc1.shape[0] == 2 * fc2.shape[1]
    if twice and stated.get("hidden_act") != "swiglu":
        refuse("an MLP whose first layer is twice as wide as its second takes (SwiGLU)", "blocks.0.mlp.fc1.weight")
    norms = [name for name in state if re.search(r"norm\d?\.weight$", name)]
    without = norms and not any(name.replace("weight", "bias") in state for name in norms)
    if without and stated.get("norm") != "rms":
        refuse("norms without a bias (RMSNorm)", norms[0])
    one = "blocks.0.norm1.weight" in state and "blocks.0.norm2.weight" not in state
    if one and stated.get("block", "pre-norm") == "pre-norm" and not known:
        refuse("one norm per block, as if attention and MLP were side by side", "blocks.0.norm1.weight")
    last = {"norm.weight", "norm.bias"} & set(state) or "final" not in stated.get("norms", ("final",))
    if "blocks.0.norm1.weight" in state and not last:
        refuse("no LayerNorm after the last block (Eq. 4)", "norm.weight")


def _parts(state: Mapping[str, Tensor]) -> Fields:
    """Return the fields that name parts, as far as the names and shapes of tensors tell them."""
    places = {
        "final": "norm",
        "patches": "patch_embedding.norm",
        "first": "first_norm",
        "queries": "blocks.0.msa.norm_q",
        "heads": "blocks.0.msa.norm",
        "hidden": "blocks.0.mlp.norm",
    }
    layers = {
        "patches": "patch_embedding.projection",
        "out": "blocks.0.msa.out",
        "mlp": "blocks.0.mlp.fc2",
        "head": "head" if "head.weight" in state else "head.cls",
    }
    without = [
        name for name, layer in layers.items() if f"{layer}.weight" in state and f"{layer}.bias" not in state
    ] + ["keys"] * ("blocks.0.msa.qkv.bias_q" in state)
    fields: Fields = {
        "norms": tuple(place for place, name in places.items() if f"{name}.weight" in state),
        "without_bias": tuple(without),
        "positions": "1d" if "positions.table" in state else "none",
    }
    if "blocks.0.norm1.weight" in state and "blocks.0.norm1.bias" not in state:
        fields["norm"] = "rms"
    if "blocks.0.msa.relative.table" in state:
        fields["relative"] = "bias"
    if _gated(state):
        fields["hidden_act"] = "swiglu"
    return fields


def _gated(state: Mapping[str, Tensor]) -> bool:
    """Whether the MLP's first layer is twice as wide as its second takes (SwiGLU)."""
    fc1, fc2 = (state.get(f"blocks.0.mlp.{name}.weight") for name in ("fc1", "fc2"))
    return fc1 is not None and fc2 is not None and fc1.dim() == fc2.dim() == 2 and fc1.shape[0] == 2 * fc2.shape[1]


def _rows(state: Mapping[str, Tensor], fields: Fields, dialect: Dialect) -> int:
    """Return the rows of E_pos, or the number of tokens that relative positions or the usual image would need."""
    if fields["positions"] == "1d":
        return _needed(state, "positions.table", 3, dialect).shape[1]
    if fields.get("relative") == "bias":
        return (math.isqrt(state["blocks.0.msa.relative.table"].shape[0]) + 1) ** 2 // 4 + 1
    if dialect.later:  # rotary positions take any size
        return (224 // int(fields["patch_size"])) ** 2 + int(fields["class_token"])
    raise ConfigError("The positions of this file do not tell its image size; give image_size= (--image-size).")


def _stem(state: Mapping[str, Tensor], dialect: Dialect) -> str:
    """Return the stem that a file holds: a row of `parts.stems.STEMS`."""
    root = state.get("patch_embedding.stem.root.conv.weight")
    if root is None:
        return "none"
    found = {m[1]: 0 for name in state if (m := re.match(r"patch_embedding\.stem\.stages\.(\d)\.\d", name))}
    units = {m[0] for name in state if (m := re.match(r"patch_embedding\.stem\.stages\.\d\.\d+\.", name))}
    for stage in found:
        found[stage] = sum(unit.split(".")[3] == stage for unit in units)
    depths = tuple(found[stage] for stage in sorted(found))
    for name, known in STEM_DEPTHS.items():
        if depths == known and root.dim() == 4 and root.shape[0] == 64:
            return name
    raise CannotExpress(
        f"Expected the ResNet of a hybrid to have {', '.join(map(str, STEM_DEPTHS.values()))} units and 64 channels "
        f"after its first convolution; this checkpoint has {depths} and {root.shape[0]}: see "
        f"{dialect.in_file('patch_embedding.stem.root.conv.weight')!r}."
    )


def _needed(state: Mapping[str, Tensor], name: str, rank: int, dialect: Dialect) -> Tensor:
    if name not in state:
        why = "it is incomplete"
        if name == "positions.table":
            why += ", or its positions are rotary, relative or fixed, and nothing next to it says which"
        raise TensorMismatch(f"Expected a tensor {dialect.in_file(name)!r}; the file lacks it: {why}.")
    if state[name].dim() != rank:
        raise TensorMismatch(f"Expected {dialect.in_file(name)!r} to have {rank} axes; got {list(state[name].shape)}.")
    return state[name]


def _heads(fields: Fields, notes: list[str]) -> int:
    """Return the heads of the published variant with the same width, depth and MLP; tensors do not tell them."""
    shape = ("hidden_size", "num_hidden_layers", "intermediate_size")
    for size, row in SHAPES.items():
        if all(row[name] == fields[name] for name in shape):
            heads: int = row["num_attention_heads"]
            notes.append(
                f"The file does not state its number of heads; {heads} are assumed, as in vit-{size}, which has the "
                f"same width, depth and MLP. Give num_attention_heads= (--heads) if it has another number."
            )
            return heads
    width, depth, mlp = (fields[name] for name in shape)
    raise ConfigError(
        f"The file does not state its number of heads, and no published variant has width {width}, {depth} layers and "
        f"an MLP of {mlp}; give num_attention_heads= (--heads)."
    )


def _whole_patches(fields: Fields, given: Fields) -> bool:
    """Whether to take the image size from the positions, because the stated one cuts a patch.

    timm ignores the pixels on the right and at the bottom that do not fill a patch; the user has to agree.
    """
    P, size = fields["patch_size"], pair(fields["image_size"])
    if fields.get("pad_input") or not any(side % P for side in size):
        return False
    whole = tuple(side - side % P for side in size)
    if "image_size" not in given:
        raise ConfigError(
            f"Expected an image size that is a multiple of the patch size {P}; this file states {size[0]} x {size[1]}, "
            f"of which its library ignores all but {whole[0]} x {whole[1]}. Give image_size={whole} (--image-size "
            f"{whole[0]}x{whole[1]}) to load it for images of that size."
        )
    return True


def _image_size(rows: int, fields: Fields, given: Any, notes: list[str]) -> int | tuple[int, int]:
    """Infer the image size that a table of `rows` positions was made for.

    Usually one row is for the class token; timm and big_vision can leave it out, and timm can have rows for registers
    too. A square grid is recognised; for any other the size must be given.
    """
    P, usual = fields["patch_size"], int(fields["class_token"])
    readings = [usual, usual + fields["num_register_tokens"], 0]
    for prefix in dict.fromkeys(readings):
        side = math.isqrt(max(rows - prefix, 0))
        if side and side * side == rows - prefix:
            if prefix == 0 and usual:
                notes.append(
                    f"The {rows} positions are taken to be {side} x {side} patches and none for the class token; "
                    f"give image_size=(height, width) if the grid is not square."
                )
            return side * P
        if given is not None:
            size = pair(given)
            if -(-size[0] // P) * -(-size[1] // P) == rows - prefix:
                return size
    raise ConfigError(
        f"The {rows} positions of this file do not form a square grid of patches; give image_size=(height, "
        f"width) in pixels, with height / {P} x width / {P} = {rows - usual} patches."
    )


def adapt(state: dict[str, Tensor], own: Config, wanted: Config, notes: list[str]) -> None:
    """Adapt a file's tensors, in place, to another image size, number of channels or number of classes.

    Args:
        state: tensors by the model's names.
        own: the configuration of the file.
        wanted: the configuration of the model.
        notes: receives a sentence for each change.
    """
    if isinstance(own, ViTConfig) and isinstance(wanted, ViTConfig) and own.grid != wanted.grid:
        _regrid(state, own, wanted, notes)
    if own.num_channels != wanted.num_channels:
        names = ("root.conv.weight", "patch_embedding.stem.root.conv.weight", "patch_embedding.projection.weight")
        name, (old, new) = next(n for n in names if n in state), (own.num_channels, wanted.num_channels)
        state[name] = to_channels(state[name], new)
        notes.append(
            f"The first kernel was changed from {old} to {new} channels: "
            + ("the sum over all channels." if new == 1 else f"repeated in turn and scaled by {old}/{new}.")
        )
    hidden, kept = (getattr(config, "pre_logits", False) for config in (own, wanted))
    if own.num_classes != wanted.num_classes or (hidden and not kept):
        kernel = next(iter(state.values()))
        for name in [n for n in state if n.startswith(("head.", "pre_logits."))]:
            if name.startswith("head.") or not kept:
                del state[name]
        if wanted.num_classes:
            pool, biasless = getattr(wanted, "pool", ""), getattr(wanted, "without_bias", ())
            heads = ("head.cls", "head.distilled") if pool == "distilled" else ("head",)
            for name in heads:
                state[f"{name}.weight"] = kernel.new_zeros(wanted.num_classes, wanted.width // len(heads))
                if "head" not in biasless:
                    state[f"{name}.bias"] = kernel.new_zeros(wanted.num_classes)
            notes.append(
                f"The head is new and zero, with {wanted.num_classes} classes instead of {own.num_classes}; "
                f"train it before using its outputs."
            )
        else:
            notes.append(f"The head with {own.num_classes} classes was left out.")


def _regrid(state: dict[str, Tensor], own: ViTConfig, wanted: ViTConfig, notes: list[str]) -> None:
    """Resize everything in a file that depends on the grid of patches, in place."""
    from vitkit.model.parts.positions import resize
    from vitkit.model.parts.relative import resize_steps

    if own.relative == "offsets":
        raise ConfigError("relative='offsets' cannot be resized to another image size: its offsets are numbers.")
    old, new, rule = own.grid, wanted.grid, wanted.position_resize
    resized = False
    for name, table in state.items():
        if name.endswith("positions.table"):
            state[name] = resize(table, old, new, rule)
        elif name.endswith("positions.rows"):
            state[name] = resize(table, (old[0], 1), (new[0], 1), rule)
        elif name.endswith("positions.columns"):
            state[name] = resize(table, (1, old[1]), (1, new[1]), rule)
        elif name.endswith("relative.table"):
            state[name] = resize_steps(table, old, new, rule)
        else:
            continue
        resized = True
    if resized:
        notes.append(
            f"Positions were resized from {old[0]} x {old[1]} to {new[0]} x {new[1]} patches by the rule {rule!r}."
        )


def to_channels(kernel: Tensor, new: int) -> Tensor:
    """Adapt the patch kernel to another number of channels.

    One channel gets the sum, so that a gray image gives what it gave as equal R, G and B; more channels repeat the old
    ones in turn, scaled so that equal channels give what they gave before.

    Args:
        kernel: [D, C, P, P].
        new: number of channels wanted.
    """
    old = kernel.shape[1]
    if new == 1:
        return kernel.sum(1, keepdim=True)
    return kernel[:, torch.arange(new) % old] * (old / new)
