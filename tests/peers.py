"""The real libraries that vitkit is compared with, and vitkit's own three doors, each made from one ViT's weights.

Import the libraries through here: torchvision's compiled operators do not load beside a CPU-only torch, so the two that
its Python code asks for are declared first. Weights move by the dialects' rules only.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from vitkit import ViT, huggingface, paper
from vitkit.checkpoints.dialects import DIALECTS, to_dialect

if torch.version.cuda is None:
    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def peer(name: str) -> ModuleType:
    """Import a peer library, or skip the test where it is not installed."""
    if importlib.util.find_spec(name.split(".", maxsplit=1)[0]) is None:
        pytest.skip(f"{name} is not installed")
    return importlib.import_module(name)


@dataclass(frozen=True)
class Answer:
    """What a model says of some pixels; None where it does not show it."""

    logits: Tensor
    states: tuple[Tensor, ...] | None = None  # z_0 ... z_L
    attentions: tuple[Tensor, ...] | None = None  # Eq. 6, one a layer
    tokens: Tensor | None = None  # after the final LayerNorm


Model = Callable[[Tensor], Answer]


def of_vit(vit: ViT) -> Model:
    def answer(x: Tensor) -> Answer:
        return Answer(vit(x), vit.hidden_states(x), tuple(vit.attention(x).values()), vit.tokens(x))

    return answer


def as_paper(vit: ViT) -> paper.ViT:
    """paper.ViT with the ViT's weights, epsilon and GELU."""
    c = vit.config
    model = paper.ViT(
        c.image_hw,
        c.num_channels,
        c.patch_size,
        c.num_hidden_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads,
        c.num_classes,
    ).eval()
    model.to(vit.head.weight.dtype)
    # The rules themselves: a course *file* cannot say that its images are not square, but paper.ViT is told here.
    model.load_state_dict(DIALECTS["course"].write(vit.state_dict(), c), strict=True)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = c.layer_norm_eps
        elif isinstance(module, nn.GELU):
            module.approximate = "tanh" if c.hidden_act == "gelu_tanh" else "none"
    return model


def of_paper(vit: ViT) -> Model:
    model = as_paper(vit)

    def answer(x: Tensor) -> Answer:
        states = [model.embed(x)]
        for block in model.transformer_encoder:
            states.append(block(states[-1]))
        return Answer(model(x), tuple(states), model(x, need_weights=True)[1], model.classifier[0](states[-1]))

    return answer


def as_twelve(vit: ViT) -> huggingface.ViTForImageClassification:
    """The twelve classes with the ViT's weights; pruned where it is pruned."""
    config = DIALECTS["huggingface"].written(vit.config)
    model = huggingface.ViTForImageClassification(config).eval().to(vit.head.weight.dtype)
    model.load_state_dict(to_dialect(vit, "huggingface"), strict=True)
    return model


def _hub(model: Callable[..., object], x: Tensor, image_hw: tuple[int, int]) -> Answer:
    """Ask a model that has Hugging Face's interface."""
    resize = {"interpolate_pos_encoding": True} if x.shape[2:] != image_hw else {}
    out = model(x, output_attentions=True, output_hidden_states=True, **resize)
    return Answer(out.logits, tuple(out.hidden_states), tuple(out.attentions))


def of_twelve(vit: ViT) -> Model:
    model = as_twelve(vit)

    def answer(x: Tensor) -> Answer:
        resize = x.shape[2:] != vit.config.image_hw
        tokens = model.vit(x, interpolate_pos_encoding=resize).last_hidden_state
        return Answer(**vars(_hub(model, x, vit.config.image_hw)) | {"tokens": tokens})

    return answer


def as_transformers(vit: ViT, kind: str = "ViTForImageClassification", attention: str = "eager") -> nn.Module:
    """The library's own model. Its names in memory differ from those of files; from_pretrained translates."""
    transformers, c = peer("transformers"), vit.config
    transformers.utils.logging.disable_progress_bar()
    config = transformers.ViTConfig(
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        intermediate_size=c.intermediate_size,
        image_size=c.image_size,
        patch_size=c.patch_size,
        num_channels=c.num_channels,
        qkv_bias=c.qkv_bias,
        layer_norm_eps=c.layer_norm_eps,
        num_labels=c.num_classes,
        hidden_act="gelu_pytorch_tanh" if c.hidden_act == "gelu_tanh" else "gelu",
    )
    tensors = to_dialect(vit, "huggingface")
    model, report = getattr(transformers, kind).from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        attn_implementation=attention,
        output_loading_info=True,
        dtype=next(iter(tensors.values())).dtype,
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


