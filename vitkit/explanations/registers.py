"""Test-time registers, without training: "Vision Transformers Don't Need Trained Registers" (arXiv 2506.08010).

Many trained ViTs give a few patches that say little, often in the corners, a huge norm, and every later layer looks at
them. Few neurons of the MLPs do this. Here their activation is moved from the patches to tokens of its own, registers
that start as zero and have no position: what was kept in the patches is kept there, and maps of attention are clean.

Where this differs from the paper, because a small model changed its answers otherwise (docs/log.md):
  - There are as many registers as patches that stand out, so that together they draw as much attention.
  - No token looks at the registers before the first of these neurons has written to them.
  - Weaker neurons are moved too if that keeps the model's features closer to what they were.

`find` names these neurons from a few images; `with_registers` returns a model that shares the weights of the given one.

Legend: B images, T tokens, N patches, L layers, M neurons of an MLP, R registers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.explanations.common import Pixels, batches, eval_mode, grid_of, to_array, unwrap
from vitkit.model.parts.positions import Grid
from vitkit.model.parts.relative import Rows
from vitkit.model.vit import ViT
from vitkit.types import Array

STANDS_OUT = 5.0  # a patch stands out when its norm is more than this many times the median of its image
MOST = 64  # neurons that are moved
MORE = 6  # weaker neurons that are tried once no patch stands out
MOST_REGISTERS = 16

Neuron = tuple[int, int]  # layer and neuron of its MLP, both counted from 0


@dataclass(frozen=True, kw_only=True)
class Registers:
    """The neurons to move, and what moving them does to the images that they were found on.

    Args:
        neurons: (layer, neuron) of each, counted from 0, as they were found; empty if no patch stands out.
        count: number of registers.
        before: mean over images of the largest norm of a patch in any layer, in multiples of the layer's median.
        after: the same with registers.
    """

    neurons: tuple[Neuron, ...]
    count: int
    before: float
    after: float

    def __str__(self) -> str:
        """Say which neurons there are, counting from 1 as pictures do, and what moving them does."""
        if not self.neurons:
            return (
                f"No patch stands out: the largest norm is {self.before:.1f} times the median. The maps are those of "
                f"the model as it is."
            )
        named = ", ".join(f"{neuron + 1} of layer {layer + 1}" for layer, neuron in self.neurons[:4])
        more = f" and {len(self.neurons) - 4} more" if len(self.neurons) > 4 else ""
        return (
            f"Moved neuron{'s' if len(self.neurons) > 1 else ''} {named}{more} to {self.count} "
            f"register{'s' if self.count > 1 else ''}: the largest norm of a patch falls from {self.before:.1f} to "
            f"{self.after:.1f} times the median."
        )


class Moved(nn.Module):
    """An activation whose values for a few neurons go to the registers: the largest ones over all tokens.

    Args:
        act: the activation.
        neurons: the neurons.
        first: the first register's place among the tokens.
        count: number of registers.
    """

    def __init__(self, act: nn.Module, neurons: Sequence[int], first: int, count: int) -> None:
        super().__init__()
        self.act, self.neurons, self.first, self.count = act, list(neurons), first, count

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, M or 2 M] -> [B, T, M]."""
        h = self.act(x).clone()
        most = h[:, :, self.neurons].topk(self.count, dim=1).values  # [B, R, neurons]
        h[:, :, self.neurons] = 0
        h[:, self.first : self.first + self.count, self.neurons] = most
        return h


