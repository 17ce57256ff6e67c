"""The twelve classes that Hugging Face users know, as plain modules of their own, with the interface they had.

    ViTConfig                            the one configuration class of vitkit
    ViTModel                             embeddings -> encoder -> layernorm -> pooler
    ├── ViTEmbeddings                    Eq. 1
    │   └── PatchEmbeddings
    ├── ViTEncoder
    │   └── ViTLayer                     Eqs. 2, 3
    │       ├── ViTAttention             MSA: ViTSelfAttention (Eqs. 5-7), then ViTSelfOutput (Eq. 8)
    │       ├── ViTIntermediate          first half of the MLP
    │       └── ViTOutput                second half, and its residual
    └── ViTPooler
    ViTForImageClassification            a ViTModel and a classifier, with loss

`state_dict()` has exactly the names of the files on the hub, so such a file loads with `load_state_dict(strict=True)`.
Attention is written out, so attentions and head masks work. Positions are resized as Hugging Face does (bicubic);
`config.position_resize` speaks of the model only. Dropout stands where the library has it: after the embeddings, on
the attention, after each block's two output layers; not after ViTIntermediate, unlike the paper.

B images, N patches, T = 1 + N tokens, D width, h heads, d = D / h.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitkit.errors import ConfigError, InputError
from vitkit.model.config import ViTConfig
from vitkit.model.parts.fit import Takes, unfit
from vitkit.model.parts.layers import ACTIVATIONS, GATED

__all__ = ["BaseModelOutput", "BaseModelOutputWithPooling", "ImageClassifierOutput", "ModelOutput", "PatchEmbeddings",
           "ViTAttention", "ViTConfig", "ViTEmbeddings", "ViTEncoder", "ViTForImageClassification", "ViTIntermediate",
           "ViTLayer", "ViTModel", "ViTOutput", "ViTPooler", "ViTSelfAttention", "ViTSelfOutput"]

TAKES: Takes = {"hidden_act": [name for name in ACTIVATIONS if name not in GATED]}     # the parts that they have
# What the model can do and these classes have no place for: the field, and its only value here.
FIXED: dict[str, Any] = {"pool": "cls", "class_token": True, "layer_scale": None, "num_register_tokens": 0,
                         "drop_path_rate": 0, "pad_input": False, "prefix_positions": True}


class ModelOutput:
    """What a model returns: by name, by index, or as a tuple; what was not asked for is None and has no index."""

    def to_tuple(self) -> tuple[Any, ...]:
        """All that is not None, in order."""
        return tuple(value for value in vars(self).values() if value is not None)

    def __getitem__(self, key: int | slice | str) -> Any:
        return getattr(self, key) if isinstance(key, str) else self.to_tuple()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_tuple())

    def __len__(self) -> int:
        return len(self.to_tuple())


@dataclass(frozen=True, eq=False)
class BaseModelOutput(ModelOutput):
    """What ViTEncoder returns; hidden_states are z_0 ... z_L, attentions one [B, h, T, T] a layer."""

    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, eq=False)
class BaseModelOutputWithPooling(ModelOutput):
    """What ViTModel returns; last_hidden_state [B, T, D] is after the final LayerNorm, pooler_output is [B, D]."""

    last_hidden_state: Tensor
    pooler_output: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, eq=False)
class ImageClassifierOutput(ModelOutput):
    """What ViTForImageClassification returns; logits are [B, K]."""

    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class PatchEmbeddings(nn.Module):
    """x_p E of Eq. 1. timm's PatchEmbed, paper.PatchEmbedding.

    Args:
        image_size: pixels, a number or (height, width).
        patch_size: P, the side of a patch in pixels, or (height, width).
        num_channels: C, the channels of an image.
        embed_dim: D, the width of a token.
    """

    def __init__(self, image_size: int | tuple[int, int] = 224, patch_size: int | tuple[int, int] = 16,
                 num_channels: int = 3, embed_dim: int = 768) -> None:
        super().__init__()
        self.image_size, self.patch_size, self.num_channels = _pair(image_size), _pair(patch_size), num_channels
        self.grid = (self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1])
        self.num_patches = self.grid[0] * self.grid[1]
        if any(side < 1 or side % P for side, P in zip(self.image_size, self.patch_size, strict=True)):
            raise ConfigError(f"image_size must be a multiple of patch_size; got image_size={image_size!r} and "
                              f"patch_size={patch_size!r}.")
        self.projection = nn.Conv2d(num_channels, embed_dim, self.patch_size, stride=self.patch_size)

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool = False) -> Tensor:
        """[B, C, H, W] -> [B, N, D].

        Args:
            pixel_values: the images.
            interpolate_pos_encoding: whether another size than image_size may come.
        """
        if pixel_values.dim() != 4 or pixel_values.shape[1] != self.num_channels:
            raise InputError(f"Expected pixel_values [batch, {self.num_channels}, height, width]; got "
                             f"{list(pixel_values.shape)}. Set num_channels in the config for other images.")
        (H, W), (P, Q) = pixel_values.shape[2:], self.patch_size
        if H % P or W % Q:
            raise InputError(f"Expected a height and width that are multiples of the patch size {P} x {Q}; got "
                             f"{H} x {W}. Resize to {max(H // P, 1) * P} x {max(W // Q, 1) * Q}.")
        if not interpolate_pos_encoding and self.image_size != (H, W):
            raise InputError(f"Expected pixel_values of {self.image_size[0]} x {self.image_size[1]}; got {H} x {W}. "
                             f"Resize them, or pass interpolate_pos_encoding=True.")
        return self.projection(pixel_values).flatten(2).mT


class ViTEmbeddings(nn.Module):
    """z_0 of Eq. 1: class token, patches, positions. The start of timm's forward_features, paper.ViT.embed.

    Args:
        config: the architecture.
        use_mask_token: whether there is a token to put in place of masked patches.
    """

    def __init__(self, config: ViTConfig, use_mask_token: bool = False) -> None:
        super().__init__()
        D = config.hidden_size
        self.cls_token = nn.Parameter(torch.zeros(1, 1, D))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, D)) if use_mask_token else None
        self.patch_embeddings = PatchEmbeddings(config.image_size, config.patch_size, config.num_channels, D)
        self.position_embeddings = nn.Parameter(torch.zeros(1, 1 + self.patch_embeddings.num_patches, D))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        _initialise(self, config.initializer_range)

    def interpolate_pos_encoding(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        """Positions for an image of another size: bicubic, half-pixel, the class token's row kept.

        Args:
            embeddings: the tokens that the positions are for; not read, kept for its place in the interface.
            height: of the image, in pixels.
            width: of the image, in pixels.
        """
        (P, Q), (rows, columns) = self.patch_embeddings.patch_size, self.patch_embeddings.grid
        if (height // P, width // Q) == (rows, columns):
            return self.position_embeddings
        of_class, of_patches = self.position_embeddings[:, :1], self.position_embeddings[:, 1:]
        table = of_patches.mT.unflatten(2, (rows, columns))                               # [1, D, rows, columns]
        table = F.interpolate(table, size=(height // P, width // Q), mode="bicubic", align_corners=False)
        return torch.cat([of_class, table.flatten(2).mT], dim=1)                          # [1, T, D]

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None,
                interpolate_pos_encoding: bool = False) -> Tensor:
        """[B, C, H, W] -> [B, T, D].

        Args:
            pixel_values: the images.
            bool_masked_pos: [B, N], True where the mask token takes a patch's place.
            interpolate_pos_encoding: whether another size than config.image_size may come.
        """
        z = self.patch_embeddings(pixel_values, interpolate_pos_encoding)                 # [B, N, D]
        if bool_masked_pos is not None:
            if self.mask_token is None:
                raise InputError("bool_masked_pos needs a mask token; build ViTModel(config, use_mask_token=True).")
            if bool_masked_pos.shape != z.shape[:2]:
                raise InputError(f"Expected bool_masked_pos of shape {list(z.shape[:2])}; got "
                                 f"{list(bool_masked_pos.shape)}.")
            z = torch.where(bool_masked_pos.bool().unsqueeze(-1), self.mask_token, z)
        z = torch.cat([self.cls_token.expand(len(z), -1, -1), z], dim=1)                  # [B, T, D]
        if interpolate_pos_encoding:
            return self.dropout(z + self.interpolate_pos_encoding(z, pixel_values.shape[2], pixel_values.shape[3]))
        return self.dropout(z + self.position_embeddings)


class ViTSelfAttention(nn.Module):
    """Eqs. 5-7, written out. The first half of timm's Attention, vitkit's MSA.project and scores.

    Args:
        config: the architecture.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.head_size
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.query, self.key, self.value = (
            nn.Linear(config.hidden_size, self.all_head_size, bias=config.qkv_bias) for _ in range(3))
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """[B, T, h * d] -> [B, h, T, d]."""
        return x.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).transpose(1, 2)

    def forward(self, hidden_states: Tensor, head_mask: Tensor | None = None,
                output_attentions: bool = False) -> tuple[Tensor, ...]:
        """(context [B, T, h * d],), and the attention [B, h, T, T] where it is asked for.

        Args:
            hidden_states: [B, T, D].
            head_mask: multiplies the attention: [h], or anything that broadcasts to [B, h, T, T].
            output_attentions: whether to return the attention, after dropout and mask as it was used.
        """
        q, k, v = (self.transpose_for_scores(part(hidden_states))                         # Eq. 5
                   for part in (self.query, self.key, self.value))
        A = (q @ k.mT / self.attention_head_size ** 0.5).softmax(-1)                      # Eq. 6   [B, h, T, T]
        A = self.dropout(A)
        if head_mask is not None:
            A = A * (head_mask.view(-1, 1, 1) if head_mask.dim() == 1 else head_mask)
        context = (A @ v).transpose(1, 2).flatten(2)                                      # Eq. 7   [B, T, h * d]
        return (context, A) if output_attentions else (context,)


