"""The embedding, dropout, and the residual sum with the LayerNorm that follows.

Legend: see __init__.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitkit.speed.differentiable.launch import LAUNCH
from vitkit.speed.differentiable.products import Context, Rounded, weight_gradient
from vitkit.speed.dropping import Depth, Dropout, depth_arguments, dropout_arguments, rows_of, tokens_of
from vitkit.speed.kernels import FP8, by_triton, processors, rows_to_fp8, sum_rows


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
