"""google: the authors' `.npz` files in all their forms: original, AugReg, big_vision, `opt/target/`, stacked blocks.

Files are written in the original form, which Google's and timm's readers accept. Kernels are [in, out], convolutions
[P, P, C, D], and heads have an axis of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitkit.checkpoints.resnets import stem
from vitkit.checkpoints.rules import CONV, DENSE, OUT_KERNEL, QKV_BIAS, QKV_KERNEL, REFUSED, Dialect, Rule, Tensors
from vitkit.checkpoints.rules import same as _same

BLOCK = "Transformer/encoderblock_{i}"
MSA = f"{BLOCK}/MultiHeadDotProductAttention_1"


def _norm(ours: str, theirs: str) -> tuple[Rule, ...]:
    return Rule(f"{ours}.weight", (f"{theirs}/scale",)), Rule(f"{ours}.bias", (f"{theirs}/bias",))


def _dense(ours: str, theirs: str) -> tuple[Rule, ...]:
    return Rule(f"{ours}.weight", (f"{theirs}/kernel",), DENSE), Rule(f"{ours}.bias", (f"{theirs}/bias",))


RULES = (
    *stem(
        "conv_root",
        "gn_root",
        "blockSTAGE+1/unit{i+1}/",
        "convNUMBER",
        "gnNUMBER",
        "conv_proj",
        "gn_proj",
        {"kernel": "/kernel", "weight": "/scale", "bias": "/bias"},
        CONV,
    ),
    Rule("patch_embedding.projection.weight", ("embedding/kernel",), CONV),
    Rule("patch_embedding.projection.bias", ("embedding/bias",)),
    *_same("class_token", "cls"),
    *_same("positions.table", "Transformer/posembed_input/pos_embedding"),
    *_norm("blocks.{i}.norm1", f"{BLOCK}/LayerNorm_0"),
    Rule("blocks.{i}.msa.qkv.weight", tuple(f"{MSA}/{part}/kernel" for part in ("query", "key", "value")), QKV_KERNEL),
    Rule("blocks.{i}.msa.qkv.bias", tuple(f"{MSA}/{part}/bias" for part in ("query", "key", "value")), QKV_BIAS),
    Rule("blocks.{i}.msa.out.weight", (f"{MSA}/out/kernel",), OUT_KERNEL),
    Rule("blocks.{i}.msa.out.bias", (f"{MSA}/out/bias",)),
    *_norm("blocks.{i}.norm2", f"{BLOCK}/LayerNorm_2"),
    *_dense("blocks.{i}.mlp.fc1", f"{BLOCK}/MlpBlock_3/Dense_0"),
    *_dense("blocks.{i}.mlp.fc2", f"{BLOCK}/MlpBlock_3/Dense_1"),
    *_norm("norm", "Transformer/encoder_norm"),
    *_dense("pre_logits", "pre_logits"),
    *_dense("head", "head"),
)

RESPELL = (
    (r"^opt/target/", ""),  # very old files
    (r"^params/(img/)?", ""),  # big_vision
    (r"/MultiHeadDotProductAttention_0/", "/MultiHeadDotProductAttention_1/"),
    (r"/LayerNorm_1/", "/LayerNorm_2/"),
    (r"/MlpBlock_0/", "/MlpBlock_3/"),
)


def _prepare(tensors: Tensors) -> Tensors:
    """Unstack blocks that a scan has put into one tensor, and move big_vision's positions to their usual place."""
    result = Tensors()
    for name, tensor in tensors.items():
        if "Transformer/encoderblock/" in name:
            for i, part in enumerate(tensor):
                result[name.replace("encoderblock/", f"encoderblock_{i}/")] = part
        else:
            result[name] = tensor
    if "pos_embedding" in result:
        result["Transformer/posembed_input/pos_embedding"] = result.pop("pos_embedding")  # [1, N, D]
    return result


def _hints(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Read the number of heads from their axis."""
    kernels = [t for name, t in tensors.items() if re.search(r"Attention_1/query/kernel$", name) and t.dim() >= 3]
    return {"num_attention_heads": kernels[0].shape[-2]} if kernels else {}


GOOGLE = Dialect(
    name="google",
    numerics="google",
    suffixes=(".npz",),
    signature=("embedding/kernel", "Transformer/encoder_norm/scale"),
    rules=RULES,
    respell=RESPELL,
    prepare=_prepare,
    hints=_hints,
    unused={r"^opt/": "the optimizer's state"},
    refused={**REFUSED, r"^(params/)?txt/": "a text tower (LiT, CLIP)"},
)
