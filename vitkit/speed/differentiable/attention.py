"""Eqs. 5 to 7: tokens to the heads' outputs.

Legend: see __init__.py; h heads, d their size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitkit.speed import attention_gradient
from vitkit.speed.differentiable.launch import LAUNCH
from vitkit.speed.differentiable.products import Context, input_gradient, linear, product, weight_gradient
from vitkit.speed.kernels import attention_loop, by_triton, sum_rows


class Parts(torch.autograd.Function):
    """Eq. 5: u -> q, k, v, as views [M, h d] of one product."""

    @staticmethod
    def forward(ctx: Context, u: Tensor, weight: Tensor, bias: Tensor | None, small: Tensor | None = None,
                scale: Tensor | None = None) -> tuple[Tensor, ...]:
        """Map [M, D] to three tensors [M, h d].

        Args:
            ctx: context of the backward pass.
            u: [M, D].
            weight: [3 h d, D].
            bias: [3 h d], or None.
            small: u in fp8, to run the products in fp8; None for u's own type.
            scale: [M], scales of `small`.
        """
        W = weight.to(u.dtype)
        ctx.save_for_backward(u, W)
        ctx.biased = bias is not None
        return linear(u, W, bias, small, scale).chunk(3, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of u, the weight and the bias."""
        u, W = ctx.saved_tensors
        M, N = gradients[0].shape
        if by_triton(u):
            import triton

            from vitkit.speed import triton_training

            launch = dict(LAUNCH["side_by_side"])
            launch["BLOCK"] = block = min(launch["BLOCK"], triton.next_power_of_2(N))
            dy, chunks = torch.empty(M, 3 * N, device=u.device, dtype=u.dtype), triton.cdiv(M, launch["ROWS"])
            sums = torch.empty(chunks, 3 * N, device=u.device)
            triton_training.side_by_side[(triton.cdiv(N, block), chunks, 3)](
                *(part.contiguous() for part in gradients), dy, sums, M, N, **launch)
            of_bias = sum_rows(sums)
        else:
            dy = torch.cat(gradients, dim=1)
            of_bias = dy.float().sum(0)
        of_weight = weight_gradient(dy, u, ctx.needs_input_grad[1])
        return input_gradient(dy, W), of_weight, of_bias if ctx.biased else None, None, None


