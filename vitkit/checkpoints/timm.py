"""timm: `VisionTransformer`, `VisionTransformerDistilled`, `Eva` and `Beit`; DINO, MAE and DeiT use the same names.

`_prepare` brings other structures of the same model into one form: q, k and v stacked, a split SwiGLU packed, the one
product of a parallel block cut into its two. `_finish` writes the structure that timm has for such a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from vitkit.checkpoints.resnets import TORCH, stem
from vitkit.checkpoints.rules import Dialect, Tensors, both, same
from vitkit.model.config import ROTATIONS, ViTConfig

BLOCK = "blocks.{i}"
RULES = (
    *stem(
        "patch_embed.backbone.stem.conv",
        "patch_embed.backbone.stem.norm",
        "patch_embed.backbone.stages.STAGE.blocks.{i}.",
        "convNUMBER",
        "normNUMBER",
        "downsample.conv",
        "downsample.norm",
        TORCH,
    ),
    *both("patch_embedding.projection", "patch_embed.proj"),
    *both("patch_embedding.norm", "patch_embed.norm"),
    *same("class_token", "cls_token"),
    *same("register_tokens", "reg_token"),
    *same("positions.table", "pos_embed"),
    *both("first_norm", "norm_pre"),
    *both(f"{BLOCK}.norm1", f"{BLOCK}.norm1"),
    *both(f"{BLOCK}.msa.qkv", f"{BLOCK}.attn.qkv"),
    *same(f"{BLOCK}.msa.qkv.bias_q", f"{BLOCK}.attn.q_bias"),
    *same(f"{BLOCK}.msa.qkv.bias_v", f"{BLOCK}.attn.v_bias"),
    *both(f"{BLOCK}.msa.norm_q", f"{BLOCK}.attn.q_norm"),
    *both(f"{BLOCK}.msa.norm_k", f"{BLOCK}.attn.k_norm"),
    *same(f"{BLOCK}.msa.relative.table", f"{BLOCK}.attn.relative_position_bias_table"),
    *same(f"{BLOCK}.msa.relative.frequencies", f"{BLOCK}.attn.rope_freqs"),
    *both(f"{BLOCK}.msa.norm", f"{BLOCK}.attn.norm"),
    *both(f"{BLOCK}.msa.out", f"{BLOCK}.attn.proj"),
    *same(f"{BLOCK}.residual1.gamma", f"{BLOCK}.ls1.gamma"),
    *both(f"{BLOCK}.norm2", f"{BLOCK}.norm2"),
    *both(f"{BLOCK}.mlp.fc1", f"{BLOCK}.mlp.fc1"),
    *both(f"{BLOCK}.mlp.norm", f"{BLOCK}.mlp.norm"),
    *both(f"{BLOCK}.mlp.fc2", f"{BLOCK}.mlp.fc2"),
    *same(f"{BLOCK}.residual2.gamma", f"{BLOCK}.ls2.gamma"),
    *both("norm", "norm"),
    *same("pool.query", "attn_pool.latent"),
    *both("pool.q", "attn_pool.q"),
    *both("pool.kv", "attn_pool.kv"),
    *both("pool.out", "attn_pool.proj"),
    *both("pool.norm", "attn_pool.norm"),
    *both("pool.mlp.fc1", "attn_pool.mlp.fc1"),
    *both("pool.mlp.fc2", "attn_pool.mlp.fc2"),
    *both("head", "head"),
    *both("head.cls", "head.cls"),
    *both("head.distilled", "head_dist"),
)
# A parallel block's names of the same tensors.
PARALLEL = {"in_norm": "norm1", "attn_out_proj": "attn.proj", "mlp_out_proj": "mlp.fc2", "ls": "ls1",
            "q_norm": "attn.q_norm", "k_norm": "attn.k_norm"}  # fmt: skip
RESPELL = (
    (r"^backbone\.", ""),
    *((rf"^(blocks\.\d+)\.{old}\.", rf"\1.{new}.") for old, new in PARALLEL.items()),
    (r"^dist_token$", "reg_token"),
)
# Architectures of timm's that vitkit does not have, by their tensors: regular expression -> what they are.
REFUSED = {
    r"blocks\.\d+\.(attns|ffns)\.": "two branches side by side in each block",
    r"\.lambda_[qk][12]$": "differential attention",
    r"^rel_pos_bias\.|rel_pos\b|rel_pos\.": "relative positions other than BEiT's",
    r"attn\.gate\.": "gated attention",
    r"post_?norm": "LayerNorms after the branches (post-norm)",
    r"patch_embed\.backbone\.(conv1|bn1|layer\d|\d)": "a stem other than the authors' ResNet",
}
ROOT = re.compile(r"^patch_embed\.backbone\.(?=(conv|norm)\.)")  # R+ViT-Ti/16, whose stem has no stages


def _prepare(tensors: Tensors) -> Tensors:
    tensors = {re.sub(r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma", name): t for name, t in tensors.items()}
    tensors = {ROOT.sub("patch_embed.backbone.stem.", name): t for name, t in tensors.items()}
    if "norm.weight" not in tensors:
        tensors = {name.removeprefix("fc_") if name.startswith("fc_norm.") else name: t for name, t in tensors.items()}
    for name in [name for name in tensors if name.endswith(".relative_position_index")]:
        del tensors[name]  # a constant, which older files hold
    if "head_dist.weight" in tensors:
        for part in ("weight", "bias"):
            if f"head.{part}" in tensors:
                tensors[f"head.cls.{part}"] = tensors.pop(f"head.{part}")
    if (frequencies := tensors.pop("rope.freqs", None)) is not None:  # [2, L, h, d / 2]
        tensors |= {f"blocks.{i}.attn.rope_freqs": part for i, part in enumerate(frequencies.unbind(1))}
    for i in sorted({match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))}):
        _stack(tensors, f"blocks.{i}.attn", f"blocks.{i}.mlp")
        _unfold(tensors, f"blocks.{i}")
    return tensors


def _stack(tensors: Tensors, attn: str, mlp: str) -> None:
    """Stack q, k and v, and the gate and the value of a SwiGLU, if they are apart."""
    for whole, parts in (
        (f"{attn}.qkv.weight", [f"{attn}.{part}_proj.weight" for part in "qkv"]),
        (f"{mlp}.fc1.weight", [f"{mlp}.fc1_{part}.weight" for part in "gx"]),
        (f"{mlp}.fc1.bias", [f"{mlp}.fc1_{part}.bias" for part in "gx"]),
    ):
        if all(name in tensors for name in parts):
            tensors[whole] = torch.cat([tensors.pop(name) for name in parts])
    for part in "qv":
        if f"{attn}.{part}_proj.bias" in tensors and f"{attn}.k_proj.bias" not in tensors:
            tensors[f"{attn}.{part}_bias"] = tensors.pop(f"{attn}.{part}_proj.bias")


def _unfold(tensors: Tensors, block: str) -> None:
    """Cut the one product of a parallel block, [M + 3 h d, D], into the MLP's first and U_qkv."""
    if f"{block}.in_proj.weight" not in tensors or f"{block}.mlp.fc2.weight" not in tensors:
        return
    M = tensors[f"{block}.mlp.fc2.weight"].shape[1]
    for part in ("weight", "bias"):
        if (both := tensors.pop(f"{block}.in_proj.{part}", None)) is not None:
            tensors[f"{block}.mlp.fc1.{part}"], tensors[f"{block}.attn.qkv.{part}"] = both[:M], both[M:]
    if (bias := tensors.pop(f"{block}.mlp_bias", None)) is not None:  # of a block without a bias of q, k and v
        tensors[f"{block}.mlp.fc1.bias"] = bias


