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

What does not belong here: the order of these parts in a model (training.py), and kernels (triton_training.py, *.cu).
"""

from __future__ import annotations

from vitkit.speed.differentiable.attention import Attend, AttendFirst, Parts, attends
from vitkit.speed.differentiable.mlp import MLP
from vitkit.speed.differentiable.norm import AddNorm, Drop, Embed
from vitkit.speed.differentiable.products import Product, Rounded

__all__ = ["MLP", "AddNorm", "Attend", "AttendFirst", "Drop", "Embed", "Parts", "Product", "Rounded", "attends"]
