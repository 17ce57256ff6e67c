"""The parts of a block for training on CUDA, forward and backward, in as few passes over memory as possible.

Plain torch reads and writes the tokens once for every bias, residual sum, LayerNorm and GELU in a block, and once more
for the gradient of each bias. Here
  - a LayerNorm also adds the bias and the residual before it, and computes their gradients (`AddNorm`);
  - GELU's backward also sums the gradient of the bias before it (`MLP`);
  - dropout is a factor inside these kernels: a hash of a key and the element's number says what is kept, so no mask is
    stored, and the backward pass computes it again (dropping.py: `kept`);
  - stochastic depth leaves out the images that it drops: a LayerNorm writes the rows of the others side by side, and
    the one after the branch adds the results to where they belong (`Depth`);
  - attention's backward pass writes the gradients of q, k and v side by side, and sums those of their bias (`Attend`);
    where it does not apply, another pass concatenates and sums them (`Parts`);
  - the last block of a model that reads the class token alone computes the queries, and all that follows, of it alone
    (`AttendFirst`).
Gradients of weights come out of their products in fp32, without rounding. Every kernel (triton_training.py) has the
same mathematics in plain torch here, which runs on other devices and which tests compare the kernel with.

Matrix products are the library's. In a run that keeps its choices (choices.py: `pinned`), products of many rows have
the algorithm of cuBLASLt that is the fastest here (cublas.py), and the MLP's GELU and its derivative may be part of
their products, by cuBLASLt or by a kernel of ours (gelu_products.py). These, and the kernels, compute GELU by a tanh
that is as far from the exact one as bf16 rounds.

The forward products of qkv and the MLP, and those for the gradients of the MLP's and U_msa's inputs, can run in fp8,
with one scale per row. A LayerNorm finds the scale as it writes the row, and so does its backward pass. The GELU uses a
bound that follows from the row before the product and from the weights: searching such a long row for its largest value
would cost what fp8 saves, and e4m3 has enough range to absorb a loose bound.

Legend: B images, T tokens, M = B T rows, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitkit.speed import attention_gradient, cublas, gelu_products
from vitkit.speed.choices import pinning
from vitkit.speed.dropping import Depth, Dropout, depth_arguments, dropout_arguments, rows_of, tokens_of
from vitkit.speed.kernels import (
    FP8,
    FP8_MAX,
    attention_loop,
    by_triton,
    multiply,
    processors,
    rows_to_fp8,
    sum_rows,
    to_fp8,
)

Context = Any       # torch's own type of a Function's context does not declare the attributes stored in it
# How the kernels are launched: warps, rows at a time (STEP), rows and columns of a program, turns of its loop that load
# ahead (STAGES), programs per multiprocessor (per).
LAUNCH: dict[str, dict[str, int]] = {
    "norm_forward": {"num_warps": 1},
    "norm_backward": {"num_warps": 1, "STAGES": 3, "per": 8},
    "gelu_forward": {"num_warps": 4, "STEP": 4, "BLOCK": 1024},
    "gelu_backward": {"num_warps": 4, "STEP": 8, "ROWS": 128, "BLOCK": 256, "STAGES": 3},
    "columns_to_fp8": {"num_warps": 4, "STEP": 128, "BLOCK": 16},
    "attention_backward": {"num_warps": 8, "STEP": 64, "STAGES": 3},
    "first_forward": {"num_warps": 1, "STEP": 16},
    "first_backward": {"num_warps": 1, "STEP": 16},
    "side_by_side": {"num_warps": 4, "STEP": 8, "ROWS": 256, "BLOCK": 256, "STAGES": 1},
}
Small = tuple[Tensor, Tensor]       # a matrix in fp8 [M, K], and the scales of its rows [M]


class Rounded:
    """Where the backward pass of an AddNorm leaves the gradient of its branch in fp8, for the product before it."""

    small: Small | None = None

    def take(self, dy: Tensor) -> Small:
        """Return the gradient in fp8, rounded here if nobody has done so."""
        small, self.small = self.small, None
        return rows_to_fp8(dy) if small is None else small


def weight_gradient(dy: Tensor, x: Tensor, wanted: bool = True) -> Tensor | None:
    """Return dy^T x in fp32: [M, N], [M, K] -> [N, K]; None if not wanted (a frozen weight)."""
    if not wanted:
        return None
    return torch.mm(dy.mT, x, out_dtype=torch.float32) if dy.is_cuda and dy.dtype != torch.float32 \
        else (dy.mT @ x).float()


def product(x: Tensor, W: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias: [M, K], [N, K] in x's type, [N] or None -> [M, N]."""
    if bias is None:
        return cublas.product(x, W.mT) if pinning() else x @ W.mT
    bias = bias.to(x.dtype)
    return cublas.linear(x, W.mT, bias) if pinning() else torch.addmm(bias, x, W.mT)


