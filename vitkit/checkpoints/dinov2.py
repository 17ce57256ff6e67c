"""dinov2: Meta's own names, and (dinov2-hf) transformers' `Dinov2Model` and `Dinov2WithRegistersModel`.

Registers come after the class token and have no positions. transformers' classifiers use the class token and the mean
of the patches, side by side; Meta's files have no head. Giants have a gated MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitkit.checkpoints.rules import REFUSED, Dialect, Tensors, both, packed, same, three
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
    *both("head", "classifier"),
)


def two_thirds(width: int) -> int:
    """Return the width of DINOv2's gated MLP: two thirds, rounded up to a multiple of eight."""
    return (int(width * 2 / 3) + 7) // 8 * 8


def mlp_ratio(config: ViTConfig) -> int | None:
    """Return the whole number from which transformers computes the width of DINOv2's MLP; None if there is none."""
    D, M = config.hidden_size, config.intermediate_size
    widths = {r: two_thirds(r * D) if config.hidden_act == "swiglu" else r * D for r in range(1, 33)}
    return next((ratio for ratio, width in widths.items() if width == M), None)


META_GATED = {".mlp.fc1.": ".mlp.w12.", ".mlp.fc2.": ".mlp.w3."}
HF_GATED = {".mlp.fc1.": ".mlp.weights_in.", ".mlp.fc2.": ".mlp.weights_out."}


def _finish(tensors: Tensors, config: ViTConfig, mask: str, gated: dict[str, str]) -> Tensors:
    """Name a gated MLP's layers, and add the token that pre-training puts in place of masked patches.

    Both libraries expect that token, though it is not used.
    """
    if config.hidden_act == "swiglu":
        for plain, other in gated.items():
            tensors = {name.replace(plain, other): tensor for name, tensor in tensors.items()}
    return {**tensors, mask: tensors[mask.replace("mask", "cls")].new_zeros(1, config.hidden_size)}


def _finish_hf(tensors: Tensors, config: ViTConfig) -> Tensors:
    """As `_finish`; a classifier has the base model under its prefix."""
    tensors = _finish(tensors, config, "embeddings.mask_token", HF_GATED)
    if not config.num_classes:
        return tensors
    prefix = "dinov2_with_registers." if config.num_register_tokens else "dinov2."
    return {name if name.startswith("classifier.") else prefix + name: tensor for name, tensor in tensors.items()}


def _of_head(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"pool": "cls+mean"} if "classifier.weight" in tensors else {}


PLAIN_REFUSED = {pattern: what for pattern, what in REFUSED.items() if "SwiGLU" not in what}
DINOV2 = Dialect(
    name="dinov2",
    numerics="dinov2",
    suffixes=(".pth", ".pt", ".safetensors"),
    signature=("patch_embed.proj.weight", "blocks.0.attn.qkv.weight"),
    unless=lambda names: not of_dinov2(names) or "rope_embed.periods" in names,
    rules=META_RULES,
    respell=((r"\.mlp\.w12\.", ".mlp.fc1."), (r"\.mlp\.w3\.", ".mlp.fc2.")),
    finish=lambda tensors, config: _finish(tensors, config, "mask_token", META_GATED),
    later=True,
    unused={r"^mask_token$": "a mask token"},
    refused=PLAIN_REFUSED,
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
        (r"\.mlp\.weights_in\.", ".mlp.fc1."),
        (r"\.mlp\.(weights_out|down_proj)\.", ".mlp.fc2."),
    ),
    prepare=lambda tensors: packed(tensors, ".mlp.gate_proj.", ".mlp.up_proj.", ".mlp.fc1."),
    finish=_finish_hf,
    hints=_of_head,
    later=True,
    unused={r"^embeddings\.mask_token$": "a mask token"},
    refused=PLAIN_REFUSED,
)