def of_transformers(vit: ViT) -> Model:
    model = as_transformers(vit)
    return lambda x: Answer(
        **vars(_hub(model, x, vit.config.image_hw))
        | {"tokens": model.vit(x, interpolate_pos_encoding=x.shape[2:] != vit.config.image_hw).last_hidden_state}
    )


def of_transformers_sdpa(vit: ViT) -> Model:
    model = as_transformers(vit, attention="sdpa")
    return lambda x: Answer(model(x).logits)


def _watched(model: nn.Module, blocks: list[nn.Module], norm: nn.Module, x: Tensor) -> Answer:
    """Run a model and keep what goes into its first block, what comes out of each, and out of the final norm."""
    states: list[Tensor] = []
    tokens: list[Tensor] = []
    hooks = [
        blocks[0].register_forward_pre_hook(lambda _, given: states.append(given[0])),
        *(block.register_forward_hook(lambda _, given, result: states.append(result)) for block in blocks),
        norm.register_forward_hook(lambda _, given, result: tokens.append(result)),
    ]
    try:
        logits = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return Answer(logits, tuple(states), tokens=tokens[0] if isinstance(norm, nn.LayerNorm) else None)


def as_timm(vit: ViT, image_size: tuple[int, int] | None = None, **more: object) -> nn.Module:
    """timm's own model, without weights where another image size is asked for."""
    vision_transformer, c = peer("timm.models.vision_transformer"), vit.config
    pool = "token" if c.pool == "cls" else "avg"
    model = vision_transformer.VisionTransformer(
        img_size=image_size or c.image_hw,
        patch_size=c.patch_size,
        in_chans=c.num_channels,
        num_classes=c.num_classes,
        embed_dim=c.hidden_size,
        depth=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        mlp_ratio=c.intermediate_size / c.hidden_size,
        qkv_bias=c.qkv_bias,
        global_pool=pool,
        fc_norm=c.norm_after_pool,
        init_values=c.layer_scale,
        reg_tokens=c.num_register_tokens,
        class_token=c.class_token,
        no_embed_class=not DIALECTS["timm"].written(c).prefix_positions,
        norm_layer=partial(nn.LayerNorm, eps=c.layer_norm_eps),
        act_layer=partial(nn.GELU, approximate="tanh" if c.hidden_act == "gelu_tanh" else "none"),
        **more,
    )
    if image_size is None:
        model.load_state_dict(to_dialect(vit, "timm"), strict=True)
    return model.eval().to(vit.head.weight.dtype)


def of_timm(vit: ViT) -> Model:
    fused, written = (as_timm(vit, dynamic_img_size=True) for _ in range(2))
    attentions: list[Tensor] = []
    for block in written.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_pre_hook(lambda _, given: attentions.append(given[0]))

    def answer(x: Tensor) -> Answer:
        attentions.clear()
        written(x)
        return Answer(**vars(_watched(fused, list(fused.blocks), fused.norm, x)) | {"attentions": tuple(attentions)})

    return answer


def as_torchvision(vit: ViT, image_size: int | None = None) -> nn.Module:
    """torchvision's own model, without weights where another image size is asked for."""
    vision_transformer, c = peer("torchvision.models.vision_transformer"), vit.config
    model = vision_transformer.VisionTransformer(
        image_size=image_size or c.image_size,
        patch_size=c.patch_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        hidden_dim=c.hidden_size,
        mlp_dim=c.intermediate_size,
        num_classes=c.num_classes,
        representation_size=c.hidden_size if c.pre_logits else None,
        norm_layer=partial(nn.LayerNorm, eps=c.layer_norm_eps),
    )
    if image_size is None:
        model.load_state_dict(to_dialect(vit, "torchvision"), strict=True)
    return model.eval().to(vit.head.weight.dtype)


def of_torchvision(vit: ViT) -> Model:
    model = as_torchvision(vit)
    return lambda x: _watched(model, list(model.encoder.layers), model.encoder.ln, x)


DOORS: dict[str, Callable[[ViT], Model]] = {
    "paper": of_paper,
    "twelve": of_twelve,
    "timm": of_timm,
    "torchvision": of_torchvision,
    "transformers": of_transformers,
    "transformers-sdpa": of_transformers_sdpa,
}
