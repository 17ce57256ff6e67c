"""NORMS, ACTIVATIONS, the patch projection, U_qkv without a bias for keys, and what later work does to a residual
branch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.model.config import ViTConfig

NORMS: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


def norm(c: ViTConfig, place: str = "block", width: int | None = None) -> nn.Module:
    """Return a new norm for one place in the model; nn.Identity if the model has none there.

    Args:
        c: the architecture.
        place: `block` (always there), or one of the places that `c.norms` lists.
        width: of what is normalised (default: the model's).
    """
    if place != "block" and place not in c.norms:
        return nn.Identity()
    return NORMS[c.norm](width or c.hidden_size, eps=c.layer_norm_eps)


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x), the activation of OpenAI's CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply it element by element."""
        return x * torch.sigmoid(1.702 * x)


class SwiGLU(nn.Module):
    """silu(gate) value (arXiv 2002.05202); the first half of the input is the gate."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2 M] -> [..., M]."""
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "silu": nn.SiLU,
    "swiglu": SwiGLU,
}
GATED = ("swiglu",)  # activations that halve: the layer before them is twice as wide


class PatchProjection(nn.Conv2d):
    """E of Eq. 1, stored as the kernel of a convolution with stride P, as all public checkpoints store it.

    Such a convolution is one matrix product over flattened patches, and it is computed as one: libraries' convolutions
    are slower in the backward pass, and some runtimes' are inaccurate in 8 bits.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, D, H/P, W/P], H and W being multiples of P."""
        (B, C, H, W), P = x.shape, self.kernel_size[0]
        x = x.reshape(B, C, H // P, P, W // P, P).permute(0, 2, 4, 1, 3, 5)  # [B, H/P, W/P, C, P, P]
        return F.linear(x.flatten(3), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class KeylessQKV(nn.Linear):
    """U_qkv whose keys have no bias (BEiT, EVA, DINOv3). `bias` still reads as one tensor [3 h d]."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)
        self.bias_q, self.bias_v = (nn.Parameter(torch.zeros(out // 3)) for _ in range(2))

    @property
    def bias(self) -> Tensor:  # type: ignore[override]
        """The bias of queries, zeros, the bias of values: [3 h d]."""
        return torch.cat([self.bias_q, torch.zeros_like(self.bias_q), self.bias_v])


def qkv(c: ViTConfig, width: int) -> nn.Linear:
    """Return U_qkv of Eq. 5 for heads that are `width` wide together."""
    if "keys" in c.without_bias:
        return KeylessQKV(c.hidden_size, 3 * width)
    return nn.Linear(c.hidden_size, 3 * width, bias=c.qkv_bias)


class Residual(nn.Module):
    """Layer scale and stochastic depth, applied to a branch before it is added back. The paper has neither."""

    def __init__(self, c: ViTConfig, layer: int) -> None:
        super().__init__()
        self.rate = c.drop_path_rate * layer / max(c.num_hidden_layers - 1, 1)
        self.gamma = None if c.layer_scale is None else nn.Parameter(torch.full((c.hidden_size,), c.layer_scale))

    def forward(self, branch: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        if self.gamma is not None:
            branch = branch * self.gamma
        if self.training and self.rate > 0:
            branch = branch * drop_path(len(branch), self.rate, branch.device)[:, None, None].to(branch.dtype)
        return branch


def drop_path(images: int, rate: float, device: torch.device) -> Tensor:
    """Draw what stochastic depth multiplies each image's branch by: 0, or 1 / (1 - rate). [B]

    Each image is dropped with the given probability. How many of a batch are dropped varies by at most one, so that an
    implementation may leave out the others' computation, with shapes that never change.
    """
    drawn = torch.rand(images + 1, device=device)
    place = drawn[:-1].argsort(stable=True).argsort() - surely_dropped(images, rate)
    kept = (place > 0) | (place == 0) & (drawn[-1] >= chance_of_another(images, rate))
    return kept / max(1 - rate, 1e-6)


def surely_dropped(images: int, rate: float) -> int:
    """Return how many of a batch's images stochastic depth always drops: those with the lowest random numbers."""
    return min(math.floor(images * rate), images - 1)


def chance_of_another(images: int, rate: float) -> float:
    """Return the probability with which it drops one more."""
    return images * rate - surely_dropped(images, rate)
