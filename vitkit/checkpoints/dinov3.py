"""dinov3: Meta's own names, and (dinov3-hf) transformers' `DINOv3ViTModel`.

Both are backbones with rotary positions, registers, layer scale, and keys without a bias. Meta's files keep a bias for
keys and a mask that makes it zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoints.rules import Dialect, Tensors, both, packed, same, unpacked, weights
from vitkit.errors import CannotExpress
from vitkit.model.config import ViTConfig

THETA = 100.0  # the base of DINOv3's periods
ROTARY = {"positions": "none", "relative": "dinov3"}
GATED = (".mlp.w1.", ".mlp.w2.", ".mlp.fc1.")  # Meta's gates, values, both
GATED_HF = (".mlp.gate_proj.", ".mlp.up_proj.", ".mlp.fc1.")

META_RULES = (
    *both("patch_embedding.projection", "patch_embed.proj"),
    *same("class_token", "cls_token"),
    *same("register_tokens", "storage_tokens"),
    *both("blocks.{i}.norm1", "blocks.{i}.norm1"),
    *same("blocks.{i}.msa.qkv.weight", "blocks.{i}.attn.qkv.weight"),
    *same("blocks.{i}.msa.qkv.bias_q", "blocks.{i}.attn.qkv.bias_q"),  # `_prepare` splits the bias
    *same("blocks.{i}.msa.qkv.bias_v", "blocks.{i}.attn.qkv.bias_v"),
    *both("blocks.{i}.msa.out", "blocks.{i}.attn.proj"),
    *same("blocks.{i}.residual1.gamma", "blocks.{i}.ls1.gamma"),
    *both("blocks.{i}.norm2", "blocks.{i}.norm2"),
    *both("blocks.{i}.mlp.fc1", "blocks.{i}.mlp.fc1"),
    *both("blocks.{i}.mlp.fc2", "blocks.{i}.mlp.fc2"),
    *same("blocks.{i}.residual2.gamma", "blocks.{i}.ls2.gamma"),
    *both("norm", "norm"),
)

LAYER = "layer.{i}"
HF_RULES = (
    *both("patch_embedding.projection", "embeddings.patch_embeddings"),
    *same("class_token", "embeddings.cls_token"),
    *same("register_tokens", "embeddings.register_tokens"),
    *both("blocks.{i}.norm1", f"{LAYER}.norm1"),
    *weights("blocks.{i}.msa.qkv", *(f"{LAYER}.attention.{part}_proj" for part in "qkv")),
    *same("blocks.{i}.msa.qkv.bias_q", f"{LAYER}.attention.q_proj.bias"),
    *same("blocks.{i}.msa.qkv.bias_v", f"{LAYER}.attention.v_proj.bias"),
    *both("blocks.{i}.msa.out", f"{LAYER}.attention.o_proj"),
    *same("blocks.{i}.residual1.gamma", f"{LAYER}.layer_scale1.lambda1"),
    *both("blocks.{i}.norm2", f"{LAYER}.norm2"),
    *both("blocks.{i}.mlp.fc1", f"{LAYER}.mlp.fc1"),
    *both("blocks.{i}.mlp.fc2", f"{LAYER}.mlp.down_proj"),
    *same("blocks.{i}.residual2.gamma", f"{LAYER}.layer_scale2.lambda1"),
    *both("norm", "norm"),
)


def periods(head_size: int) -> Tensor:
    """Return the periods of DINOv3's rotation: THETA^(i / (d / 4))."""
    return THETA ** (torch.arange(head_size // 4) / (head_size // 4))


def _prepare(tensors: Tensors) -> Tensors:
    """Split the bias of q, k and v, and check what the rotation and the mask are."""
    result = Tensors()
    for name, tensor in packed(tensors, *GATED).items():
        if name.endswith(".attn.qkv.bias"):
            mask = tensors.get(name + "_mask")
            keys = tensor.chunk(3)[1]
            if (mask is None or bool(mask.chunk(3)[1].nan_to_num(1.0).any())) and bool(keys.any()):
                raise CannotExpress(f"Expected keys without a bias, as in DINOv3; {name!r} has one.")
            result[name.replace("bias", "bias_q")], _, result[name.replace("bias", "bias_v")] = tensor.chunk(3)
        else:
            result[name.replace(".mlp.w3.", ".mlp.fc2.")] = tensor
    found = tensors.get("rope_embed.periods")
    if found is not None and not torch.allclose(found.float(), periods(4 * len(found)), rtol=1e-2):
        raise CannotExpress(
            f"Expected DINOv3's rotary positions, with base {THETA:g}; 'rope_embed.periods' are others."
        )
    return result


def _finish(tensors: Tensors, config: ViTConfig) -> Tensors:
    gated = config.hidden_act == "swiglu"
    result = Tensors()
    for name, tensor in (unpacked(tensors, *GATED, gated=True) if gated else tensors).items():
        if name.endswith(".bias_q"):
            whole = name.removesuffix("_q")
            q, v = tensor, tensors[name.removesuffix("q") + "v"]
            result[whole] = torch.cat([q, torch.zeros_like(q), v])
            result[f"{whole}_mask"] = torch.cat([torch.ones_like(q), torch.zeros_like(q), torch.ones_like(v)])
        elif not name.endswith(".bias_v"):
            result[name.replace(".mlp.fc2.", ".mlp.w3.") if gated else name] = tensor
    result["rope_embed.periods"] = periods(config.head_size).to(tensors["cls_token"].dtype)
    result["mask_token"] = tensors["cls_token"].new_zeros(1, config.hidden_size)
    return result


def _hints(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Rotary positions, a gated MLP, and (Meta's files) the width of a head."""
    found = tensors.get("rope_embed.periods")
    width = tensors["cls_token"].shape[-1] if "cls_token" in tensors else 0
    heads = {"num_attention_heads": width // (4 * len(found))} if found is not None else {}
    gated = any(part in name for name in tensors for part in (GATED[0], GATED_HF[0]))
    return {**ROTARY, **heads, **({"hidden_act": "swiglu"} if gated else {})}


DINOV3 = Dialect(
    name="dinov3",
    later=True,
    numerics="dinov3",
    suffixes=(".pth", ".pt", ".safetensors"),
    signature=("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "rope_embed.periods"),
    rules=META_RULES,
    prepare=_prepare,
    finish=_finish,
    hints=_hints,
    unused={
        r"^mask_token$": "a mask token",
        r"^rope_embed\.periods$": "the periods of the rotation",
        r"\.qkv\.bias_mask$": "the mask of the keys' bias",
        r"^local_cls_norm\.": "a norm for local crops in training",
    },
    refused={r"^cls_norm\.": "a norm of its own for the class token"},
)
DINOV3_HF = Dialect(
    name="dinov3-hf",
    later=True,
    numerics="dinov3",
    suffixes=("",),
    signature=("embeddings.patch_embeddings.weight", "layer.0.attention.q_proj.weight", "layer.0.norm1.weight"),
    rules=HF_RULES,
    respell=((r"^(dinov3_vit|model)\.(?=(embeddings|layer|norm|model)\.)", ""), (r"^model\.(?=layer\.)", "")),
    prepare=lambda tensors: packed(tensors, *GATED_HF),
    finish=lambda tensors, c: {
        **unpacked(tensors, *GATED_HF, gated=c.hidden_act == "swiglu"),
        "embeddings.mask_token": tensors["embeddings.cls_token"].new_zeros(1, 1, c.hidden_size),
    },
    hints=_hints,
    needs=("num_attention_heads",),
    unused={r"^embeddings\.mask_token$": "a mask token"},
    refused={},
)
