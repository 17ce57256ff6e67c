"""torchvision: `torchvision.models.VisionTransformer`; older names of the MLP are read too."""

from __future__ import annotations

from vitkit.checkpoints.rules import Dialect, Rule, both, same

BLOCK = "encoder.layers.encoder_layer_{i}"
RULES = (
    *both("patch_embedding.projection", "conv_proj"),
    *same("class_token", "class_token"),
    *same("positions.table", "encoder.pos_embedding"),
    *both("blocks.{i}.norm1", f"{BLOCK}.ln_1"),
    Rule("blocks.{i}.msa.qkv.weight", (f"{BLOCK}.self_attention.in_proj_weight",)),
    Rule("blocks.{i}.msa.qkv.bias", (f"{BLOCK}.self_attention.in_proj_bias",)),
    *both("blocks.{i}.msa.out", f"{BLOCK}.self_attention.out_proj"),
    *both("blocks.{i}.norm2", f"{BLOCK}.ln_2"),
    *both("blocks.{i}.mlp.fc1", f"{BLOCK}.mlp.0"),
    *both("blocks.{i}.mlp.fc2", f"{BLOCK}.mlp.3"),
    *both("norm", "encoder.ln"),
    *both("pre_logits", "heads.pre_logits"),
    *both("head", "heads.head"),
)

TORCHVISION = Dialect(
    name="torchvision",
    numerics="torchvision",
    suffixes=(".pth", ".pt", ".safetensors"),
    signature=("conv_proj.weight", "encoder.pos_embedding"),
    rules=RULES,
    respell=((r"\.mlp\.linear_1\.", ".mlp.0."), (r"\.mlp\.linear_2\.", ".mlp.3.")),
)
