"""The three interfaces of one model, in and out: as_vit, as_paper, as_huggingface.

Public functions and jobs call `as_vit` on what a user passes; every other room only ever sees a ViT. Nothing is
guessed: heads, epsilons, activation and dropout come from the object itself.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitkit import huggingface, paper
from vitkit.checkpoints import DIALECTS, load, open_checkpoint, save
from vitkit.errors import CannotExpress, InputError
from vitkit.model.backbone import Backbone
from vitkit.model.config import ViTConfig
from vitkit.model.create import need_vit
from vitkit.model.parts.fit import unfit_of_paper
from vitkit.model.resnet import ResNet
from vitkit.model.vit import ViT

Twelve = huggingface.ViTModel | huggingface.ViTForImageClassification


def as_vit(model: nn.Module) -> ViT:
    """Return any of the three interfaces as a `vitkit.ViT`.

    A ViT is returned as it is, also from inside torch.compile or DistributedDataParallel. The others are copied. A
    model typed from the course's lesson is accepted like `paper.ViT` if it uses the lesson's names.

    Args:
        model: a ViT, a paper.ViT, a huggingface.ViTModel or a huggingface.ViTForImageClassification.

    Raises:
        InputError: any other object.

    Example:
        >>> from vitkit import as_vit, paper
        >>> as_vit(paper.ViT(num_transformer_layers=2, num_classes=3)).config.num_attention_heads
        12
    """
    model = unwrapped(model)
    if isinstance(model, Backbone):
        return need_vit(model, "This")
    if isinstance(model, Twelve):
        config, dialect = model.config, "huggingface"
        if isinstance(model, huggingface.ViTModel):
            config = dataclasses.replace(config, num_classes=0, pre_logits=model.pooler is not None)
    elif isinstance(model, nn.Module) and _is_course(model):
        config, dialect = _course_config(model), "course"
    else:
        raise InputError(
            f"Expected a vitkit.ViT, a vitkit.paper.ViT or one of the twelve classes of vitkit.huggingface; got "
            f"{type(model).__name__}. Load weights with vitkit.load(...)."
        )
    own = {name: t.detach().clone() for name, t in model.state_dict().items()}
    hidden = {f"pre_logits.{part}": own.pop(f"classifier.1.{part}") for part in ("weight", "bias") if _has_hidden(own)}
    if hidden:
        own |= {f"classifier.1.{part}": own.pop(f"classifier.3.{part}") for part in ("weight", "bias")}
    tensors, _, _ = DIALECTS[dialect].read(own)
    tensors |= hidden
    vit = ViT(config, getattr(model, "input_spec", None))
    vit.load_state_dict(tensors)
    first = next(model.parameters())
    vit.to(first.device, first.dtype).train(model.training)
    if dialect == "course":
        _copy_dropout(model, vit)
    return vit


def as_backbone(model: nn.Module) -> Backbone:
    """Return any of the three interfaces as a ViT, and a ResNet as it is.

    Args:
        model: anything that `as_vit` accepts, or a ResNet.

    Raises:
        InputError: any other object.
    """
    inner = unwrapped(model)
    return inner if isinstance(inner, ResNet) else as_vit(inner)


def as_paper(model: nn.Module) -> paper.ViT:
    """Return a copy of a model as the five classes of `vitkit.paper`.

    Args:
        model: anything that `as_vit` accepts.

    Raises:
        CannotExpress: the model has something that the five classes have no place for.

    Example:
        >>> import vitkit
        >>> vitkit.as_paper(vitkit.create("vit-ti/16", num_classes=3, num_hidden_layers=1)).classifier[1].out_features
        3
    """
    vit = as_vit(model)
    c = vit.config
    if odd := unfit_of_paper(c):
        raise CannotExpress(f"The five classes of vitkit.paper have no place for {', '.join(odd)}; use vitkit.ViT.")
    if not c.num_classes:
        raise CannotExpress("vitkit.paper.ViT always has a classifier; this model has no head (num_classes=0).")
    result = paper.ViT(
        c.image_hw,
        c.num_channels,
        c.patch_size,
        c.num_hidden_layers,
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads,
        c.num_classes,
        attn_dropout=c.attention_probs_dropout_prob,
        mlp_dropout=c.hidden_dropout_prob,
        embedding_dropout=c.hidden_dropout_prob,
        pre_logits=c.pre_logits,
    )
    for module in result.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = c.layer_norm_eps
        elif isinstance(module, nn.GELU):
            module.approximate = "tanh" if c.hidden_act == "gelu_tanh" else "none"
    return cast(paper.ViT, _filled(result, vit, "course"))


def as_huggingface(model: nn.Module) -> Twelve:
    """Return a copy of a model as the twelve classes: with a head ViTForImageClassification, else ViTModel.

    Args:
        model: anything that `as_vit` accepts.

    Raises:
        ConfigError: the model has something that the twelve classes have no place for.

    Example:
        >>> import vitkit
        >>> type(vitkit.as_huggingface(vitkit.create("vit-ti/16", num_classes=3, num_hidden_layers=1))).__name__
        'ViTForImageClassification'
    """
    vit = as_vit(model)
    config = dataclasses.replace(vit.config, prefix_positions=True)  # a class token without a position gets zeros
    if config.num_classes:
        return cast(Twelve, _filled(huggingface.ViTForImageClassification(config), vit, "huggingface"))
    return cast(Twelve, _filled(huggingface.ViTModel(config, config.pre_logits), vit, "huggingface"))


def pretrained(kind: type[Any], source: str | Path, *, use_mask_token: bool = False, **changes: Any) -> Any:
    """Load weights of any dialect into one of the twelve classes: what their `from_pretrained` does.

    Args:
        kind: huggingface.ViTModel or huggingface.ViTForImageClassification.
        source: anything that `vitkit.load` accepts.
        use_mask_token: whether a ViTModel gets a mask token: that of masked pre-training if the file has one, otherwise
            zeros, as in a new model.
        changes: other arguments of `vitkit.load`.
    """
    if use_mask_token and kind is not huggingface.ViTModel:
        raise InputError(f"use_mask_token is for ViTModel; {kind.__name__} has no mask token.")
    vit = load(source, **changes)
    if kind is huggingface.ViTModel and vit.config.num_classes:
        vit.config = dataclasses.replace(vit.config, num_classes=0)
        vit.input_spec = vit.input_spec.of_images
        vit.head = nn.Identity()
    elif kind is huggingface.ViTForImageClassification and not vit.config.num_classes:
        vit = load(source, **{"num_classes": 2, **changes})  # as the hub: a new head, and a note that says so
    model = as_huggingface(vit)
    if use_mask_token:
        cls_token = cast(Any, model).embeddings.cls_token
        token = _mask_token(source, **{name: value for name, value in changes.items() if name == "revision"})
        token = torch.zeros_like(cls_token) if token is None else token.reshape(cls_token.shape).to(cls_token)
        cast(Any, model).embeddings.mask_token = nn.Parameter(token.clone())
    return model


def _mask_token(source: str | Path, **how: Any) -> Tensor | None:
    """Return the mask token that a checkpoint of ours or of the hub keeps beside the model."""
    found = open_checkpoint(source, **how)
    name = next((name for name in found.unused if name.endswith("mask_token")), None)
    return None if name is None else found.raw()[name]


def save_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Write a model as a folder of the hub: what `save_pretrained` of the twelve classes does.

    Args:
        model: anything that `as_vit` accepts.
        folder: created if needed.
    """
    save(as_vit(model), Path(folder).expanduser(), "huggingface")