class Attend(torch.autograd.Function):
    """Eqs. 5 to 7 for few tokens: u -> the heads' outputs side by side. The backward pass is one kernel per head, which
    writes the gradients of q, k and v side by side too; libraries need three and another to concatenate them.

    The gradients of two of the three biases need no sum over keys: that of v is the sum of the outputs' gradients,
    because the rows of A sum to 1, and that of k is 0, because it adds the same to a whole row before the softmax.
    """

    @staticmethod
    def forward(ctx: Context, u: Tensor, weight: Tensor, bias: Tensor | None, images: int, heads: int,
                small: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """Map [M, D] to [M, h d].

        Args:
            ctx: context of the backward pass.
            u: [M, D].
            weight: [3 h d, D].
            bias: [3 h d], or None.
            images: among which the M tokens are divided.
            heads: h.
            small: u in fp8, to run the product in fp8; None for u's own type.
            scale: [M], scales of `small`.
        """
        W = weight.to(u.dtype)
        qkv = linear(u, W, bias, small, scale)
        T = len(u) // images
        lse = torch.empty(images, heads, T, device=u.device)
        sa = attention_loop(qkv, heads, images, T, lse)
        ctx.save_for_backward(u, W, qkv, sa, lse)
        ctx.images, ctx.heads, ctx.biased = images, heads, bias is not None
        return sa

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dsa: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of u, the weight and the bias."""
        (u, W, qkv, sa, lse), images, heads = ctx.saved_tensors, ctx.images, ctx.heads
        dsa, (M, width) = dsa.contiguous(), sa.shape
        T, size = M // images, width // heads
        if attention_gradient.takes(T, size, u.device) and u.dtype == torch.bfloat16:
            dqkv, of_bias = attention_gradient.attention_gradient(qkv, sa, dsa, lse)
        elif by_triton(u):
            import triton

            from vitkit.speed import triton_training

            launch = dict(LAUNCH["attention_backward"])
            dqkv, sums = torch.empty_like(qkv), torch.empty(images, 3 * width, device=u.device)
            triton_training.attention_backward[(heads, images)](
                qkv, sa, dsa, lse, dqkv, sums, T, width, size**-0.5, ROWS=triton.next_power_of_2(T), SIZE=size,
                REST=rest(T, launch["STEP"]), **launch)
            of_bias = sum_rows(sums)
        else:
            q, k, v = heads_of(qkv.float(), images, heads)
            do, = heads_of(dsa.float(), images, heads, 1)
            A, dA = (q @ k.mT * size**-0.5 - lse.view(images, heads, T, 1)).exp(), do @ v.mT
            dS = A * (dA - (A * dA).sum(-1, keepdim=True)) * size**-0.5
            parts = [part.transpose(1, 2).reshape(M, width) for part in (dS @ k, dS.mT @ q, A.mT @ do)]
            dqkv = torch.cat(parts, dim=1).to(u.dtype)
            of_bias = torch.cat([parts[0].sum(0), torch.zeros_like(parts[1][0]), dsa.float().sum(0)])
        of_weight = weight_gradient(dqkv, u, ctx.needs_input_grad[1])
        return input_gradient(dqkv, W), of_weight, of_bias if ctx.biased else None, None, None, None, None


class AttendFirst(torch.autograd.Function):
    """Eqs. 5 to 7 for the query of each image's first token alone, with the keys and values of all tokens."""

    @staticmethod
    def forward(ctx: Context, u: Tensor, weight: Tensor, bias: Tensor | None, images: int, heads: int,
                small: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """Map [M, D] to [B, h d]; the arguments are those of `Attend`. The query is not computed in fp8."""
        W, width = weight.to(u.dtype), len(weight) // 3
        first = u.view(images, -1, u.shape[1])[:, 0].contiguous()
        q = product(first, W[:width], None if bias is None else bias[:width])
        kv = linear(u, W[width:], None if bias is None else bias[width:], small, scale)
        lse = torch.empty(images, heads, device=u.device)
        T, size = len(u) // images, width // heads
        if by_triton(u):
            import triton

            from vitkit.speed import triton_training

            sa = torch.empty_like(q)
            triton_training.first_forward[(heads, images)](
                q, kv, sa, lse, T, size, size**-0.5, WIDTH=triton.next_power_of_2(size), **LAUNCH["first_forward"])
        else:
            (one,), (k, v) = heads_of(q.float(), images, heads, 1), heads_of(kv.float(), images, heads, 2)
            scores = one @ k.mT * size**-0.5
            lse.copy_(scores.logsumexp(-1)[:, :, 0])
            sa = (scores.softmax(-1) @ v).reshape(q.shape).to(q.dtype)
        ctx.save_for_backward(u, W, first, q, kv, sa, lse)
        ctx.biased = bias is not None
        return sa

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dsa: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of u, the weight and the bias; see `Attend` about those of k's and v's biases."""
        u, W, first, q, kv, sa, lse = ctx.saved_tensors
        dsa, (images, heads), width = dsa.contiguous(), lse.shape, q.shape[1]
        T, size = len(u) // images, width // heads
        if by_triton(u):
            import triton

            from vitkit.speed import triton_training

            dq, dkv = torch.empty_like(q), torch.empty_like(kv)
            triton_training.first_backward[(heads, images)](
                q, kv, sa, dsa, lse, dq, dkv, T, size, size**-0.5, WIDTH=triton.next_power_of_2(size),
                **LAUNCH["first_backward"])
        else:
            (one,), (k, v) = heads_of(q.float(), images, heads, 1), heads_of(kv.float(), images, heads, 2)
            do, = heads_of(dsa.float(), images, heads, 1)
            A, dA = (one @ k.mT * size**-0.5 - lse[:, :, None, None]).exp(), do @ v.mT
            dS = A * (dA - (A * dA).sum(-1, keepdim=True)) * size**-0.5
            dq = (dS @ k).reshape(q.shape).to(q.dtype)
            parts = [part.transpose(1, 2).reshape(len(u), width) for part in (dS.mT @ one, A.mT @ do)]
            dkv = torch.cat(parts, dim=1).to(kv.dtype)
        du = input_gradient(dkv, W[width:])
        du.view(images, T, -1)[:, 0] += input_gradient(dq, W[:width])
        wanted, of_q = ctx.needs_input_grad[1], dq.float().sum(0)
        weights = [part for part in (weight_gradient(dq, first, wanted), weight_gradient(dkv, u, wanted))
                   if part is not None]
        of_bias = torch.cat([of_q, torch.zeros_like(of_q), dsa.float().sum(0)])
        return (du, torch.cat(weights) if weights else None, of_bias if ctx.biased else None, None, None, None, None)


def rest(T: int, step: int) -> int:
    """Return how many keys attention's backward pass handles after the last whole step: 0, or a power of two below it.

    197 tokens then take 3 x 64 + 16 keys instead of 4 x 64.
    """
    found = max(16, 1 << (T % step - 1).bit_length()) if T % step else step
    return found if found < step else 0


def heads_of(x: Tensor, images: int, heads: int, count: int = 3) -> tuple[Tensor, ...]:
    """Return q, k and v of each head: [M, count h d] -> count x [B, h, T, d]."""
    return tuple(part.view(images, -1, heads, part.shape[1] // heads).transpose(1, 2) for part in x.chunk(count, dim=1))


def attends(T: int, size: int, device: torch.device) -> bool:
    """Return whether `Attend` is the fastest way known for T tokens and this head size; other devices test it."""
    return device.type != "cuda" or (
        128 < T <= 256 and size == 64 and torch.cuda.get_device_capability(device)[0] == 9)