class Hidden(nn.Module):
    """What positions do inside attention, and registers that no token looks at yet.

    Args:
        relative: what positions do; None for nothing.
        first: the first register's place among the tokens.
        count: number of registers.
    """

    def __init__(self, relative: nn.Module | None, first: int, count: int) -> None:
        super().__init__()
        self.relative, self.first, self.count = relative, first, count

    def forward(self, q: Tensor, k: Tensor, grid: Grid, rows: Rows = None) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [B, h, T, d] -> the same, and a bias that hides the registers as keys."""
        q, k, bias = (q, k, None) if self.relative is None else self.relative(q, k, grid, rows)
        hide = k.new_zeros(1, 1, 1, k.shape[2])
        hide[..., self.first : self.first + self.count] = -torch.inf
        return q, k, hide if bias is None else bias + hide


def with_registers(model: nn.Module, neurons: Sequence[Neuron], count: int = 1) -> ViT:
    """Return the model with registers that take over these neurons; it shares the weights of the given one.

    Args:
        model: a ViT, compiled or plain.
        neurons: (layer, neuron), counted from 0; the last layer has none, since only what the pool reads is computed.
        count: number of registers (default: 1); they follow those that the model has.
    """
    vit = unwrap(model)
    c, last = vit.config, vit.config.num_hidden_layers - 1
    if count < 1 or not all(0 <= layer < last and 0 <= n < c.intermediate_size for layer, n in neurons):
        raise InputError(
            f"Expected at least one register, and neurons (layer, neuron) with layers from 0 to {last - 1} and neurons "
            f"from 0 to {c.intermediate_size - 1}; got {count} and {list(neurons)}."
        )
    if c.pool_prefix:
        raise InputError("This model's pool reads registers, so it cannot be given others without training.")
    with torch.device("meta"):  # no storage: every tensor is shared, except the registers
        new = ViT(
            dataclasses.replace(c, num_register_tokens=c.num_register_tokens + count, chunk_size_feed_forward=0),
            vit.input_spec,
        )
    state = dict(vit.state_dict())
    registers = torch.zeros(1, count, c.hidden_size).to(next(vit.parameters()))
    state["register_tokens"] = torch.cat([*([state["register_tokens"]] if c.num_register_tokens else []), registers], 1)
    new.load_state_dict(state, assign=True)
    for name, module in new.named_modules():
        module._buffers = vit.get_submodule(name)._buffers
    for layer in sorted({layer for layer, _ in neurons}):
        mlp = new.blocks[layer].mlp
        mlp.act = Moved(mlp.act, [n for at, n in neurons if at == layer], c.num_prefix_tokens, count)
    for layer in range(1 + min((layer for layer, _ in neurons), default=-1)):
        msa = new.blocks[layer].msa
        msa.relative = Hidden(msa.relative, c.num_prefix_tokens, count)
    return new.train(vit.training)


@torch.no_grad()
def patch_norms(model: nn.Module, pixels: Tensor) -> Array:
    """Compute the norm of every patch in every layer.

    Args:
        model: a ViT, compiled or plain.
        pixels: [B, C, H, W].

    Returns:
        [B, 1 + L, rows, columns], in multiples of the median over the patches of an image in a layer. The first is z_0.
    """
    with eval_mode(model, pixels) as (vit, x):
        norms = torch.stack([z[:, vit.config.num_prefix_tokens :].float().norm(dim=-1) for z in vit.states(x)], 1)
        ratio = norms / norms.median(-1, keepdim=True).values.clamp(min=1e-12)  # [B, 1 + L, N]
        return to_array(ratio.unflatten(2, grid_of(vit, x)))


@torch.no_grad()
def find(model: nn.Module, pixels: Pixels, count: int | None = None) -> Registers:
    """Find the neurons that give a few patches their huge norms.

    A neuron's strength is its mean activation in the patches that stand out, times the length of what it writes. The
    strongest is moved; if patches still stand out, the strongest of the model with registers follows, then two more at
    once, four more, and so on. Weaker neurons may prepare the patches for this: up to MORE are added, as many as
    keep the features closest to those of the model as it is.

    Args:
        model: a ViT, compiled or plain.
        pixels: a few images: one batch, or batches of one or several sizes.
        count: number of registers (default: the number of patches that stand out in an image, at most MOST_REGISTERS).
    """
    images, vit = list(batches(pixels)), unwrap(model)
    if not images:
        raise InputError("Expected at least one image to find the neurons on; got none.")
    order: list[Neuron] = []  # the strongest of the model as it is
    neurons: list[Neuron] = []
    tried: list[tuple[float, tuple[Neuron, ...]]] = []
    current = vit
    while True:
        norms = [patch_norms(current, x) for x in images]
        largest = np.concatenate([part.max((2, 3)) for part in norms]).mean(0)  # [1 + L]
        tried.append((float(largest.max()), tuple(neurons)))
        if largest.max() <= STANDS_OUT or len(neurons) >= MOST:
            break
        worst = int(largest.argmax())  # written by the blocks before z_worst
        outstanding = [part[:, worst] > STANDS_OUT for part in norms]  # [B, rows, columns] each
        if count is None:
            each = np.concatenate([mask.sum((1, 2)) for mask in outstanding]).mean()
            count = int(np.clip(round(float(each)), 1, MOST_REGISTERS))
        strength = _strength(current, images, outstanding, worst)  # [layers, M]
        strongest = [divmod(int(i), strength.shape[1]) for i in np.argsort(-strength, axis=None, kind="stable")[:MOST]]
        strongest = [neuron for neuron in strongest if strength[neuron] > 0]
        order = order or strongest
        if not strongest:
            break
        neurons += strongest[: max(len(neurons), 1)]
        current = with_registers(vit, neurons, count)
    after, chosen = min(tried)
    if chosen:
        more = [neuron for neuron in order if neuron not in chosen][:MORE]
        sets = [(*chosen, *more[:k]) for k in range(len(more) + 1)]
        chosen = min(sets, key=lambda one: _change(vit, with_registers(vit, one, count or 1), images))
        moved = with_registers(vit, chosen, count or 1)
        after = float(np.concatenate([patch_norms(moved, x).max((2, 3)) for x in images]).mean(0).max())
    return Registers(neurons=chosen, count=count or 1, before=tried[0][0], after=after)


def _change(vit: ViT, new: ViT, images: Sequence[Tensor]) -> float:
    """Return the mean cosine distance between the features of both models."""
    far = []
    for x in images:
        with eval_mode(vit, x) as (_, fitted), eval_mode(new, x):
            far.append(1 - torch.cosine_similarity(vit.features(fitted).float(), new.features(fitted).float()))
    return float(torch.cat(far).mean())


def _strength(vit: ViT, images: Sequence[Tensor], outstanding: Sequence[Array], worst: int) -> Array:
    """Return the strength of each neuron in the layers before z_worst, [layers, M]."""
    layers = min(worst, vit.config.num_hidden_layers - 1)
    total = np.zeros((layers, vit.config.intermediate_size))
    for x, mask in zip(images, outstanding, strict=True):
        if not mask.any():
            continue
        at = torch.from_numpy(mask).flatten(1)  # [B, N]
        with eval_mode(vit, x) as (_, fitted):
            parts: list[list[Tensor]] = [[] for _ in range(layers)]  # an MLP may take its tokens in chunks
            hooks = [
                block.mlp.act.register_forward_hook(lambda _, __, h, to=to: to.append(h))
                for block, to in zip(vit.blocks, parts, strict=False)
            ]
            try:
                for layer, _ in zip(range(layers + 1), vit.states(fitted), strict=False):
                    if layer:
                        h = torch.cat(parts[layer - 1], 1)[:, vit.config.num_prefix_tokens :]
                        total[layer - 1] += to_array(h[at.to(h.device)].float().sum(0))
                        parts[layer - 1].clear()
            finally:
                for hook in hooks:
                    hook.remove()
    written = [to_array(block.mlp.fc2.weight.float().norm(dim=0)) for block in vit.blocks[:layers]]
    return total / max(sum(int(mask.sum()) for mask in outstanding), 1) * np.stack(written)