def copy_weights(vit: ViT, model: nn.Module) -> None:
    """Copy a ViT's weights back into the object that it was made of, in place; nothing to do for the ViT itself.

    Args:
        vit: what `as_vit(model)` returned, trained since.
        model: the object.
    """
    model = unwrapped(model)
    if model is not vit:
        _filled(model, vit, "huggingface" if isinstance(model, Twelve) else "course")


def unwrapped(model: Any) -> Any:
    """Return the module inside torch.compile and DistributedDataParallel."""
    while isinstance(inner := getattr(model, "_orig_mod", None) or getattr(model, "module", None), nn.Module):
        model = inner
    return model


def _filled(model: nn.Module, vit: ViT, dialect: str) -> nn.Module:
    """Fill a model of another interface with a ViT's weights."""
    own = vit.state_dict()
    hidden = {name: own.pop(name) for name in list(own) if dialect == "course" and name.startswith("pre_logits.")}
    tensors = DIALECTS[dialect].write(
        own, dataclasses.replace(vit.config, pre_logits=not hidden and vit.config.pre_logits)
    )
    for part in ("weight", "bias") if hidden else ():  # of paper.ViT's classifier: LN, hidden, tanh, head
        tensors[f"classifier.3.{part}"] = tensors[f"classifier.1.{part}"]
        tensors[f"classifier.1.{part}"] = hidden[f"pre_logits.{part}"]
    if isinstance(model, huggingface.ViTModel):
        tensors = {name.removeprefix("vit."): t for name, t in tensors.items()}
    kept = model.state_dict()  # a mask token belongs to the object and not to the model
    first = next(vit.parameters())
    model.to(first.device, first.dtype).train(vit.training)
    model.load_state_dict({**kept, **{name: t.detach().clone() for name, t in tensors.items()}})
    cast(Any, model).input_spec = vit.input_spec
    return model