def linear(u: Tensor, W: Tensor, bias: Tensor | None, small: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return u W^T + bias, computed in fp8 if u is there in fp8 too, as `small` with the scales of its rows."""
    return product(u, W, bias) if small is None or scale is None else small_product((small, scale), W, bias)


def input_gradient(dy: Tensor, W: Tensor) -> Tensor:
    """Return dy W, the gradient of x in `product`: [M, N], [N, K] -> [M, K]."""
    return cublas.product(dy, W) if pinning() else dy @ W


def small_product(x: Small, W: Tensor, bias: Tensor | None = None, lengths: Tensor | None = None,
                  turned: bool = False) -> Tensor:
    """Return x W^T + bias computed in fp8, or x W if `turned`: [M, N] in W's type.

    Args:
        x: [M, K] in fp8.
        W: [N, K], or [K, N] if turned; rounded to fp8 here.
        bias: [N], or None.
        lengths: [N]; filled with what `bound` needs.
        turned: whether W is to be transposed.
    """
    rows, scale = x
    bias = None if bias is None else bias.to(W.dtype)
    small = columns_to_fp8(W, lengths) if turned else rows_to_fp8(W, lengths)
    return multiply(rows, small, scale[:, None], bias, W.dtype)


def columns_to_fp8(x: Tensor, lengths: Tensor | None = None) -> Small:
    """Transpose and round to fp8 with one scale per row of the result: [M, N] -> [N, M] and the scales [N].

    Args:
        x: any floating-point type.
        lengths: [N]; filled with the sum of absolute values of each column.
    """
    if not by_triton(x):
        return rows_to_fp8(x.mT.contiguous(), lengths)
    import triton

    from vitkit.speed import triton_training

    M, N = x.shape
    out, scale = torch.empty(N, M, device=x.device, dtype=FP8), torch.empty(N, device=x.device)
    lengths, launch = torch.empty_like(scale) if lengths is None else lengths, LAUNCH["columns_to_fp8"]
    triton_training.columns_to_fp8[(triton.cdiv(N, launch["BLOCK"]),)](x, out, scale, lengths, M, N, **launch)
    return out, scale


def bound(scale: Tensor, lengths: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return scales [M] with which the rows of a small product fit into fp8, even after a GELU or its derivative.

    |x w + b| <= max |x| sum |w| + max |b|. A GELU increases nothing; its derivative and rounding add less than a
    quarter. Rows of zeros keep a scale above zero.

    Args:
        scale: [M], scales of x, whose largest value per row is 448 scale.
        lengths: [N], sum |w| of each row of the weight.
        bias: [N], or None.
    """
    rest = lengths.new_full((), 1e-30) if bias is None else bias.float().abs().amax().clamp(min=1e-30) / FP8_MAX
    return torch.addcmul(rest, scale, lengths.amax(), value=1.25)


class Embed(torch.autograd.Function):
    """Eq. 1: flattened patches times E, plus a table of everything else."""

    @staticmethod
    def forward(ctx: Context, flat: Tensor, weight: Tensor, table: Tensor) -> Tensor:
        """Return z_0, [M, D].

        Args:
            ctx: context of the backward pass.
            flat: [M, C P P], with rows of zeros for the prefix tokens.
            weight: [D, C P P].
            table: [T, D], positions and bias for the patches, complete values for the prefix tokens.
        """
        ctx.save_for_backward(flat)
        ctx.tokens = len(table)
        z = flat @ weight.to(flat.dtype).mT
        z.view(-1, *table.shape).add_(table)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dz: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the weight and the table; pixels need none."""
        flat, = ctx.saved_tensors
        of_table = dz.view(-1, ctx.tokens, dz.shape[1]).sum(0, dtype=torch.float32)
        return None, weight_gradient(dz, flat, ctx.needs_input_grad[1]), of_table


class Drop(torch.autograd.Function):
    """Dropout by itself."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, drop: Dropout) -> Tensor:
        """Map [M, N] to [M, N]."""
        ctx.drop = drop
        return dropped(x, drop)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x."""
        return dropped(dy.contiguous(), ctx.drop), None


def dropped(x: Tensor, drop: Dropout) -> Tensor:
    """Return x, [M, N], after dropout."""
    if not by_triton(x):
        return drop(x).to(x.dtype)
    import triton

    from vitkit.speed import triton_training

    out = torch.empty_like(x)
    triton_training.drop[(triton.cdiv(x.numel(), 2048),)](x, out, *drop.launch(), x.numel(), BLOCK=2048, num_warps=4)
    return out


class AddNorm(torch.autograd.Function):
    """(z', LN(z')) with z' = z + dropout(branch + bias): the residual sum and the LayerNorm that follows."""

    @staticmethod
    def forward(ctx: Context, z: Tensor, branch: Tensor | None, bias: Tensor | None, before: Depth | None,
                weight: Tensor, shift: Tensor, eps: float, drop: Dropout | None = None, after: Depth | None = None,
                fp8: bool = False, rounded: Rounded | None = None) -> tuple[Tensor, ...]:
        """Return the sum and its LayerNorm; with `fp8`, also the LayerNorm in fp8 and its row scales.

        Args:
            ctx: context of the backward pass.
            z: [M, D].
            branch: [M, D], a matrix product without its bias; None adds nothing. With `before`, of its images only.
            bias: [D] of the branch.
            before: stochastic depth of the branch; None for none.
            weight: [D] of the LayerNorm.
            shift: [D], its bias.
            eps: of the LayerNorm.
            drop: dropout of the branch and its bias; None for none.
            after: stochastic depth of the branch that reads the LayerNorm, which is returned for its images only.
            fp8: whether an fp8 product reads the result.
            rounded: where the gradient of the branch is also left in fp8; None for nowhere.
        """
        M, D = z.shape
        small: tuple[Tensor, ...] = ()
        if by_triton(z):
            import triton

            from vitkit.speed import triton_training

            total, u = (z if branch is None else torch.empty_like(z)), z.new_empty(rows_of(M, after), D)
            mean, rstd = (torch.empty(M, device=z.device) for _ in range(2))
            small = (torch.empty_like(u, dtype=FP8), torch.empty_like(mean[: len(u)])) if fp8 else ()
            triton_training.norm_forward[(M,)](
                z, branch if branch is not None else z, bias if bias is not None else weight,
                *depth_arguments(before, weight), *depth_arguments(after, weight)[:2], *dropout_arguments(drop, weight),
                weight, shift, total, u, mean, rstd, *(small or (u, mean)), tokens_of(M, before, after), D, eps,
                HAS_BRANCH=branch is not None, BEFORE=before is not None, AFTER=after is not None,
                DROP=drop is not None, FP8_TOO=fp8, WIDTH=triton.next_power_of_2(D), **LAUNCH["norm_forward"])
        else:
            added = torch.zeros_like(z, dtype=torch.float32)
            if branch is not None and bias is not None:
                added = branch.float() + bias
                added = added if drop is None else drop(added)
                added = added if before is None else before.spread(before(added))
            total = (z.float() + added).to(z.dtype)
            x = total.float()
            mean, rstd = x.mean(1), (x.var(1, correction=0) + eps).rsqrt()
            exact = (x - mean[:, None]) * rstd[:, None] * weight + shift
            exact = exact if after is None else after.taken(exact)
            u, small = exact.to(z.dtype), rows_to_fp8(exact) if fp8 else ()
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.added, ctx.drop, ctx.before, ctx.after, ctx.rounded = branch is not None, drop, before, after, rounded
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*small)
        return (z.view_as(z) if branch is None else total), u, *small

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dz_in: Tensor | None, du: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        """Return the gradients of z, the branch, its bias, and the LayerNorm's weight and bias."""
        (z, weight, mean, rstd), drop, before, after = ctx.saved_tensors, ctx.drop, ctx.before, ctx.after
        M, D = z.shape
        du = z.new_zeros(rows_of(M, after), D) if du is None else du.contiguous()
        dz_in = None if dz_in is None else dz_in.contiguous()
        if by_triton(z):
            import triton

            from vitkit.speed import triton_training

            launch = dict(LAUNCH["norm_backward"])
            count = launch.pop("per") * processors(z)
            dz = torch.empty_like(z)
            dbranch = dz if before is None and drop is None else z.new_empty(rows_of(M, before), D)
            sums, small = torch.empty(count, 3, D, device=z.device), None
            if ctx.rounded is not None:
                small = torch.empty_like(dbranch, dtype=FP8), torch.empty(len(dbranch), device=z.device)
                ctx.rounded.small = small
            triton_training.norm_backward[(count,)](
                z, du, dz_in if dz_in is not None else du, weight, mean, rstd, *depth_arguments(before, weight),
                *depth_arguments(after, weight)[:2], *dropout_arguments(drop, weight), dz, dbranch,
                *(small or (dz, mean)), sums, M, tokens_of(M, before, after), D, triton.cdiv(M, count),
                HAS_DZ=dz_in is not None, BEFORE=before is not None, AFTER=after is not None, DROP=drop is not None,
                FP8_TOO=small is not None, PROGRAMS=count, WIDTH=triton.next_power_of_2(D), **launch)
            of_weight, of_shift, of_bias = sum_rows(sums)
        else:
            x, g = (z.float() - mean[:, None]) * rstd[:, None], du.float()
            g = g if after is None else after.spread(g)
            of_weight, of_shift = (g * x).sum(0), g.sum(0)
            g = g * weight
            whole = rstd[:, None] * (g - g.mean(1, keepdim=True) - x * (g * x).mean(1, keepdim=True))
            whole = whole if dz_in is None else whole + dz_in.float()
            dz = whole.to(z.dtype)
            scaled = whole if before is None else before(before.taken(whole))
            scaled = scaled if drop is None else drop(scaled)
            dbranch, of_bias = scaled.to(z.dtype), scaled.sum(0)
        if not ctx.added:
            return dz, None, None, None, of_weight, of_shift, None, None, None, None, None
        return dz, dbranch, of_bias, None, of_weight, of_shift, None, None, None, None, None


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


