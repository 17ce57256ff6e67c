"""The Vision Transformer, equation by equation: arXiv 2010.11929, section 3.1 and appendix A.

Legend: B images, C channels, H x W pixels, P patch side, N = HW / P^2 patches, T tokens (class token, registers,
patches), D width, h heads, d = D / h, L layers, K classes.

Where this differs from the paper:
  - U_qkv, U_msa, E and the MLP have biases, as in the authors' code.
  - Later models replace parts of it. Each part is a row of a table in parts/, named by a field of the configuration.
    The defaults are the paper: nn.Identity or None stands where it has nothing. Read this file without parts/ first.
  - Head masks multiply A v instead of A: A enters Eq. 7 linearly, so the result is the same and the kernel stays fused.
  - `rows` selects the tokens whose output is needed (Eq. 4 reads one). The others still serve as keys and values.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitkit.errors import ConfigError, InputError
from vitkit.model.backbone import Backbone
from vitkit.model.checks import Indices, indices, pair
from vitkit.model.config import InputSpec, ViTConfig
from vitkit.model.init import initialise
from vitkit.model.inputs import masks, validate_and_pad
from vitkit.model.parts.layers import ACTIVATIONS, GATED, PatchProjection, Residual, norm, qkv
from vitkit.model.parts.pools import POOLS
from vitkit.model.parts.positions import POSITIONS, Grid, regrid
from vitkit.model.parts.relative import RELATIVE, Rows
from vitkit.model.parts.stems import STEMS
from vitkit.model.prune import prune_heads


def take(z: Tensor, rows: Rows) -> Tensor:
    """Select tokens: [B, T, D] -> [B, rows, D]."""
    return z if rows is None else z[:, rows]


class PatchEmbedding(nn.Module):
    """x_p E of Eq. 1: the linear projection E of every flattened P x P patch."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.c = c
        make, channels, pixels = STEMS[c.stem]
        self.stem, P = make(c), c.patch_size // pixels      # a hybrid's patches are cut from a feature map
        self.projection = PatchProjection(channels or c.num_channels, c.hidden_size, P, stride=P,
                                          bias="patches" not in c.without_bias)                                 # E
        self.norm = norm(c, "patches")

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        """[B, C, H, W] -> [B, N, D], and the grid (rows, columns) of the N patches."""
        x = self.projection(self.stem(validate_and_pad(x, self.c)))                       # [B, D, H/P, W/P]
        return self.norm(x.flatten(2).mT), (x.shape[2], x.shape[3])                       # [B, N, D]