class ViTSelfOutput(nn.Module):
    """U_msa of Eq. 8; the residual is ViTLayer's. timm's Attention.proj, vitkit's MSA.out.

    Args:
        config: the architecture.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor | None = None) -> Tensor:
        """[B, T, h * d] -> [B, T, D]; `input_tensor` is not read, kept for its place in the interface."""
        return self.dropout(self.dense(hidden_states))


class ViTAttention(nn.Module):
    """MSA: Eqs. 5-8. timm's Attention, vitkit's MSA, nn.MultiheadAttention in paper.py.

    Args:
        config: the architecture.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention = ViTSelfAttention(config)
        self.output = ViTSelfOutput(config)
        self.heads = list(range(config.num_attention_heads))     # those that are left, by original number
        self.pruned_heads: set[int] = set()

    @torch.no_grad()
    def prune_heads(self, heads: Iterable[int]) -> None:
        """Cut heads out of this layer (`ViTModel.prune_heads` also writes them into the config).

        Args:
            heads: by original number; those already gone may be named again.
        """
        heads = set(heads)
        if unknown := heads - set(self.heads) - self.pruned_heads:
            raise ConfigError(f"There are no heads {sorted(unknown)} to prune; choose from {self.heads}.")
        if not (left := [head for head in self.heads if head not in heads]):
            raise ConfigError(f"Pruning heads {sorted(heads)} would leave no head in this layer; keep at least one.")
        d, device = self.attention.attention_head_size, self.output.dense.weight.device
        kept = torch.tensor([self.heads.index(head) for head in left], device=device)
        lanes = (kept[:, None] * d + torch.arange(d, device=device)).flatten()            # [left * d]
        for linear in (self.attention.query, self.attention.key, self.attention.value):
            _keep(linear, lanes, dim=0)
        _keep(self.output.dense, lanes, dim=1)
        self.attention.num_attention_heads, self.attention.all_head_size = len(left), len(left) * d
        self.heads, self.pruned_heads = left, self.pruned_heads | heads

    def forward(self, hidden_states: Tensor, head_mask: Tensor | None = None,
                output_attentions: bool = False) -> tuple[Tensor, ...]:
        """(MSA(z) [B, T, D],), and the attention where it is asked for; arguments as in ViTSelfAttention."""
        context, *attention = self.attention(hidden_states, head_mask, output_attentions)
        return (self.output(context, hidden_states), *attention)                          # Eq. 8


