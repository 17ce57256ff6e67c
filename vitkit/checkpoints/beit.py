"""beit-hf: `BeitModel`, `BeitForImageClassification` and `Data2VecVisionModel` of transformers.

Keys have no bias, and attention has a bias per step between two patches. Where all layers share one table of such
biases, each block gets a copy of it. A classifier, and a base model with its pooler, use LN of the mean of the patches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitkit.checkpoints.rules import Dialect, Tensors, both, same, weights
from vitkit.model.config import ViTConfig

LAYER = "encoder.layer.{i}"
STEPS = "attention.attention.relative_position_bias.relative_position_bias_table"
SHARED = "encoder.relative_position_bias.relative_position_bias_table"
RULES = (
    *both("patch_embedding.projection", "embeddings.patch_embeddings.projection"),
    *same("class_token", "embeddings.cls_token"),
    *same("positions.table", "embeddings.position_embeddings"),
    *both("blocks.{i}.norm1", f"{LAYER}.layernorm_before"),
    *weights("blocks.{i}.msa.qkv", *(f"{LAYER}.attention.attention.{part}" for part in ("query", "key", "value"))),
    *same("blocks.{i}.msa.qkv.bias_q", f"{LAYER}.attention.attention.query.bias"),
    *same("blocks.{i}.msa.qkv.bias_v", f"{LAYER}.attention.attention.value.bias"),
    *same("blocks.{i}.msa.relative.table", f"{LAYER}.{STEPS}"),
    *both("blocks.{i}.msa.out", f"{LAYER}.attention.output.dense"),
    *same("blocks.{i}.residual1.gamma", f"{LAYER}.lambda_1"),
    *both("blocks.{i}.norm2", f"{LAYER}.layernorm_after"),
    *both("blocks.{i}.mlp.fc1", f"{LAYER}.intermediate.dense"),
    *both("blocks.{i}.mlp.fc2", f"{LAYER}.output.dense"),
    *same("blocks.{i}.residual2.gamma", f"{LAYER}.lambda_2"),
    *both("norm", "layernorm"),
    *both("head", "classifier"),
)


def _prepare(tensors: Tensors) -> Tensors:
    """Copy a shared table to every block, and give the one final norm its one name."""
    result = {re.sub(r"^pooler\.layernorm\.", "layernorm.", name): t for name, t in tensors.items() if name != SHARED}
    if SHARED in tensors:
        layers = [match[1] for name in tensors if (match := re.fullmatch(r"encoder\.layer\.(\d+)\.lambda_1", name))]
        layers = layers or [
            m[1] for name in tensors if (m := re.fullmatch(r"encoder\.layer\.(\d+)\.output\.dense\.bias", name))
        ]
        for i in layers:
            own = f"encoder.layer.{i}.{STEPS}"
            result[own] = result[own] + tensors[SHARED] if own in result else tensors[SHARED].clone()
    return result


def _hints(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    table = tensors.get(SHARED, tensors.get(f"encoder.layer.0.{STEPS}"))
    after = "pooler.layernorm.weight" in tensors
    positions = "1d" if "embeddings.position_embeddings" in tensors else "none"
    hints: dict[str, Any] = {"norm_after_pool": after, "pool": "cls", "positions": positions}
    if after or "layernorm.weight" not in tensors or "lm_head.weight" in tensors:
        hints["pool"] = "mean"
    if table is not None and table.dim() == 2:
        hints["num_attention_heads"] = table.shape[1]
    return hints


def _finish(tensors: Tensors, config: ViTConfig) -> Tensors:
    """Put the norm after the mean under its name, and the base model under its prefix where a head is next to it."""
    if config.norm_after_pool:
        tensors = {re.sub(r"^layernorm\.", "pooler.layernorm.", name): t for name, t in tensors.items()}
    if not config.num_classes:
        return tensors
    return {name if name.startswith("classifier.") else f"beit.{name}": t for name, t in tensors.items()}


BEIT_HF = Dialect(
    name="beit-hf",
    later=True,
    numerics="beit",
    suffixes=("",),
    signature=(
        "embeddings.patch_embeddings.projection.weight",
        "encoder.layer.0.layernorm_before.weight",
        "encoder.layer.0.attention.attention.query.bias",
    ),
    # transformers' ViT has a bias for keys, or none at all
    unless=lambda names: "encoder.layer.0.attention.attention.key.bias" in names,
    rules=RULES,
    respell=(
        (r"^(beit|data2vec_vision)\.", ""),
        (r"\.attention\.q_proj\.", ".attention.attention.query."),  # transformers 5, in memory
        (r"\.attention\.k_proj\.", ".attention.attention.key."),
        (r"\.attention\.v_proj\.", ".attention.attention.value."),
        (r"\.attention\.o_proj\.", ".attention.output.dense."),
        (r"^layers\.", "encoder.layer."),
        (r"\.mlp\.fc1\.", ".intermediate.dense."),
        (r"\.mlp\.fc2\.", ".output.dense."),
    ),
    prepare=_prepare,
    finish=_finish,
    hints=_hints,
    needs=("num_attention_heads",),
    unused={
        r"^embeddings\.mask_token$": "a mask token",
        r"^lm_head\.": "a head that predicts visual words",
        r"relative_position_index$": "the numbers of steps",
        r"^(decode_head|auxiliary_head|fpn\d)\.": "a head for segmentation",
    },
    refused={},
)
