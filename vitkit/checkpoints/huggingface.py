"""huggingface: transformers' ViT, with the names of files on the hub (v4); DeiT, I-JEPA, MAE and MSN are spelled alike.

Base-model files have no `vit.` prefix, and transformers 5 uses other names in memory; both are read. DeiT's
distillation token is a register; with a teacher it has a head of its own. I-JEPA has no class token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoints.rules import REFUSED, Dialect, Tensors, both, same, three
from vitkit.model.config import ViTConfig

RULES = (
    *both("patch_embedding.projection", "vit.embeddings.patch_embeddings.projection"),
    *same("class_token", "vit.embeddings.cls_token"),
    *same("register_tokens", "vit.embeddings.distillation_token"),
    *same("positions.table", "vit.embeddings.position_embeddings"),
    *both("blocks.{i}.norm1", "vit.encoder.layer.{i}.layernorm_before"),
    *three(
        "blocks.{i}.msa.qkv",
        *(f"vit.encoder.layer.{{i}}.attention.attention.{part}" for part in ("query", "key", "value")),
    ),
    *both("blocks.{i}.msa.out", "vit.encoder.layer.{i}.attention.output.dense"),
    *both("blocks.{i}.norm2", "vit.encoder.layer.{i}.layernorm_after"),
    *both("blocks.{i}.mlp.fc1", "vit.encoder.layer.{i}.intermediate.dense"),
    *both("blocks.{i}.mlp.fc2", "vit.encoder.layer.{i}.output.dense"),
    *both("norm", "vit.layernorm"),
    *both("pre_logits", "vit.pooler.dense"),
    *both("head", "classifier"),
    *both("head.cls", "cls_classifier"),
    *both("head.distilled", "distillation_classifier"),
)

RESPELL = (
    (r"^(deit|ijepa|vit_mae|vit_msn)\.", "vit."),
    (r"^(?=(embeddings|encoder|layers|layernorm|pooler)\.)", "vit."),  # base-model files
    (r"^vit\.layers\.", "vit.encoder.layer."),  # transformers 5, in memory
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)


def _hints(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"pool": "distilled"} if "cls_classifier.weight" in tensors else {}


def _finish(tensors: Tensors, config: ViTConfig) -> Tensors:
    """Use the class's own prefix, none for a model without a head: it becomes a base-model file.

    The position of DeiT's distillation token is part of the token itself.
    """
    prefix = "ijepa." if not config.class_token else "deit." if config.num_register_tokens else "vit."
    if config.num_register_tokens:
        table = tensors["vit.embeddings.position_embeddings"]
        none = torch.zeros_like(table[:, :1])
        tensors["vit.embeddings.position_embeddings"] = torch.cat([table[:, :1], none, table[:, 1:]], dim=1)
    return {re.sub(r"^vit\.", prefix if config.num_classes else "", name): t for name, t in tensors.items()}


def _keyless(names: AbstractSet[str]) -> bool:
    """Whether queries have a bias and keys have none: BEiT."""
    start = "vit.encoder.layer.0.attention.attention."
    return f"{start}query.bias" in names and f"{start}key.bias" not in names


HUGGINGFACE = Dialect(
    name="huggingface",
    numerics="huggingface",
    suffixes=("",),
    signature=("vit.embeddings.patch_embeddings.projection.weight", "vit.encoder.layer.0.layernorm_before.weight"),
    unless=_keyless,
    rules=RULES,
    respell=RESPELL,
    finish=_finish,
    hints=_hints,
    refused={pattern: what for pattern, what in REFUSED.items() if "DeiT" not in what},
    unused={r"^vit\.embeddings\.mask_token$": "a mask token", r"^decoder\.": "a decoder of masked pre-training"},
)