def _has_hidden(tensors: dict[str, Any]) -> bool:
    """Whether a course model has the pre-training head: its classifier is LN, Linear, Tanh, Linear."""
    return "classifier.3.weight" in tensors


def _is_course(model: nn.Module) -> bool:
    names = model.state_dict()
    return all(name in names for name in DIALECTS["course"].signature) and hasattr(model, "transformer_encoder")


def _first(model: nn.Module, kind: type[Any], what: str) -> Any:
    found = next((module for module in model.modules() if isinstance(module, kind)), None)
    if found is None:
        raise InputError(f"Expected the course's ViT with {what}; this one has none.")
    return found


def _course_config(model: nn.Module) -> ViTConfig:
    """The architecture of `paper.ViT`, or of a model with its names, read off its modules."""
    course = cast(Any, model)
    patcher, table = _first(model, nn.Conv2d, "a convolution that cuts patches"), course.position_embedding
    attention, act = _first(model, nn.MultiheadAttention, "nn.MultiheadAttention"), _first(model, nn.GELU, "nn.GELU")
    mlp = [
        module
        for module in model.get_submodule("transformer_encoder.0.mlp_block").modules()
        if isinstance(module, nn.Linear)
    ]
    P = patcher.kernel_size[0]
    size = getattr(model, "img_size", None) or round((table.shape[1] - 1) ** 0.5) * P
    dropout = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return ViTConfig(
        image_size=size,
        patch_size=P,
        num_channels=patcher.in_channels,
        hidden_size=patcher.out_channels,
        num_hidden_layers=len(course.transformer_encoder),
        num_attention_heads=attention.num_heads,
        intermediate_size=mlp[0].out_features,
        num_classes=course.classifier[-1].out_features,
        layer_norm_eps=_first(model, nn.LayerNorm, "nn.LayerNorm").eps,
        hidden_act="gelu_tanh" if act.approximate == "tanh" else "gelu",
        qkv_bias=attention.in_proj_bias is not None,
        hidden_dropout_prob=max(dropout, default=0.0),
        attention_probs_dropout_prob=attention.dropout,
        position_resize="google",
        pre_logits=len(course.classifier) > 2,
    )


def _copy_dropout(model: nn.Module, vit: ViT) -> None:
    """Give every dropout the probability that it has in the course's model, which has none after U_msa."""
    course = cast(Any, model)
    vit.dropout.p = getattr(getattr(course, "embedding_dropout", None), "p", 0.0)
    for block, own in zip(vit.blocks, course.transformer_encoder, strict=True):
        block.msa.dropout.p = 0.0
        block.mlp.dropout.p = next((m.p for m in own.modules() if isinstance(m, nn.Dropout)), 0.0)