class ViTIntermediate(nn.Module):
    """First half of the MLP: timm's Mlp.fc1 and act.

    Args:
        config: the architecture.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = ACTIVATIONS[config.hidden_act]()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, intermediate_size]."""
        return self.intermediate_act_fn(self.dense(hidden_states))


class ViTOutput(nn.Module):
    """Second half of the MLP, with its residual: timm's Mlp.fc2, and the sum in its Block.

    Args:
        config: the architecture.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """[B, T, intermediate_size] -> [B, T, D], added to `input_tensor`."""
        return self.dropout(self.dense(hidden_states)) + input_tensor


class ViTLayer(nn.Module):
    """One encoder layer: Eqs. 2 and 3. timm's Block, vitkit's Block, paper.TransformerEncoderBlock.

    Args:
        config: the architecture.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.chunk_size_feed_forward = config.chunk_size_feed_forward
        self.seq_len_dim = 1
        self.attention = ViTAttention(config)
        self.intermediate = ViTIntermediate(config)
        self.output = ViTOutput(config)
        self.layernorm_before, self.layernorm_after = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) for _ in range(2))

    def forward(self, hidden_states: Tensor, head_mask: Tensor | None = None,
                output_attentions: bool = False) -> tuple[Tensor, ...]:
        """(z_l [B, T, D],), and the attention where it is asked for; arguments as in ViTSelfAttention."""
        msa, *attention = self.attention(self.layernorm_before(hidden_states), head_mask, output_attentions)
        z = msa + hidden_states                                                           # Eq. 2
        chunk = self.chunk_size_feed_forward or z.shape[self.seq_len_dim]
        parts = [self.feed_forward_chunk(part) for part in z.split(chunk, dim=self.seq_len_dim)]
        return (torch.cat(parts, dim=self.seq_len_dim) if len(parts) > 1 else parts[0], *attention)

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        """Eq. 3 for some of the tokens: z_l = MLP(LN(z'_l)) + z'_l."""
        return self.output(self.intermediate(self.layernorm_after(attention_output)), attention_output)