def _finish(tensors: Tensors, c: ViTConfig) -> Tensors:
    """Write positions, the last norm, heads and blocks as timm has them in the class that has such parts."""
    if "pos_embed" in tensors and c.prefix_positions and c.num_register_tokens:
        table, n = tensors["pos_embed"], int(c.class_token)
        none = table.new_zeros(1, c.num_register_tokens, c.hidden_size)
        tensors["pos_embed"] = torch.cat([table[:, :n], none, table[:, n:]], dim=1)
    if c.stem == "r/4":
        tensors = {name.replace("backbone.stem.", "backbone."): t for name, t in tensors.items()}
    if c.norm_after_pool:
        tensors = {(f"fc_{name}" if name.startswith("norm.") else name): t for name, t in tensors.items()}
    if c.pool == "distilled":
        tensors = {name.replace("head.cls.", "head."): t for name, t in tensors.items()}
        tensors["dist_token"] = tensors.pop("reg_token")
    if c.relative == "mixed":
        layers = [tensors.pop(f"blocks.{i}.attn.rope_freqs") for i in range(c.num_hidden_layers)]
        tensors["rope.freqs"] = torch.stack(layers, dim=1)
    return _in_blocks(tensors, c)


def _prefix_positions(c: ViTConfig) -> bool:
    """Whether `pos_embed` has rows for the class token and registers.

    All of timm's architectures that have both have no such rows (`no_embed_class`), so what other libraries add to the
    class token becomes part of it; the outputs are the same. Distilled DeiT, whose second token is a register here, is
    another class, which always has them.
    """
    if c.positions != "1d" or c.pool == "distilled":
        return True
    return c.prefix_positions and not (c.class_token and c.num_register_tokens)


