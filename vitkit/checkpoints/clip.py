"""clip: OpenAI's and open_clip's names, and (clip-hf) transformers' `CLIPVisionModel`, with or without its projection.

The projection into the space that images share with texts is the model's head: one without a bias. Of a whole CLIP, the
text tower is left out. `CLIPForImageClassification` is read too; it has no norm after the last block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitkit.checkpoints.rules import ASIDE, DENSE, TABLE, TOKEN, Dialect, Rule, Tensors, both, same, three
from vitkit.model.config import ViTConfig

FIRST = {"norms": ("final", "first")}
NEEDS = ("hidden_act", "num_attention_heads")
TEXT = "a text tower"

BLOCK = "visual.transformer.resblocks.{i}"
OPENAI_RULES = (
    *same("patch_embedding.projection.weight", "visual.conv1.weight"),
    Rule("class_token", ("visual.class_embedding",), TOKEN),
    Rule("positions.table", ("visual.positional_embedding",), TABLE),
    *both("first_norm", "visual.ln_pre"),
    *both("blocks.{i}.norm1", f"{BLOCK}.ln_1"),
    *same("blocks.{i}.msa.qkv.weight", f"{BLOCK}.attn.in_proj_weight"),
    *same("blocks.{i}.msa.qkv.bias", f"{BLOCK}.attn.in_proj_bias"),
    *both("blocks.{i}.msa.out", f"{BLOCK}.attn.out_proj"),
    *same("blocks.{i}.residual1.gamma", f"{BLOCK}.ls_1.gamma"),
    *both("blocks.{i}.norm2", f"{BLOCK}.ln_2"),
    *both("blocks.{i}.mlp.fc1", f"{BLOCK}.mlp.c_fc"),
    *both("blocks.{i}.mlp.fc2", f"{BLOCK}.mlp.c_proj"),
    *same("blocks.{i}.residual2.gamma", f"{BLOCK}.ls_2.gamma"),
    *both("norm", "visual.ln_post"),
    Rule("head.weight", ("visual.proj",), DENSE),
)

LAYER = "encoder.layers.{i}"
HF_RULES = (
    *both("patch_embedding.projection", "embeddings.patch_embedding"),
    Rule("class_token", ("embeddings.class_embedding",), TOKEN),
    Rule("positions.table", ("embeddings.position_embedding.weight",), TABLE),
    *both("first_norm", "pre_layrnorm"),
    *both("blocks.{i}.norm1", f"{LAYER}.layer_norm1"),
    *three("blocks.{i}.msa.qkv", *(f"{LAYER}.self_attn.{part}_proj" for part in "qkv")),
    *both("blocks.{i}.msa.out", f"{LAYER}.self_attn.out_proj"),
    *both("blocks.{i}.norm2", f"{LAYER}.layer_norm2"),
    *both("blocks.{i}.mlp.fc1", f"{LAYER}.mlp.fc1"),
    *both("blocks.{i}.mlp.fc2", f"{LAYER}.mlp.fc2"),
    *both("norm", "post_layernorm"),
    *both("head", "visual_projection"),
)


def _prepare(tensors: Tensors) -> Tensors:
    """Read the head of `CLIPForImageClassification`, which uses the last block's output without a norm."""
    if "classifier.weight" not in tensors:
        return tensors
    renamed = {re.sub(r"^classifier\.", "visual_projection.", name): tensor for name, tensor in tensors.items()}
    return {re.sub(r"^post_layernorm\.", ASIDE + r"\g<0>", name): tensor for name, tensor in renamed.items()}


def _hints(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"norms": ("first",), "pool": "mean"} if "classifier.weight" in tensors else FIRST


def _finish(tensors: Tensors, config: ViTConfig) -> Tensors:
    """Put the vision model under its prefix where a head is next to it."""
    if not config.num_classes:
        return tensors
    return {name if name.startswith("visual_") else f"vision_model.{name}": t for name, t in tensors.items()}


CLIP = Dialect(
    name="clip",
    later=True,
    numerics="clip",
    suffixes=(".pt", ".pth", ".bin", ".safetensors"),
    signature=("visual.conv1.weight", "visual.class_embedding", "visual.ln_pre.weight"),
    rules=OPENAI_RULES,
    hints=lambda tensors: FIRST,
    needs=NEEDS,
    unused={
        r"^(transformer|token_embedding|ln_final)\.|^(positional_embedding|text_projection)(\.|$)|^text\.": TEXT,
        r"^logit_(scale|bias)$": "the scale of image-text scores",
        r"^(input_resolution|context_length|vocab_size|attn_mask)$": TEXT,
    },
    refused={r"^visual\.attn_pool": "a pool with many queries (CoCa)", r"\.ln_attn\.|\.mlp\.ln\.": "norms in branches"},
)
CLIP_HF = Dialect(
    name="clip-hf",
    later=True,
    numerics="clip",
    suffixes=("",),
    signature=("embeddings.class_embedding", "encoder.layers.0.self_attn.q_proj.weight", "pre_layrnorm.weight"),
    rules=HF_RULES,
    respell=((r"^(clip\.)?vision_model\.", ""),),
    prepare=_prepare,
    finish=_finish,
    hints=_hints,
    needs=NEEDS,
    unused={
        r"^text_(model|projection)\.": TEXT,
        r"^logit_scale$": "the scale of image-text scores",
        r"(^|\.)position_ids$": "the numbers of positions",
    },
    refused={},
)
