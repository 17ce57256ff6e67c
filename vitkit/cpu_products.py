"""Matrix products in fp32 on the CPU by oneDNN, where it uses wider instructions than torch's own library.

torch computes them with MKL, which runs its AVX-512 code on Intel's CPUs alone: on others that have these instructions,
oneDNN, which is part of torch too, takes half the time. The choice depends on the CPU only, so that a run that is
repeated or resumed rounds alike. Everything else, and every other CPU, runs as torch does.

Legend: x [..., K], W [N, K], bias [N], y = x W^T + bias [..., N].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from vitkit.cpu_features import vendor

INTEL = "GenuineIntel"
LEAST = 2_000_000  # multiplications of a product for which it matters which library computes it
ROWS = 8  # of x; fewer are not a matrix product to torch


@functools.cache
def onednn_is_wider() -> bool:
    """Whether oneDNN uses AVX-512 here and MKL does not."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and vendor() not in ("", INTEL)
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def takes(x: Tensor, W: Tensor) -> bool:
    """Whether oneDNN computes this product: both are plain fp32 matrices on the CPU, and not small."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and type(W) in (Tensor, torch.nn.Parameter)
    return (
        plain
        and x.device.type == W.device.type == "cpu"
        and x.dtype == W.dtype == torch.float32
        and W.ndim == 2
        and x.numel() >= ROWS * W.shape[1]
        and x.numel() * W.shape[0] >= LEAST
        and onednn_is_wider()
    )


def linear(x: Tensor, W: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return y, by oneDNN where it is the better library."""
    if not takes(x, W):
        return F.linear(x, W, bias)
    if torch.is_grad_enabled() and (x.requires_grad or W.requires_grad or (bias is not None and bias.requires_grad)):
        return cast(Tensor, Linear.apply(x, W, bias))  # type: ignore[no-untyped-call]
    return _by_onednn(x, W, bias)


def linear_gelu(x: Tensor, W: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """Return GELU(y) in one pass over it where oneDNN computes y; no gradients.

    Args:
        x: see the legend.
        W: see the legend.
        bias: see the legend.
        approximate: `none` or `tanh`, as for torch's GELU.
    """
    if not takes(x, W):
        return F.gelu(F.linear(x, W, bias), approximate=approximate)
    return _by_onednn(x, W, bias, "gelu", approximate)


def _by_onednn(x: Tensor, W: Tensor, bias: Tensor | None = None, then: str = "none", how: str = "") -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, W, bias, then, [], how))


class Linear(torch.autograd.Function):
    """y with its gradients, each one product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, bias: Tensor | None) -> Tensor:
        """Return y."""
        ctx.save_for_backward(x, W)
        return _by_onednn(x, W, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W and the bias."""
        x, W = ctx.saved_tensors
        of_x, of_W, of_bias = ctx.needs_input_grad
        rows, flat = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = _by_onednn(rows, W.mT).view(x.shape) if of_x else None
        return dx, _by_onednn(rows.mT, flat.mT) if of_W else None, rows.sum(0) if of_bias else None


class _Products(TorchFunctionMode):
    """A context in which `torch.nn.functional.linear` is `linear`. It is the present thread's alone."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch's, or ours in its place; a compiler sees torch's own."""
        if func is F.linear and not torch.compiler.is_compiling():
            return linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def fp32_products(device: str) -> AbstractContextManager[Any]:
    """A context in which linear layers in fp32 on the CPU run by the better library.

    Args:
        device: the device type: cpu, cuda, ...
    """
    return _Products() if device == "cpu" and onednn_is_wider() else nullcontext()