class Product(torch.autograd.Function):
    """x W^T without a bias."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, rounded: Rounded | None = None) -> Tensor:
        """Map [M, K] and [N, K] to [M, N].

        Args:
            ctx: context of the backward pass.
            x: [M, K].
            weight: [N, K].
            rounded: makes the product for the gradient of x an fp8 one; None for x's own type.
        """
        W = weight.to(x.dtype)
        ctx.save_for_backward(x, W)
        ctx.rounded = rounded
        return product(x, W)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and the weight."""
        x, W = ctx.saved_tensors
        dy = dy.to(x.dtype)
        dx = input_gradient(dy, W) if ctx.rounded is None else small_product(ctx.rounded.take(dy), W, turned=True)
        return dx, weight_gradient(dy, x, ctx.needs_input_grad[1]), None


class MLP(torch.autograd.Function):
    """dropout(GELU(u W_1 + b_1)) W_2: both layers of an MLP; AddNorm adds the second bias."""

    @staticmethod
    def forward(ctx: Context, u: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, tanh: bool,
                drop: Dropout | None = None, rounded: Rounded | None = None, small: Tensor | None = None,
                scale: Tensor | None = None) -> Tensor:
        """Map [M, D] to [M, D].

        Args:
            ctx: context of the backward pass.
            u: [M, D].
            weight1: [H, D].
            bias1: [H].
            weight2: [D, H].
            tanh: whether GELU is the tanh approximation.
            drop: dropout after the GELU; None for none.
            rounded: where the gradient of the result is found in fp8; used with `small` only.
            small: u in fp8, to run the products in fp8; None for u's own type.
            scale: [M], scales of `small`.
        """
        W1, W2 = weight1.to(u.dtype), weight2.to(u.dtype)
        inner = scales = None
        ctx.ours = False
        if small is None or scale is None:
            b1 = bias1.to(u.dtype)
            ctx.ours = drop is None and pinning() and gelu_products.faster(u, W1, b1, W2, tanh, MLP.activate,
                                                                           MLP.derive)
            g, h = gelu_products.linear_gelu(u, W1.mT, b1, tanh) if ctx.ours else MLP.activate(u, W1, b1, tanh, drop)
        else:
            lengths = torch.empty(len(weight1), device=u.device)
            h, scales = small_product((small, scale), W1, bias1, lengths), bound(scale, lengths, bias1)
            scales = scales if drop is None else scales * max(drop.scale, 1.0)
            g, inner = gelu(h, tanh, drop, scales)
        ctx.save_for_backward(u, h, g, W1, W2)
        ctx.tanh, ctx.drop, ctx.fp8, ctx.rounded = tanh, drop, scales is not None, rounded or Rounded()
        return product(g, W2) if inner is None or scales is None else small_product((inner, scales), W2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of u, both weights and the first bias."""
        (u, h, g, W1, W2), drop = ctx.saved_tensors, ctx.drop
        dy = dy.to(u.dtype).contiguous()
        inner = scales = None
        if ctx.fp8:
            small, lengths = ctx.rounded.take(dy), torch.empty(h.shape[1], device=u.device)
            dh, scales = small_product(small, W2, None, lengths, turned=True), bound(small[1], lengths)
            scales = scales if drop is None else scales * max(drop.scale, 1.0)
            dh, of_bias, inner = gelu_gradient(dh, h, ctx.tanh, drop, scales)
        elif ctx.ours:
            dh, of_bias = gelu_products.product_dgelu(dy, W2, h)
        else:
            dh, of_bias = MLP.derive(dy, W2, h, ctx.tanh, drop)
        if inner is None or scales is None:
            du = input_gradient(dh, W1)
        else:
            du = small_product((inner, scales), W1, turned=True)
        return (du, weight_gradient(dh, u, ctx.needs_input_grad[1]), of_bias,
                weight_gradient(dy, g, ctx.needs_input_grad[3]), None, None, None, None, None)

    @staticmethod
    def activate(u: Tensor, W1: Tensor, b1: Tensor, tanh: bool, drop: Dropout | None = None) -> tuple[Tensor, Tensor]:
        """Return g, which is GELU(h) after dropout, and h = u W_1^T + b_1, by a library."""

        def apart() -> tuple[Tensor, Tensor]:
            h = product(u, W1, b1)
            return gelu(h, tanh, drop)[0], h

        return cublas.linear_gelu(u, W1.mT, b1, apart) if drop is None and pinning() else apart()

    @staticmethod
    def derive(dy: Tensor, W2: Tensor, h: Tensor, tanh: bool, drop: Dropout | None = None) -> tuple[Tensor, Tensor]:
        """Return the gradient of h if that of g W_2^T is dy, and its sums over the rows, by a library."""

        def apart() -> tuple[Tensor, Tensor]:
            return gelu_gradient(input_gradient(dy, W2), h, tanh, drop)[:2]

        return cublas.product_dgelu(dy, W2, h, apart) if drop is None and pinning() else apart()


def gelu(h: Tensor, tanh: bool, drop: Dropout | None, scales: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return GELU(h) after dropout, and that in fp8 if there are scales.

    Args:
        h: [M, N].
        tanh: whether GELU is the tanh approximation.
        drop: dropout of the result; None for none.
        scales: [M], of the rows in fp8; None for no fp8.
    """
    M, N = h.shape
    inner = torch.empty_like(h, dtype=FP8) if scales is not None else None
    if by_triton(h):
        import triton

        from vitkit.speed import triton_training

        g, launch = torch.empty_like(h), dict(LAUNCH["gelu_forward"])
        launch["BLOCK"] = block = min(launch["BLOCK"], triton.next_power_of_2(N))
        triton_training.gelu_forward[(triton.cdiv(N, block), triton.cdiv(M, launch["STEP"]))](
            h, g, inner if inner is not None else g, scales if scales is not None else g,
            *dropout_arguments(drop, g), M, N, TANH=tanh, APPROXIMATE=g.is_cuda, DROP=drop is not None,
            FP8_TOO=inner is not None, **launch)
        return g, inner
    g = F.gelu(h, approximate="tanh" if tanh else "none")
    g = g if drop is None else drop(g).to(g.dtype)
    if inner is not None and scales is not None:
        inner.copy_(to_fp8(g, scales[:, None]))
    return g, inner


def gelu_gradient(dg: Tensor, h: Tensor, tanh: bool, drop: Dropout | None,
                  scales: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradient of h in `gelu`, its sums over the rows in fp32, and it in fp8 if there are scales.

    Args:
        dg: [M, N], the gradient of the result; may be overwritten.
        h: [M, N].
        tanh: see `gelu`.
        drop: see `gelu`.
        scales: [M], of the gradient's rows in fp8; None for no fp8.
    """
    M, N = h.shape
    inner = torch.empty_like(dg, dtype=FP8) if scales is not None else None
    if by_triton(h):
        import triton

        from vitkit.speed import triton_training

        launch = dict(LAUNCH["gelu_backward"])
        launch["BLOCK"] = block = min(launch["BLOCK"], triton.next_power_of_2(N))
        sums = torch.empty(chunks := triton.cdiv(M, launch["ROWS"]), N, device=h.device)
        triton_training.gelu_backward[(triton.cdiv(N, block), chunks)](
            h, dg, inner if inner is not None else dg, scales if scales is not None else sums, sums,
            *dropout_arguments(drop, sums), M, N, TANH=tanh, APPROXIMATE=h.is_cuda, DROP=drop is not None,
            FP8_TOO=inner is not None, **launch)
        return dg, sum_rows(sums), inner
    dg = dg if drop is None else drop(dg).to(dg.dtype)
    dh = torch.ops.aten.gelu_backward(dg, h, approximate="tanh" if tanh else "none")
    if inner is not None and scales is not None:
        inner.copy_(to_fp8(dh, scales[:, None]))
    return dh, dh.float().sum(0), inner
