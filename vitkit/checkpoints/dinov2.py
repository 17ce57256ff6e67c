"""dinov2: Meta's own names, and (dinov2-hf) transformers' `Dinov2Model` and `Dinov2WithRegistersModel`.

Both are backbones, without a head. Registers come after the class token and have no positions.
"""

from __future__ import annotations

from vitkit.checkpoints.rules import Dialect, Tensors, both, same, three
from vitkit.checkpoints.timm import of_dinov2
from vitkit.model.config import ViTConfig

META_RULES = (
    *both("patch_embedding.projection", "patch_embed.proj"),
    *same("class_token", "cls_token"),
    *same("register_tokens", "register_tokens"),
    *same("positions.table", "pos_embed"),
    *both("blocks.{i}.norm1", "blocks.{i}.norm1"),
    *both("blocks.{i}.msa.qkv", "blocks.{i}.attn.qkv"),
    *both("blocks.{i}.msa.out", "blocks.{i}.attn.proj"),
    *same("blocks.{i}.residual1.gamma", "blocks.{i}.ls1.gamma"),
    *both("blocks.{i}.norm2", "blocks.{i}.norm2"),
    *both("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.fc1"),
    *both("blocks.{i}.mlp.fc2", "blocks.{i}.mlp.fc2"),
    *same("blocks.{i}.residual2.gamma", "blocks.{i}.ls2.gamma"),
    *both("norm", "norm"),
)

LAYER = "encoder.layer.{i}"
HF_RULES = (
    *both("patch_embedding.projection", "embeddings.patch_embeddings.projection"),
    *same("class_token", "embeddings.cls_token"),
    *same("register_tokens", "embeddings.register_tokens"),
    *same("positions.table", "embeddings.position_embeddings"),
    *both("blocks.{i}.norm1", f"{LAYER}.norm1"),
    *three("blocks.{i}.msa.qkv", *(f"{LAYER}.attention.attention.{part}" for part in ("query", "key", "value"))),
    *both("blocks.{i}.msa.out", f"{LAYER}.attention.output.dense"),
    *same("blocks.{i}.residual1.gamma", f"{LAYER}.layer_scale1.lambda1"),
    *both("blocks.{i}.norm2", f"{LAYER}.norm2"),
    *both("blocks.{i}.mlp.fc1", f"{LAYER}.mlp.fc1"),
    *both("blocks.{i}.mlp.fc2", f"{LAYER}.mlp.fc2"),
    *same("blocks.{i}.residual2.gamma", f"{LAYER}.layer_scale2.lambda1"),
    *both("norm", "layernorm"),
)


def _with_mask(name: str, tensors: Tensors, config: ViTConfig) -> Tensors:
    """Add the token that pre-training puts in place of masked patches: both libraries expect it, though unused."""
    return {**tensors, name: tensors[name.replace("mask", "cls")].new_zeros(1, config.hidden_size)}


DINOV2 = Dialect(
    name="dinov2",
    numerics="dinov2",
    suffixes=(".pth", ".pt", ".safetensors"),
    signature=("patch_embed.proj.weight", "blocks.0.attn.qkv.weight"),
    unless=lambda names: not of_dinov2(names),
    rules=META_RULES,
    finish=lambda tensors, config: _with_mask("mask_token", tensors, config),
    unused={r"^mask_token$": "a mask token"},
)
DINOV2_HF = Dialect(
    name="dinov2-hf",
    numerics="dinov2",
    suffixes=("",),
    signature=(
        "embeddings.patch_embeddings.projection.weight",
        "encoder.layer.0.norm1.weight",
        "encoder.layer.0.layer_scale1.lambda1",
    ),
    rules=HF_RULES,
    respell=(
        (r"^dinov2(_with_registers)?\.", ""),
        (r"\.attention\.q_proj\.", ".attention.attention.query."),  # transformers 5, in memory
        (r"\.attention\.k_proj\.", ".attention.attention.key."),
        (r"\.attention\.v_proj\.", ".attention.attention.value."),
        (r"\.attention\.o_proj\.", ".attention.output.dense."),
    ),
    finish=lambda tensors, config: _with_mask("embeddings.mask_token", tensors, config),
    unused={r"^embeddings\.mask_token$": "a mask token"},
)
