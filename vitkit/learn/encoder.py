"""Exercises on Eqs. 2-4 and what surrounds them: LayerNorm, the block, the MLP, the output, counting, accuracy.

Legend: B images, N tokens, D width, M width of the MLP, L layers, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.learn.embedding import random

EPS = 1e-3  # large enough that leaving it out can be seen


def layer_norm(x: Tensor, g: Tensor, b: Tensor, eps: float = EPS) -> Tensor:
    """LN(x)."""
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt() * g + b


def _ln_inputs(seed: int) -> tuple[Any, ...]:
    x, g, b = random(seed, (2, 6, 12), (12,), (12,))
    return 0.05 * x + 0.5, g, b, EPS


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _mix(x: Tensor) -> Tensor:
    """Stand in for MSA: tokens exchange something, and zero does not stay zero."""
    return torch.tanh(x.flip(1) * 0.7 + 0.3 * x.mean(1, keepdim=True) + 0.2)


def _then(y: Tensor, f: Any) -> Tensor:
    result: Tensor = f(y)
    return result


def _mlp(z: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor) -> Tensor:
    return F.gelu(z @ W1 + b1) @ W2 + b2


def _mlp_with(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda z, W1, b1, W2, b2: act(z @ W1 + b1) @ W2 + b2


def count(L: int, D: int, M: int, P: int, C: int, N: int, K: int, **without: int) -> int:
    """The parameters of a ViT; `without` counts parts differently, for the mistakes."""
    w = {
        "bias": 1,
        "cls": 1,
        "pos": 1,
        "pos_cls": 1,
        "ln": 2,
        "final": 1,
        "head": 1,
        "out": 1,
        "qkv": 3,
        "fc2": 1,
    } | without
    bias = w["bias"]
    embed = P * P * C * D + bias * D
    block = w["ln"] * 2 * D + w["qkv"] * (D * D + bias * D) + w["out"] * (D * D + bias * D)
    block += D * M + bias * M + w["fc2"] * (M * D + bias * D)
    head = w["head"] * (D * K + bias * K)
    return embed + w["cls"] * D + w["pos"] * (N + w["pos_cls"]) * D + L * block + w["final"] * 2 * D + head


def _batches(seed: int) -> tuple[Any, ...]:
    rng = torch.Generator().manual_seed(seed)
    logits, labels = [], []
    for n, right, wrong in ((8, (3, 2, 4)[seed], 1), (8, (5, 5, 7)[seed], 3), (3, 3, 1)):
        one = torch.randn(n, 5, generator=rng)
        order = one.argsort(1, descending=True)
        logits.append(one)
        labels.append(torch.cat([order[:right, 0], order[right:, wrong]]))
    return logits, labels


def _right(logits: Any, labels: Any) -> list[Tensor]:
    return [(one.argmax(1) == y).double() for one, y in zip(logits, labels, strict=True)]


def _accuracy(logits: Any, labels: Any) -> float:
    return float(torch.cat(_right(logits, labels)).mean())


EXERCISES: dict[str, dict[str, Any]] = {
    "layer-norm": {
        "title": "LN of Eqs. 2-4",
        "task": "Normalise x [B, N, D] over its width to mean 0 and variance 1, with eps inside the root; then "
        "multiply by g [D] and add b [D].",
        "start": "def layer_norm(x, g, b, eps): ...",
        "shape": "[B, N, D]",
        "inputs": _ln_inputs,
        "answer": layer_norm,
        "mistakes": {
            "The variance is the unbiased one (divided by D - 1), which torch.var computes by default; pass "
            "unbiased=False.": lambda x, g, b, eps: (
                (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + eps).sqrt() * g + b
            ),
            "The division is by the variance; divide by its square root.": lambda x, g, b, eps: (
                (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + eps) * g + b
            ),
            "eps is missing.": lambda x, g, b, eps: layer_norm(x, g, b, 0.0),
            "eps is added outside the root: it is sqrt(variance + eps).": lambda x, g, b, eps: (
                (x - x.mean(-1, keepdim=True)) / (x.std(-1, unbiased=False, keepdim=True) + eps) * g + b
            ),
            "The mean is not subtracted (that is RMSNorm, of some later models).": lambda x, g, b, eps: (
                x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * g + b
            ),
            "The mean is not subtracted, though the variance is right.": lambda x, g, b, eps: (
                x / (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt() * g + b
            ),
            "The result is normalised over the tokens (dim=1); each token is normalised by itself, over its width.": (
                lambda x, g, b, eps: (
                    (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + eps).sqrt() * g + b
                )
            ),
            "The result is normalised over the batch (dim=0), as BatchNorm does; each token is normalised by itself.": (
                lambda x, g, b, eps: (
                    (x - x.mean(0, keepdim=True)) / (x.var(0, unbiased=False, keepdim=True) + eps).sqrt() * g + b
                )
            ),
            "The result is normalised over tokens and width together; each token is normalised by itself.": (
                lambda x, g, b, eps: (
                    (x - x.mean((1, 2), keepdim=True)) / (x.var((1, 2), unbiased=False, keepdim=True) + eps).sqrt() * g
                    + b
                )
            ),
            "The gain g is missing.": lambda x, g, b, eps: layer_norm(x, torch.ones_like(g), b, eps),
            "The shift b is missing.": lambda x, g, b, eps: layer_norm(x, g, torch.zeros_like(b), eps),
            "g multiplies b too: first multiply by g, then add b.": lambda x, g, b, eps: (
                (layer_norm(x, torch.ones_like(g), torch.zeros_like(b), eps) + b) * g
            ),
            "Only the mean is subtracted; divide by the standard deviation as well.": lambda x, g, b, eps: (
                (x - x.mean(-1, keepdim=True)) * g + b
            ),
        },
    },
    "eq2": {
        "title": "Eq. 2: z' = MSA(LN(z)) + z",
        "task": "Combine z [B, N, D] with the functions norm and msa.",
        "start": "def eq2(z, norm, msa): ...",
        "shape": "[B, N, D]",
        "inputs": lambda seed: (*random(seed, (2, 6, 12)), _norm, _mix),
        "answer": lambda z, norm, msa: msa(norm(z)) + z,
        "mistakes": {
            "The residual is missing: add z.": lambda z, norm, msa: msa(norm(z)),
            "This is post-norm, LN(MSA(z) + z), as in the Transformer of 2017; this paper normalises before.": (
                lambda z, norm, msa: norm(msa(z) + z)
            ),
            "The norm comes after attention, LN(MSA(z)) + z; it comes before.": lambda z, norm, msa: norm(msa(z)) + z,
            "The norm is missing.": lambda z, norm, msa: msa(z) + z,
            "The residual is LN(z); add z itself, so that the stream stays untouched.": lambda z, norm, msa: (
                msa(norm(z)) + norm(z)
            ),
            "There is a second norm around the sum.": lambda z, norm, msa: norm(msa(norm(z)) + z),
            "The norm is applied twice.": lambda z, norm, msa: norm(msa(norm(z))) + z,
            "The residual is subtracted.": lambda z, norm, msa: msa(norm(z)) - z,
            "The residual is added twice.": lambda z, norm, msa: msa(norm(z)) + 2 * z,
            "The sum is halved; Eq. 2 just adds.": lambda z, norm, msa: (msa(norm(z)) + z) / 2,
            "Attention is missing.": lambda z, norm, msa: norm(z) + z,
            "Attention is applied twice.": lambda z, norm, msa: msa(norm(msa(norm(z)))) + z,
            "The branches are multiplied; Eq. 2 adds.": lambda z, norm, msa: msa(norm(z)) * z,
        },
    },
    "mlp": {
        "title": "The MLP of Eq. 3: two layers with a GELU between them",
        "task": "Apply W1 [D, M], b1 [M], a GELU, then W2 [M, D], b2 [D] to z [B, N, D].",
        "start": "def mlp(z, W1, b1, W2, b2): ...",
        "shape": "[B, N, D]",
        "inputs": lambda seed: random(seed, (2, 6, 12), (12, 20), (20,), (20, 12), (12,)),
        "answer": _mlp,
        "mistakes": {
            "The activation is missing, so both layers are one.": _mlp_with(lambda x: x),
            "The activation is a ReLU; the paper has a GELU.": _mlp_with(torch.relu),
            "The activation is the tanh approximation of GELU. The authors' JAX code uses it; the exact one is x times "
            "the normal distribution function (F.gelu).": _mlp_with(lambda x: F.gelu(x, approximate="tanh")),
            "The activation is x sigmoid(1.702 x), the GELU of CLIP; use the exact one.": _mlp_with(
                lambda x: x * torch.sigmoid(1.702 * x)
            ),
            "The activation is SiLU, x sigmoid(x); the paper has a GELU.": _mlp_with(F.silu),
            "The activation is a tanh; that is in the pre-training head, not in the MLP.": _mlp_with(torch.tanh),
            "The activation comes after the second layer; it belongs between the two.": lambda z, W1, b1, W2, b2: (
                F.gelu((z @ W1 + b1) @ W2 + b2)
            ),
            "There is a second activation after the second layer.": lambda *a: F.gelu(_mlp(*a)),
            "The first bias is missing.": lambda z, W1, b1, W2, b2: _mlp(z, W1, torch.zeros_like(b1), W2, b2),
            "The second bias is missing.": lambda z, W1, b1, W2, b2: _mlp(z, W1, b1, W2, torch.zeros_like(b2)),
            "Both biases are missing.": lambda z, W1, b1, W2, b2: F.gelu(z @ W1) @ W2,
            "The input is added to the result. The residual belongs to Eq. 3, around the MLP.": lambda z, *rest: (
                _mlp(z, *rest) + z
            ),
        },
    },
    "eq3": {
        "title": "Eqs. 2 and 3: one block",
        "task": "From z_{l-1} [B, N, D] and the functions norm1, msa, norm2 and mlp, compute z_l.",
        "start": "def eq3(z, norm1, msa, norm2, mlp): ...",
        "shape": "[B, N, D]",
        "inputs": lambda seed: (
            *random(seed, (2, 6, 12)),
            _norm,
            _mix,
            lambda x: 2 * _norm(x) + 0.1,
            lambda x: torch.sin(2 * x) - 0.4,
        ),
        "answer": lambda z, n1, msa, n2, mlp: _then(msa(n1(z)) + z, lambda y: mlp(n2(y)) + y),
        "mistakes": {
            "The residual of Eq. 2 is missing.": lambda z, n1, msa, n2, mlp: _then(
                msa(n1(z)), lambda y: mlp(n2(y)) + y
            ),
            "The residual of Eq. 3 is missing.": lambda z, n1, msa, n2, mlp: _then(
                msa(n1(z)) + z, lambda y: mlp(n2(y))
            ),
            "Both residuals are missing.": lambda z, n1, msa, n2, mlp: mlp(n2(msa(n1(z)))),
            "The residual of Eq. 3 is z_{l-1}; it is z', the result of Eq. 2.": lambda z, n1, msa, n2, mlp: _then(
                msa(n1(z)) + z, lambda y: mlp(n2(y)) + z
            ),
            "Both branches read the same z, as in parallel blocks; Eq. 3 reads z'.": lambda z, n1, msa, n2, mlp: (
                msa(n1(z)) + mlp(n2(z)) + z
            ),
            "This is post-norm, as in the Transformer of 2017; this paper normalises before each branch.": (
                lambda z, n1, msa, n2, mlp: _then(n1(msa(z) + z), lambda y: n2(mlp(y) + y))
            ),
            "The norms come after the branches; they come before.": lambda z, n1, msa, n2, mlp: _then(
                n1(msa(z)) + z, lambda y: n2(mlp(y)) + y
            ),
            "norm1 and norm2 are swapped.": lambda z, n1, msa, n2, mlp: _then(msa(n2(z)) + z, lambda y: mlp(n1(y)) + y),
            "The MLP comes before attention.": lambda z, n1, msa, n2, mlp: _then(
                mlp(n1(z)) + z, lambda y: msa(n2(y)) + y
            ),
            "norm1 is missing.": lambda z, n1, msa, n2, mlp: _then(msa(z) + z, lambda y: mlp(n2(y)) + y),
            "norm2 is missing.": lambda z, n1, msa, n2, mlp: _then(msa(n1(z)) + z, lambda y: mlp(y) + y),
            "Both norms are missing.": lambda z, n1, msa, n2, mlp: _then(msa(z) + z, lambda y: mlp(y) + y),
            "norm1 is used twice; the second norm is norm2.": lambda z, n1, msa, n2, mlp: _then(
                msa(n1(z)) + z, lambda y: mlp(n1(y)) + y
            ),
        },
    },
    "pool": {
        "title": "Eq. 4: y = LN(z_L^0)",
        "task": "From the last block's output z [B, 1 + N, D] and the function norm, compute what the head reads.",
        "start": "def pool(z, norm): ...",
        "shape": "[B, D]",
        "inputs": lambda seed: (*random(seed, (2, 7, 12)), lambda x: _norm(x) * 1.5 + 0.25),
        "answer": lambda z, norm: norm(z[:, 0]),
        "mistakes": {
            "The norm is missing.": lambda z, norm: z[:, 0],
            "This is the mean over all tokens; Eq. 4 takes the class token, z[:, 0].": lambda z, norm: norm(z.mean(1)),
            "This is the mean over all normalised tokens; Eq. 4 takes the class token.": lambda z, norm: norm(z).mean(
                1
            ),
            "This is the mean over the patches (Appendix D.3 compares it); Eq. 4 takes the class token.": (
                lambda z, norm: norm(z[:, 1:].mean(1))
            ),
            "This is the mean over the normalised patches; Eq. 4 takes the class token.": lambda z, norm: norm(
                z[:, 1:]
            ).mean(1),
            "This is the last token, z[:, -1]; the class token is the first.": lambda z, norm: norm(z[:, -1]),
            "This is the first patch, z[:, 1]; the class token is z[:, 0].": lambda z, norm: norm(z[:, 1]),
            "This is the first image, z[0]; take the first token of every image, z[:, 0].": lambda z, norm: norm(z[0]),
            "The axis of tokens is still there, [B, 1, D]; use z[:, 0] instead of z[:, :1].": lambda z, norm: norm(
                z[:, :1]
            ),
            "This is the largest value over the tokens; Eq. 4 takes the class token.": lambda z, norm: norm(z.amax(1)),
            "This is the first number of every token, z[..., 0]; take the first token, z[:, 0].": lambda z, norm: norm(
                z[..., 0]
            ),
            "All tokens are returned; take the class token.": lambda z, norm: norm(z),
        },
    },
    "parameters": {
        "title": "Table 1: the number of parameters",
        "task": "Count the parameters of a ViT with L layers, width D, MLP width M, patch side P, C channels, N "
        "patches and K classes. Every dense layer has a bias; two LayerNorms per block, one before the head.",
        "start": "def parameters(L, D, M, P, C, N, K): ...",
        "shape": "a number",
        "inputs": lambda seed: (
            (12, 768, 3072, 16, 3, 196, 3),
            (4, 64, 128, 4, 1, 49, 10),
            (24, 1024, 4096, 16, 3, 196, 1000),
        )[seed],
        "answer": count,
        "mistakes": {
            "The biases of the dense layers are missing.": lambda *a: count(*a, bias=0),
            "D numbers are missing: the class token, or its position (E_pos has N + 1 rows).": lambda *a: count(
                *a, cls=0
            ),
            "The positions are missing ((N + 1) D numbers).": lambda *a: count(*a, pos=0),
            "The LayerNorms of the blocks are missing (4 D per block).": lambda *a: count(*a, ln=0),
            "There is one LayerNorm per block here; there are two.": lambda *a: count(*a, ln=1),
            "2 D numbers are missing: the LayerNorm before the head, or the class token and its position.": lambda *a: (
                count(*a, final=0)
            ),
            "The head is missing (D K + K numbers).": lambda *a: count(*a, head=0),
            "U_msa is missing: the projection after the heads has D D + D numbers.": lambda *a: count(*a, out=0),
            "q, k and v are counted once; U_qkv has 3 (D D + D) numbers.": lambda *a: count(*a, qkv=1),
            "The second layer of the MLP is missing.": lambda *a: count(*a, fc2=0),
            "Only one block is counted; there are L.": lambda L, *a: count(1, *a),
        },
    },
    "accuracy": {
        "title": "Measuring: the accuracy over all batches",
        "task": "From lists of logits [n, K] and labels [n], one entry per batch, compute the share of images that are "
        "right. The last batch is smaller.",
        "start": "def accuracy(logits, labels): ...",
        "shape": "a number",
        "inputs": _batches,
        "answer": _accuracy,
        "mistakes": {
            "This is the mean of the batches' accuracies: the last, smaller batch counts too much. Add up what is "
            "right, then divide by the number of images.": lambda logits, labels: float(
                torch.stack([one.mean() for one in _right(logits, labels)]).mean()
            ),
            "This is a percentage; return a share between 0 and 1.": lambda logits, labels: (
                100 * _accuracy(logits, labels)
            ),
            "This is the number of right answers; divide by the number of images.": lambda logits, labels: float(
                torch.cat(_right(logits, labels)).sum()
            ),
            "Only the last batch is counted.": lambda logits, labels: float(_right(logits, labels)[-1].mean()),
            "Only the first batch is counted.": lambda logits, labels: float(_right(logits, labels)[0].mean()),
            "The last, smaller batch is left out.": lambda logits, labels: float(
                torch.cat(_right(logits, labels)[:-1]).mean()
            ),
            "This is the error: one minus the accuracy.": lambda logits, labels: 1 - _accuracy(logits, labels),
            "The number of images is the number of batches times the size of the first one; the last is smaller.": (
                lambda logits, labels: float(torch.cat(_right(logits, labels)).sum()) / (len(logits) * len(logits[0]))
            ),
            "The sum is divided by the number of batches; divide by the number of images.": lambda logits, labels: (
                float(torch.cat(_right(logits, labels)).sum()) / len(logits)
            ),
            "The smallest logit is taken (argmin); the prediction is the largest.": lambda logits, labels: float(
                torch.cat([(a.argmin(1) == y).double() for a, y in zip(logits, labels, strict=True)]).mean()
            ),
            "An answer counts as right here if the label is among the two best (top-2); take the best alone.": (
                lambda logits, labels: float(
                    torch.cat(
                        [(a.topk(2).indices == y[:, None]).any(1).double() for a, y in zip(logits, labels, strict=True)]
                    ).mean()
                )
            ),
        },
    },
}