class MSA(nn.Module):
    """Multi-head self-attention: Eqs. 5-8."""

    def __init__(self, c: ViTConfig, layer: int) -> None:
        super().__init__()
        self.heads = c.heads_of(layer)          # by original number: pruned ones are missing
        self.head_size, width = c.head_size, len(self.heads) * c.head_size
        self.qkv = qkv(c, width)                                                          # U_qkv
        self.norm_q, self.norm_k = (norm(c, "queries", c.head_size) for _ in range(2))
        self.relative = RELATIVE[c.relative](c, layer)
        self.norm = norm(c, "heads", width)
        self.out = nn.Linear(width, c.hidden_size, bias="out" not in c.without_bias)      # U_msa
        self.dropout_A, self.dropout = c.attention_probs_dropout_prob, nn.Dropout(c.hidden_dropout_prob)

    def project(self, z: Tensor, grid: Grid, rows: Rows = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Eq. 5: [q, k, v] = z U_qkv, each [B, h, T, d], q only for `rows`; and a bias of A, None in the paper.

        Whoever computes A = softmax(q k^T / sqrt(d) + bias) has what positions do inside attention in it.
        """
        if rows is None:
            q, k, v = self.qkv(z).chunk(3, dim=-1)
        else:
            width, W, b = self.out.in_features, self.qkv.weight, self.qkv.bias
            q = F.linear(take(z, rows), W[:width], None if b is None else b[:width])
            k, v = F.linear(z, W[width:], None if b is None else b[width:]).chunk(2, dim=-1)
        q, k, v = (t.unflatten(2, (-1, self.head_size)).transpose(1, 2) for t in (q, k, v))
        q, k = self.norm_q(q), self.norm_k(k)
        q, k, bias = (q, k, None) if self.relative is None else self.relative(q, k, grid, rows)
        return q, k, v, bias

    def forward(self, z: Tensor, grid: Grid, rows: Rows = None, head_mask: Tensor | None = None,
                bias: Tensor | None = None, seen: dict[str, Tensor | None] | None = None) -> Tensor:
        """MSA(z): [B, T, D] -> [B, rows, D], by the fused kernel, which never forms A.

        Args:
            z: LN(z_{l-1}).
            grid: (rows, columns) of the patches among the tokens.
            rows: tokens whose output is needed (default: all).
            head_mask: [h], multiplies the attention of each head (default: 1).
            bias: added to q k^T / sqrt(d) before the softmax (default: nothing).
            seen: receives what it has a key for: "A" of Eq. 6, attached to the autograd graph; "q", "k", "v" of Eq. 5.
        """
        q, k, v, own = self.project(z, grid, rows)                                        # Eq. 5
        bias = own if bias is None else bias if own is None else own + bias
        dropout = self.dropout_A if self.training else 0.0
        if seen is not None and "A" in seen:
            seen["A"] = A = scores(q, k, bias)                                            # Eq. 6   [B, h, rows, T]
            sa = F.dropout(A, dropout) @ v                                                # Eq. 7   [B, h, rows, d]
        else:
            sa = F.scaled_dot_product_attention(q, k, v, bias, dropout)                   # Eqs. 6, 7
        if seen is not None:
            seen.update({name: t for name, t in (("q", q), ("k", k), ("v", v)) if name in seen})
        if head_mask is not None:
            sa = sa * head_mask[list(self.heads)].to(sa).view(-1, 1, 1)
        return self.dropout(self.out(self.norm(sa.transpose(1, 2).flatten(2))))           # Eq. 8

    def attention(self, z: Tensor, grid: Grid, heads: Sequence[int] | None = None, rows: Rows = None) -> Tensor:
        """A of Eq. 6, for these heads and rows only: [B, heads, rows, T]."""
        q, k, _, bias = self.project(z, grid, rows)
        if heads is not None and list(heads) != list(self.heads):
            if gone := sorted(set(heads) - set(self.heads)):
                raise InputError(f"Heads {gone} are pruned from this layer; choose from {list(self.heads)}.")
            kept = [self.heads.index(head) for head in heads]
            q, k, bias = q[:, kept], k[:, kept], None if bias is None else bias[..., kept, :, :]
        return scores(q, k, bias)


def scores(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """A = softmax(q k^T / sqrt(d)) of Eq. 6, written out: [B, h, rows, T]."""
    A = q @ k.mT / q.shape[-1] ** 0.5
    return (A if bias is None else A + bias).softmax(-1)


class MLP(nn.Module):
    """Two dense layers with a GELU between them."""

    def __init__(self, c: ViTConfig, width: int | None = None) -> None:
        super().__init__()
        M, bias = width or c.intermediate_size, "mlp" not in c.without_bias
        self.fc1 = nn.Linear(c.hidden_size, 2 * M if c.hidden_act in GATED else M, bias=bias)
        self.act, self.norm = ACTIVATIONS[c.hidden_act](), norm(c, "hidden", M)
        self.fc2 = nn.Linear(M, c.hidden_size, bias=bias)
        self.dropout, self.chunk = nn.Dropout(c.hidden_dropout_prob), c.chunk_size_feed_forward

    def forward(self, z: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D], `chunk` tokens at a time if the configuration asks for it."""
        if 0 < self.chunk < z.shape[1]:
            return torch.cat([self.forward(part) for part in z.split(self.chunk, dim=1)], dim=1)
        return self.dropout(self.fc2(self.norm(self.dropout(self.act(self.fc1(z))))))


class Block(nn.Module):
    """One encoder layer: Eqs. 2 and 3. Options of `MSA.forward` may be given to `forward` and `attend`."""

    def __init__(self, c: ViTConfig, layer: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(c), norm(c)
        self.msa, self.mlp = MSA(c, layer), MLP(c)
        self.residual1, self.residual2 = Residual(c, layer), Residual(c, layer)

    def forward(self, z: Tensor, grid: Grid, rows: Rows = None, **options: Any) -> Tensor:
        """z_{l-1} [B, T, D] -> z_l [B, rows, D]."""
        return self.feed_forward(self.attend(z, grid, rows, **options))

    def attend(self, z: Tensor, grid: Grid, rows: Rows = None, **options: Any) -> Tensor:
        """Eq. 2: z'_l = MSA(LN(z_{l-1})) + z_{l-1}."""
        return self.residual1(self.msa(self.norm1(z), grid, rows, **options)) + take(z, rows)

    def feed_forward(self, z: Tensor) -> Tensor:
        """Eq. 3: z_l = MLP(LN(z'_l)) + z'_l."""
        return self.residual2(self.mlp(self.norm2(z))) + z

    def attention(self, z: Tensor, grid: Grid, heads: Sequence[int] | None = None, rows: Rows = None) -> Tensor:
        """A of Eq. 6 for the input z_{l-1}: [B, heads, rows, T]."""
        return self.msa.attention(self.norm1(z), grid, heads, rows)


class ViT(Backbone):
    """A Vision Transformer. Usually made by `vitkit.create(name)` or `vitkit.load(source)`.

    Args:
        config: the architecture.
        input_spec: how images are prepared for it (default: `InputSpec.of(config)`).
    """

    config: ViTConfig

    def __init__(self, config: ViTConfig | None = None, input_spec: InputSpec | None = None, **course: Any) -> None:
        from vitkit.model.parts.blocks import blocks  # they are made of Block

        super().__init__()
        if course or not isinstance(config, ViTConfig):
            raise ConfigError("vitkit.ViT takes a ViTConfig (or use vitkit.create('vit-b/16', ...)); the course's "
                              "ViT(img_size, in_channels, patch_size, ...) is vitkit.paper.ViT.")
        c = self.config = config
        self.input_spec = (input_spec or InputSpec.of(c)).check(c)
        self.licence = ""                       # of the weights it was loaded from; kept in what is saved of it
        self.gradient_checkpointing = False     # set it to True to trade time for memory in training
        self.patch_embedding = PatchEmbedding(c)
        self.class_token = nn.Parameter(torch.zeros(1, 1, c.hidden_size)) if c.class_token else None
        R = c.num_register_tokens
        self.register_tokens = nn.Parameter(torch.zeros(1, R, c.hidden_size)) if R else None
        self.positions = POSITIONS[c.positions if c.positions_in != "every" else "none"](c)                 # E_pos
        self.dropout, self.first_norm = nn.Dropout(c.hidden_dropout_prob), norm(c, "first")
        self.blocks: Sequence[Block] = nn.ModuleList(blocks(c, self.positions))  # type: ignore[assignment]
        self.norm, self.pool = norm(c, "final"), POOLS[c.pool](c)
        self.pre_logits = nn.Linear(c.hidden_size, c.hidden_size) if c.pre_logits else None
        self.head = self.pool.head(c) if c.num_classes else nn.Identity()
        if not self.patch_embedding.projection.weight.is_meta:      # a model without storage is filled from a file
            initialise(self)

    def forward(self, x: Tensor, head_mask: Tensor | None = None) -> Tensor:
        """Logits [B, K] of pixels [B, C, H, W].

        Args:
            x: pixels, normalised as `input_spec` says.
            head_mask: [h] or [L, h], multiplies the attention of each head (1 keeps it, 0 silences it).
        """
        return self.classify(self.features(x, head_mask))

    def classify(self, y: Tensor) -> Tensor:
        """Logits [B, K] of features y [B, D]."""
        return self.head(y if self.pre_logits is None else torch.tanh(self.pre_logits(y)))

    def features(self, x: Tensor, head_mask: Tensor | None = None) -> Tensor:
        """y of Eq. 4, [B, D]. The last block computes only the tokens that the pool reads."""
        return self.read(self.encode(x, head_mask, self.pool.rows))

    def read(self, z: Tensor, weight: Tensor | None = None) -> Tensor:
        """Eq. 4: y = LN(z_L^0), of all tokens or of those that the pool reads; `weight` as in `Mean.forward`."""
        return self.norm(self.pool(z, weight)) if self.config.norm_after_pool else self.pool(self.norm(z), weight)

    def tokens(self, x: Tensor, head_mask: Tensor | None = None) -> Tensor:
        """All tokens after the final LayerNorm, [B, T, D]: class token, registers, patches row by row."""
        return self.norm(self.encode(x, head_mask))

    def hidden_states(self, x: Tensor, head_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """(z_0, ..., z_L), each [B, T, D], before the final LayerNorm."""
        return tuple(self.states(x, head_mask))

    def encode(self, x: Tensor, head_mask: Tensor | None = None, rows: Rows = None) -> Tensor:
        """z_L, the output of the last block, [B, T, D] or only its `rows`."""
        return deque(self.states(x, head_mask, rows), maxlen=1)[0]     # one state at a time: earlier ones are freed

    def states(self, x: Tensor, head_mask: Tensor | None = None, rows: Rows = None) -> Iterator[Tensor]:
        """Yield z_0, z_1, ..., z_L (the last one only for `rows`), each computed when it is asked for."""
        z, grid = self.embed(x), self.grid_of(x)                                          # Eq. 1   [B, T, D]
        yield z
        last = self.blocks[-1]
        for block, mask in zip(self.blocks, masks(head_mask, self.config), strict=True):
            needed = rows if block is last else None
            if self.gradient_checkpointing and self.training:
                z = checkpoint(block, z, grid, needed, head_mask=mask, use_reentrant=False)
            else:
                z = block(z, grid, needed, head_mask=mask)                                # Eqs. 2, 3
            yield z

    def embed(self, x: Tensor) -> Tensor:
        """z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos (Eq. 1), [B, T, D]."""
        z, grid = self.patch_embedding(x)
        if self.class_token is not None:
            z = torch.cat([self.class_token.expand(z.shape[0], -1, -1), z], dim=1)            # [B, 1 + N, D]
        if self.config.positions_in == "first":
            z = z + self.positions(grid)
        if self.register_tokens is not None:
            n = int(self.config.class_token)
            z = torch.cat([z[:, :n], self.register_tokens.expand(z.shape[0], -1, -1), z[:, n:]], dim=1)
        return self.first_norm(self.dropout(z))

    def grid_of(self, x: Tensor) -> Grid:
        """(rows, columns) of the patches of pixels [B, C, H, W]; a padded image has more than whole ones."""
        P, more = self.config.patch_size, self.config.patch_size - 1 if self.config.pad_input else 0
        return (x.shape[2] + more) // P, (x.shape[3] + more) // P

    def attention(self, x: Tensor, layers: Indices = None, heads: Indices = None,
                  query: Indices = None) -> dict[int, Tensor]:
        """Attention A of Eq. 6, exact, computed only for what is asked.

        Args:
            x: pixels [B, C, H, W].
            layers: layers, counted from 0, negative ones from the end (default: all).
            heads: heads, by original number (default: all that the layer has).
            query: rows of A, that is the tokens that look; 0 is the class token (default: all).

        Returns:
            {layer: [B, heads, queries, T]}; every row sums to one.
        """
        L = self.config.num_hidden_layers
        wanted = indices("layers", layers, L) if layers is not None else list(range(L))
        chosen = indices("heads", heads, self.config.num_attention_heads) if heads is not None else None
        result: dict[int, Tensor] = {}
        for layer, z in enumerate(self.states(x)):
            if layer in wanted:
                rows = None if query is None else torch.tensor(indices("query", query, z.shape[1]), device=z.device)
                result[layer] = self.blocks[layer].attention(z, self.grid_of(x), chosen, rows)
            if layer >= max(wanted, default=-1):
                break
        return {layer: result[layer] for layer in wanted}

    def maps(self, x: Tensor, layers: Indices = -1) -> dict[int, Tensor]:
        """Patch tokens after these layers (default: the last), normed, as {layer: [B, D, rows, columns]}."""
        wanted = indices("layers", -1 if layers is None else layers, self.config.num_hidden_layers)
        states = zip(range(-1, max(wanted) + 1), self.states(x), strict=False)            # z_0 is before block 0
        found = {layer: self.norm(z)[:, self.config.num_prefix_tokens:] for layer, z in states if layer in wanted}
        return {layer: found[layer].mT.unflatten(2, self.grid_of(x)) for layer in wanted}

    prune_heads = prune_heads

    def set_image_size(self, size: int | tuple[int, int]) -> None:
        """Change the model's image size in place: positions are resized once, and trained from there on."""
        config = dataclasses.replace(self.config, image_size=size)
        regrid(self, config.grid)
        self.config, self.input_spec = config, dataclasses.replace(self.input_spec, size=pair(size))

    def remember_size(self, size: int | tuple[int, int]) -> None:
        """Keep the resized positions of a frequently used size until the weights change or training starts."""
        self.positions.remember(dataclasses.replace(self.config, image_size=size).grid)