def _in_blocks(tensors: Tensors, c: ViTConfig) -> Tensors:
    """Write blocks as the class does that has such parts: Eva's and Beit's differ from VisionTransformer's."""
    eva = c.relative in (*ROTATIONS, "bias") or "keys" in c.without_bias
    apart = eva and "hidden" in c.norms  # EVA-02 from base on
    split = c.hidden_act == "swiglu" and (apart or c.relative == "dinov3" or c.norm == "rms")
    for i in range(c.num_hidden_layers):
        attn, mlp, block = f"blocks.{i}.attn", f"blocks.{i}.mlp", f"blocks.{i}"
        for number in "12" if eva and c.layer_scale is not None else "":
            tensors[f"{block}.gamma_{number}"] = tensors.pop(f"{block}.ls{number}.gamma")
        if apart:
            for part, kernel in zip("qkv", tensors.pop(f"{attn}.qkv.weight").chunk(3), strict=True):
                tensors[f"{attn}.{part}_proj.weight"] = kernel
            for part in "qv" if "keys" in c.without_bias else "":
                tensors[f"{attn}.{part}_proj.bias"] = tensors.pop(f"{attn}.{part}_bias")
        for kind in ("weight", "bias") if split else ():
            if f"{mlp}.fc1.{kind}" in tensors:
                for part, half in zip("gx", tensors.pop(f"{mlp}.fc1.{kind}").chunk(2), strict=True):
                    tensors[f"{mlp}.fc1_{part}.{kind}"] = half
        if c.block == "parallel":
            _fold(tensors, block)
    return tensors


def _fold(tensors: Tensors, block: str) -> None:
    """Put the MLP's first product and U_qkv of a parallel block into one, under timm's names."""
    kernels = [tensors.pop(f"{block}.{name}.weight") for name in ("mlp.fc1", "attn.qkv")]
    biases = [tensors.pop(f"{block}.{name}.bias", None) for name in ("mlp.fc1", "attn.qkv")]
    tensors[f"{block}.in_proj.weight"] = torch.cat(kernels)
    first, second = biases
    if first is not None:
        tensors |= (
            {f"{block}.mlp_bias": first} if second is None else {f"{block}.in_proj.bias": torch.cat([first, second])}
        )
    for old, new in PARALLEL.items():
        for kind in ("weight", "bias", "gamma"):
            if f"{block}.{new}.{kind}" in tensors:
                tensors[f"{block}.{old}.{kind}"] = tensors.pop(f"{block}.{new}.{kind}")


def _hints(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "fc_norm.weight" in tensors:
        found |= {"pool": "mean", "norm_after_pool": True}
    if "attn_pool.latent" in tensors:
        found["pool"] = "map"
    if "head_dist.weight" in tensors:
        found["pool"] = "distilled"
    if "blocks.0.gamma_1" in tensors:
        found["untold"] = (
            "layer scale as timm's Eva and Beit have it, whose positions may be rotary ('blocks.0.gamma_1')"
        )
    return found


def of_dinov2(names: AbstractSet[str]) -> bool:
    """Whether names in timm's spelling belong to Meta's DINOv2. (Full MAE files have a mask token and a decoder.)"""
    return "register_tokens" in names or ("mask_token" in names and "decoder_pos_embed" not in names)


def _recognised(names: AbstractSet[str]) -> bool:
    """Whether a block has timm's names: q, k and v in one product, apart, or in a parallel block's."""
    kinds = ("attn.qkv.weight", "attn.q_proj.weight", "in_proj.weight")
    return any(f"blocks.0.{name}" in names for name in kinds)


TIMM = Dialect(
    name="timm",
    numerics="timm",
    suffixes=(".pth", ".pt", ".bin", ".safetensors"),
    signature=("patch_embed.proj.weight",),
    unless=lambda names: of_dinov2(names) or "rope_embed.periods" in names or not _recognised(names),
    rules=RULES,
    respell=RESPELL,
    prepare=_prepare,
    finish=_finish,
    hints=_hints,
    prefix_positions=_prefix_positions,
    unused={r"^head\.(mlp|last_layer)\.": "DINO's projection head", r"^(decoder_|mask_token$)": "MAE's decoder"},
    refused=REFUSED,
)