class ViTEncoder(nn.Module):
    """All layers: timm's VisionTransformer.blocks.

    Args:
        config: the architecture; heads in `pruned_heads` are left out.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(ViTLayer(config) for _ in range(config.num_hidden_layers))
        self.gradient_checkpointing = False     # set it to True to trade time for memory in training
        for index, heads in config.pruned_heads:
            self.attention_of(index).prune_heads(heads)

    def attention_of(self, index: int) -> ViTAttention:
        """The attention of layer `index`."""
        return cast(ViTLayer, self.layer[index]).attention

    def forward(self, hidden_states: Tensor, head_mask: Sequence[Tensor | None] | Tensor | None = None,
                output_attentions: bool = False, output_hidden_states: bool = False,
                return_dict: bool = True) -> BaseModelOutput | tuple[Any, ...]:
        """z_0 -> z_L, before the final LayerNorm.

        Args:
            hidden_states: z_0, [B, T, D].
            head_mask: one mask a layer, as ViTSelfAttention takes it.
            output_attentions: whether to return the attention of every layer.
            output_hidden_states: whether to return z_0 ... z_L.
            return_dict: False gives a plain tuple.
        """
        z, states, attentions = hidden_states, (hidden_states,), ()
        for index, layer in enumerate(self.layer):
            mask = None if head_mask is None else head_mask[index]
            if self.gradient_checkpointing and self.training:
                z, *attention = checkpoint(layer, z, mask, output_attentions, use_reentrant=False)
            else:
                z, *attention = layer(z, mask, output_attentions)
            states += (z,) if output_hidden_states else ()
            attentions += tuple(attention)
        result = BaseModelOutput(z, states if output_hidden_states else None, attentions if output_attentions else None)
        return result if return_dict else result.to_tuple()


class ViTPooler(nn.Module):
    """A dense layer and tanh on the class token: the paper's pre-training head, vitkit's pre_logits.

    Args:
        config: the architecture.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, D] -> [B, D]."""
        return self.activation(self.dense(hidden_states[:, 0]))


class Pretrained(nn.Module):
    """Loading and saving, as on the hub: a base of the two whole models."""

    @classmethod
    def from_pretrained(cls, source: str, **changes: Any) -> Any:
        """Load weights of any dialect into this class, in eval mode.

        Args:
            source: a folder, a file or a hub id: anything that `vitkit.load` accepts.
            changes: other arguments of `vitkit.load`, such as num_classes (`num_labels` is accepted too); ViTModel also
                takes use_mask_token, for the mask token of masked pre-training.
        """
        from vitkit import interfaces

        return interfaces.pretrained(cls, source, **changes)

    def save_pretrained(self, folder: str) -> None:
        """Write config.json, preprocessor_config.json and model.safetensors, as the hub keeps them.

        Args:
            folder: created if needed.
        """
        from vitkit import interfaces

        interfaces.save_pretrained(self, folder)


class ViTModel(Pretrained):
    """The Vision Transformer without a classifier.

    Args:
        config: the architecture.
        add_pooling_layer: whether there is a pooler.
        use_mask_token: whether there is a mask token, for `bool_masked_pos`.
    """

    def __init__(self, config: ViTConfig, add_pooling_layer: bool = True, use_mask_token: bool = False) -> None:
        super().__init__()
        self.config = _expressible(config, pooler=add_pooling_layer)
        self.embeddings = ViTEmbeddings(config, use_mask_token)
        self.encoder = ViTEncoder(config)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.pooler = ViTPooler(config) if add_pooling_layer else None
        _initialise(self, config.initializer_range)

    def forward(self, pixel_values: Tensor | None = None, bool_masked_pos: Tensor | None = None,
                head_mask: Tensor | None = None, output_attentions: bool | None = None,
                output_hidden_states: bool | None = None, interpolate_pos_encoding: bool | None = None,
                return_dict: bool | None = None) -> BaseModelOutputWithPooling | tuple[Any, ...]:
        """Tokens after the final LayerNorm, and what else is asked for.

        Args:
            pixel_values: images [B, C, H, W].
            bool_masked_pos: [B, N], True where the mask token takes a patch's place.
            head_mask: [h] or [L, h] by original numbers of heads, multiplies the attention (1 keeps, 0 silences).
            output_attentions: whether to return the attention of every layer, [B, h, T, T].
            output_hidden_states: whether to return z_0 ... z_L, [B, T, D].
            interpolate_pos_encoding: whether another size than config.image_size may come.
            return_dict: False gives a plain tuple.
        """
        if pixel_values is None:
            raise InputError("Expected pixel_values [batch, channels, height, width]; got None.")
        if not pixel_values.is_floating_point():
            raise InputError(f"Expected floating-point pixel_values, normalised; got {pixel_values.dtype}.")
        pixel_values = pixel_values.to(self.embeddings.cls_token.dtype)
        z = self.embeddings(pixel_values, bool_masked_pos, bool(interpolate_pos_encoding))
        encoded = self.encoder(z, self.get_head_mask(head_mask), bool(output_attentions), bool(output_hidden_states))
        tokens = self.layernorm(encoded.last_hidden_state)                                # Eq. 4 is its row 0
        result = BaseModelOutputWithPooling(tokens, None if self.pooler is None else self.pooler(tokens),
                                            encoded.hidden_states, encoded.attentions)
        return result.to_tuple() if return_dict is False else result

    def get_input_embeddings(self) -> PatchEmbeddings:
        """The module that embeds patches."""
        return self.embeddings.patch_embeddings

    def get_head_mask(self, head_mask: Tensor | None) -> list[Tensor | None]:
        """One mask [h] a layer, without the heads that are pruned there.

        Args:
            head_mask: [h] or [L, h].
        """
        L, h = self.config.num_hidden_layers, self.config.num_attention_heads
        if head_mask is None:
            return [None] * L
        if tuple(head_mask.shape) not in ((h,), (L, h)):
            raise InputError(f"Expected a head_mask of shape [{h}] or [{L}, {h}]; got {list(head_mask.shape)}.")
        rows = head_mask.to(self.embeddings.cls_token).expand(L, h)
        return [row[self.encoder.attention_of(index).heads] for index, row in enumerate(rows)]

    def prune_heads(self, heads_to_prune: Mapping[int, Iterable[int]]) -> None:
        """Cut heads out, in place; `config.pruned_heads` says so afterwards.

        Args:
            heads_to_prune: {layer: heads}, by original number; heads already gone may be named again.
        """
        gone = {layer: set(heads) for layer, heads in self.config.pruned_heads}
        for layer, heads in heads_to_prune.items():
            gone[layer] = gone.get(layer, set()) | set(heads)
        config = dataclasses.replace(self.config, pruned_heads=tuple(gone.items()))  # type: ignore[arg-type]
        for layer, pruned in config.pruned_heads:
            self.encoder.attention_of(layer).prune_heads(pruned)
        self.config = config

    _prune_heads = prune_heads


class ViTForImageClassification(Pretrained):
    """A ViTModel without pooler, and a linear classifier on the class token.

    Args:
        config: the architecture; `num_labels` (another name of num_classes) 0 leaves the classifier out.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.vit = ViTModel(config, add_pooling_layer=False)
        self.num_labels = config.num_classes
        self.classifier = nn.Linear(config.hidden_size, self.num_labels) if self.num_labels else nn.Identity()
        _initialise(self.classifier, config.initializer_range)

    @property
    def config(self) -> ViTConfig:
        """The architecture."""
        return self.vit.config

    def forward(self, pixel_values: Tensor | None = None, head_mask: Tensor | None = None,
                labels: Tensor | None = None, output_attentions: bool | None = None,
                output_hidden_states: bool | None = None, interpolate_pos_encoding: bool | None = None,
                return_dict: bool | None = None) -> ImageClassifierOutput | tuple[Any, ...]:
        """Logits [B, K], and the loss where labels are given.

        Args:
            pixel_values: images [B, C, H, W].
            head_mask: as in ViTModel.
            labels: whole numbers [B] for cross-entropy; floating-point [B, K] for several labels an image (binary
                cross-entropy); anything [B] when there is one output (mean squared error).
            output_attentions: as in ViTModel.
            output_hidden_states: as in ViTModel.
            interpolate_pos_encoding: as in ViTModel.
            return_dict: False gives a plain tuple.
        """
        outputs = self.vit(pixel_values, None, head_mask, output_attentions, output_hidden_states,
                           interpolate_pos_encoding)
        logits = self.classifier(outputs.last_hidden_state[:, 0])
        loss = None if labels is None else _loss(logits, labels)
        result = ImageClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)
        return result.to_tuple() if return_dict is False else result

    def prune_heads(self, heads_to_prune: Mapping[int, Iterable[int]]) -> None:
        """Cut heads out, as `ViTModel.prune_heads` does.

        Args:
            heads_to_prune: {layer: heads}.
        """
        self.vit.prune_heads(heads_to_prune)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss that labels of this type ask for."""
    one = logits.shape[1] == 1
    several = not one and labels.is_floating_point()
    expected = tuple(logits.shape) if several else (len(logits),)
    if tuple(labels.shape) != expected and not (one and labels.shape == logits.shape):
        raise InputError(f"Expected labels of shape {list(expected)} for logits {list(logits.shape)}; got "
                         f"{list(labels.shape)} of {labels.dtype}.")
    if one:
        return F.mse_loss(logits.flatten(), labels.flatten().to(logits))
    if several:
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits))
    return F.cross_entropy(logits, labels.long())


def _expressible(config: ViTConfig, *, pooler: bool) -> ViTConfig:
    """Return `config`, or refuse what these classes have no place for."""
    if not isinstance(config, ViTConfig):
        raise ConfigError(f"Expected a vitkit.huggingface.ViTConfig; got {type(config).__module__}."
                          f"{type(config).__qualname__}. Build ViTConfig(hidden_size=..., ...).")
    for field, value in (FIXED if pooler else FIXED | {"pre_logits": False}).items():
        if getattr(config, field) != value:
            raise ConfigError(f"Hugging Face's ViT has no place for {field}={getattr(config, field)!r}, only for "
                              f"{value!r}; use vitkit.ViT for this config.")
    if odd := unfit(config, TAKES):
        raise ConfigError(f"Hugging Face's ViT has no place for {', '.join(odd)}; use vitkit.ViT for this config.")
    return config


@torch.no_grad()
def _initialise(model: nn.Module, std: float) -> None:
    """Kernels, class token and positions truncated normal; biases and mask token zero; LayerNorm 1 and 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, ViTEmbeddings):
            nn.init.trunc_normal_(module.cls_token, std=std)
            nn.init.trunc_normal_(module.position_embeddings, std=std)


def _keep(linear: nn.Linear, lanes: Tensor, dim: int) -> None:
    """Keep only some rows (dim 0: outputs, with their biases) or columns (dim 1: inputs) of a linear layer."""
    trained = linear.weight.requires_grad
    linear.weight = nn.Parameter(linear.weight.index_select(dim, lanes), requires_grad=trained)
    if dim == 0 and linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias[lanes], requires_grad=linear.bias.requires_grad)
    linear.out_features, linear.in_features = linear.weight.shape


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
