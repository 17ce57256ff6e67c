"""The model as a graph whose outputs are everything that the page shows, with patches that can be erased.

Legend: N patches, T tokens, D width, h heads, d = D / h, L layers, K classes. The graph takes one image.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn

from vitkit.errors import CannotExpress
from vitkit.model.backbone import Backbone
from vitkit.model.config import Biasless
from vitkit.model.create import need_vit
from vitkit.model.parts.fit import EVERY_PART, Takes, unfit
from vitkit.model.vit import ViT

# The page shows Eqs. 1-8 as the paper has them, so nothing may stand between them. The inside of the MLP does not show.
TAKES: Takes = {
    "hidden_act": EVERY_PART["hidden_act"],
    "without_bias": tuple(part for part in get_args(Biasless) if part != "head"),
    "positions": ("none", "2d", "sincos"),
    "pool": ("mean",),
}
OUTPUTS = ("logits", "lens", "read", "embedded", "states", "middles", "q", "k", "v", "attention")
MAX_MEGABYTES = 100  # of weights in 16 bits: about what a phone's browser can load
ERASED = -1e9  # added to q k^T / sqrt(d): its softmax is 0


def check(model: Backbone) -> ViT:
    """Return the model if the page can show it.

    Args:
        model: a ViT or a ResNet.

    Raises:
        CannotExpress: the page cannot show this model; the message says why.
    """
    vit = need_vit(model, "The explorable page")
    c, spec = vit.config, vit.input_spec
    odd = unfit(c, TAKES)
    odd += [f"{name}={value}" for name, value in (("num_register_tokens", c.num_register_tokens),) if value]
    odd += [f"layer_scale={c.layer_scale}"] if c.layer_scale is not None else []
    odd += ["pruned heads"] if c.pruned_heads else []
    odd += ["the hidden layer of pre_logits"] if c.pre_logits else []
    if odd:
        raise CannotExpress(
            f"The explorable page shows Eqs. 1-8 of the paper, and this model has {', '.join(odd)}. Use "
            f"`vitkit explain` or `vitkit serve` for it."
        )
    if not c.num_classes:
        raise CannotExpress(
            "The explorable page needs a model with a classification head, and this one has none. Fit one with "
            "`vitkit probe DATA --from WEIGHTS`."
        )
    if spec.several:
        raise CannotExpress(
            "The explorable page shows one class per photo, and this model gives several labels. Use `vitkit explain` "
            "or `vitkit serve` for it."
        )
    if spec.channels == "raw" or spec.size != c.image_hw or c.image_hw != tuple(side * c.patch_size for side in c.grid):
        raise CannotExpress(
            f"The explorable page needs RGB or gray images of whole patches; this model takes {len(spec.mean)} "
            f"channels ({spec.channels}) of {spec.size[0]} x {spec.size[1]} pixels in patches of {c.patch_size}."
        )
    size = 2 * sum(p.numel() for p in vit.parameters()) / 1e6
    if size > MAX_MEGABYTES:
        raise CannotExpress(
            f"The explorable page loads at most {MAX_MEGABYTES} MB of weights into a browser; this model has "
            f"{size:.0f} MB in 16 bits. Use a smaller one, such as ViT-Ti/16 or ViT-S/16."
        )
    return vit


class Explored(nn.Module):
    """A ViT that returns what happens inside it.

    Args:
        model: a ViT that `check` accepts.
    """

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        """Return the OUTPUTS for one image.

        An erased patch gets no attention from any token in any layer, and does not count in a mean over patches. For
        the tokens that remain, this equals a sequence without it.

        Args:
            pixels: [1, C, H, W], normalised as the model's InputSpec says.
            keep: [N], 1 for patches to keep and 0 for those to erase.

        Returns:
            logits [K]; read [L + 1, D], y of Eq. 4 if it were computed from z_l, and lens [L + 1, K], the head's logits
            for it; embedded [N, D], x_p E; states [L + 1, T, D], z_l; middles [L, T, D], z'_l; q, k, v [L, h, T, d];
            attention [L, h, T, T].
        """
        model = self.model
        prefix = torch.ones(model.config.num_prefix_tokens)
        kept = torch.cat([prefix, keep])  # [T]
        bias = ((1 - kept) * ERASED)[None, None, None]  # [1, 1, 1, T]
        embedded, grid = model.patch_embedding(pixels)
        z = model.embed(pixels)  # Eq. 1
        states, middles, found = [z], [], []
        for block in model.blocks:
            seen: dict[str, Tensor | None] = dict.fromkeys(("q", "k", "v", "A"))
            middle = block.attend(z, grid, bias=bias, seen=seen)  # Eq. 2
            z = block.feed_forward(middle)  # Eq. 3
            states.append(z)
            middles.append(middle)
            found.append(seen)
        weight = kept[None, :, None]
        read = torch.cat([model.read(z, weight) for z in states])  # Eq. 4
        lens = model.classify(read)
        inside = [torch.cat([one[name] for one in found]) for name in ("q", "k", "v", "A")]  # type: ignore[misc]
        return lens[-1], lens, read, embedded[0], torch.cat(states), torch.cat(middles), *inside
