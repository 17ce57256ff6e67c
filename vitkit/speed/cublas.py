"""Matrix products of many rows by cuBLASLt, each with the algorithm that is fastest here.

torch runs the algorithm that cuBLASLt suggests first. For the shapes of a ViT another one is often faster, most of all
where a GELU follows (docs/log.md), so suggestions are timed next to torch itself (choices.py). Other devices, other
types and few rows run in torch.

Legend: M rows of tokens, a product is [M, K] [K, N].
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitkit.speed import choices
from vitkit.speed.choices import busy_milliseconds, fastest

MANY = 4096  # rows from which a product takes much longer than launching it
SUGGESTIONS = 8
ALIGNED = 256  # bytes; cuBLASLt assumes that matrices start at a multiple of it
WORKSPACE = 32 << 20  # bytes that an algorithm may use, as in torch
TYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType_t
FP32, COMPUTE_FP32 = 0, 68  # cudaDataType_t, cublasComputeType_t
# cublasLtMatmulDescAttributes_t
TRANSPOSE_A, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LEADING, BIAS_TYPE = 3, 7, 8, 11, 12, 26
PLAIN, BIAS, GELU_BIAS, GELU_AUX_BIAS, DGELU = 1, 4, 36, 164, 192  # cublasLtEpilogue_t
Result = TypeVar("Result", Tensor, tuple[Tensor, Tensor])
Pair = Callable[[Tensor], tuple[Tensor, Tensor]]
SAME = 0.01  # how far the results of two algorithms may be apart: they round in different orders
REPEATS = 4  # how often an algorithm must repeat its result: some add up parts in the order in which they are ready
MAX_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t


class Suggestion(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


def linear(x: Tensor, W: Tensor, bias: Tensor, gelu: bool = False) -> Tensor:
    """Return x W + bias, or GELU of that (on CUDA in 16 bits: its tanh form).

    Args:
        x: [M, K].
        W: [K, N], rows or columns contiguous.
        bias: [N].
        gelu: whether the result goes through a GELU.
    """

    def by_torch(x: Tensor) -> Tensor:
        return torch._addmm_activation(bias, x, W, use_gelu=True) if gelu else torch.addmm(bias, x, W)

    if not takes(x, W):
        return by_torch(x)
    plan = _plan_for(x, W, GELU_BIAS if gelu else BIAS)
    return plan.fastest(x, by_torch, lambda i, x: plan.run(i, x, W, x.new_empty(len(x), W.shape[1]), bias))


def product(x: Tensor, W: Tensor) -> Tensor:
    """Return x W.

    Args:
        x: [M, K].
        W: [K, N], rows or columns contiguous.
    """
    if not takes(x, W):
        return x @ W
    plan = _plan_for(x, W, PLAIN)
    return plan.fastest(x, lambda x: x @ W, lambda i, x: plan.run(i, x, W, x.new_empty(len(x), W.shape[1])))


def add_product(z: Tensor, x: Tensor, W: Tensor) -> Tensor:
    """Add x W to z, in place.

    Args:
        z: [M, N].
        x: [M, K].
        W: [K, N], rows or columns contiguous.
    """
    if not takes(x, W):
        return z.addmm_(x, W)
    plan = _plan_for(x, W, PLAIN, adds=True)
    if plan.choice is None:
        other = torch.zeros_like(z)
        plan.choose(lambda: other.addmm_(x, W), lambda i: plan.run(i, x, W, other), other.zero_)
    return plan.run(plan.choice, x, W, z) if plan.choice else z.addmm_(x, W)


def linear_gelu(x: Tensor, W: Tensor, bias: Tensor, otherwise: Pair) -> tuple[Tensor, Tensor]:
    """Return GELU(x W + bias), in its tanh form, and x W + bias.

    Args:
        x: [M, K].
        W: [K, N], rows or columns contiguous.
        bias: [N].
        otherwise: computes the same of x in another way, which runs where it is faster.
    """
    if not takes(x, W):
        return otherwise(x)
    plan = _plan_for(x, W, GELU_AUX_BIAS)

    def by_suggestion(i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.new_empty(len(x), W.shape[1])
        return plan.run(i, x, W, torch.empty_like(h), bias, h), h

    return plan.fastest(x, otherwise, by_suggestion)


def product_dgelu(x: Tensor, W: Tensor, h: Tensor, otherwise: Pair) -> tuple[Tensor, Tensor]:
    """Return x W times the derivative of GELU at h, in its tanh form, and the sums of that over the rows in fp32.

    Args:
        x: [M, K].
        W: [K, N], rows or columns contiguous.
        h: [M, N].
        otherwise: computes the same of x in another way, which runs where it is faster.
    """
    if not takes(x, W):
        return otherwise(x)
    plan = _plan_for(x, W, DGELU)

    def by_suggestion(i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        out = plan.run(i, x, W, torch.empty_like(h), aux=h)
        return out, out.sum(0, dtype=torch.float32)

    return plan.fastest(x, otherwise, by_suggestion)


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two matrices are equal but for rounding."""
    off, size = (torch.linalg.vector_norm(t, dtype=torch.float32).item() for t in (a - b, b))
    return off <= SAME * size


def numbers_like(x: Tensor) -> Tensor:
    """Return random numbers in the shape of x, always the same and without using up anyone's generator."""
    own = torch.Generator(x.device).manual_seed(0)
    return torch.randn(x.shape, generator=own, dtype=x.dtype, device=x.device)


def takes(x: Tensor, W: Tensor) -> bool:
    """Return whether algorithms are chosen for this product."""
    ordered = x.is_contiguous() and W.stride() in ((1, len(W)), (W.shape[1], 1))
    many = x.is_cuda and len(x) >= MANY and x.dtype in TYPES and x.dtype == W.dtype and ordered
    return many and not any(n % 8 for n in W.shape) and not (x.data_ptr() | W.data_ptr()) % ALIGNED and available()


@functools.cache
def available() -> bool:
    """Return whether this build of torch comes with cuBLASLt."""
    try:
        return torch.version.cuda is not None and bool(_library())
    except OSError:
        return False


class Plan:
    """A product of given shapes as cuBLASLt describes it, the algorithms that it suggests, and the chosen one.

    Row-major matrices are column-major ones transposed, so it computes out^T = W^T x^T.

    Args:
        device: of all matrices.
        dtype: of all matrices.
        M: rows of x.
        K: columns of x.
        N: columns of W.
        rows: whether the rows of W are contiguous, and not its columns.
        epilogue: what follows the product, a cublasLtEpilogue_t.
        adds: whether the product is added to the result, and does not replace it.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, M: int, K: int, N: int, rows: bool, epilogue: int, adds: bool
    ) -> None:
        version = _library().cublasLtGetVersion()
        words = "rows of W, " * rows + "added, " * adds + f"epilogue {epilogue}"
        self.what = f"product {M} x {K} x {N}, {words}, {dtype}, cuBLASLt {version}"
        self._choice, self._chosen_in = 0, -1
        self.epilogue, self.handle, self.description = epilogue, _handle(device), c_void_p()
        self.lock = threading.Lock()  # a description names the bias, and threads share it
        self.one, self.keep = c_float(1), c_float(adds)
        _call("MatmulDescCreate", byref(self.description), c_int(COMPUTE_FP32), c_int(FP32))
        self.describe(EPILOGUE, c_uint32(epilogue))
        if epilogue in (BIAS, GELU_BIAS, GELU_AUX_BIAS):
            self.describe(BIAS_TYPE, c_int32(TYPES[dtype]))
        if epilogue in (GELU_AUX_BIAS, DGELU):
            self.describe(AUX_LEADING, c_int64(N))
            self.describe(AUX_POINTER, c_void_p(ALIGNED))  # says how the matrix will be aligned
        self.x, self.out = (_layout(dtype, *shape) for shape in ((K, M), (N, M)))
        suggestions: list[Suggestion] = []
        # Suggestions for the other order of W run here too, and may be the fastest. The right order is the last.
        for transposed in (rows, not rows):
            self.W = _layout(dtype, K, N) if transposed else _layout(dtype, N, K)
            self.describe(TRANSPOSE_A, c_int32(transposed))
            suggestions += self.ask()
        self.suggestions = [one for one in suggestions if self.runs(one)]

    def ask(self) -> list[Suggestion]:
        """Ask for algorithms."""
        preference, most, count, found = c_void_p(), c_uint64(WORKSPACE), c_int(), (Suggestion * SUGGESTIONS)()
        _call("MatmulPreferenceCreate", byref(preference))
        _call("MatmulPreferenceSetAttribute", preference, c_int(MAX_WORKSPACE), byref(most), c_size_t(8))
        matrices = self.W, self.x, self.out, self.out
        status = _library().cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.description, *matrices, preference, c_int(SUGGESTIONS), found, byref(count)
        )
        _call("MatmulPreferenceDestroy", preference)
        return [] if status else [one for one in found[: count.value] if not one.status]

    def runs(self, one: Suggestion) -> bool:
        """Return whether an algorithm computes this product; set the memory that it needs."""
        found, matrices = Suggestion(), (self.W, self.x, self.out, self.out)
        check = _library().cublasLtMatmulAlgoCheck
        if check(self.handle, self.description, *matrices, byref(one.algorithm), byref(found)) or found.status:
            return False
        one.workspace = found.workspace
        return found.workspace <= WORKSPACE

    def describe(self, attribute: int, value: Any) -> None:
        """Set an attribute of the product."""
        size = c_size_t(ctypes.sizeof(value))
        _call("MatmulDescSetAttribute", self.description, c_int(attribute), byref(value), size)

    @property
    def choice(self) -> int | None:
        """0 for torch, n for the n-th suggestion; None if nothing has been chosen yet, or for another run."""
        return self._choice if self._chosen_in == choices.run_number() else None

    def fastest(self, x: Tensor, by_torch: Callable[[Tensor], Result], run: Callable[[int, Tensor], Result]) -> Result:
        """Return what the fastest way computes; the first call chooses it.

        Args:
            x: [M, K]; the choice is made with random numbers in its place, because in the first step of a new model
                gradients are zero, and of zeros every algorithm computes the same.
            by_torch: computes the product of x in torch.
            run: computes it with a suggestion.
        """
        if self.choice is None:
            other = numbers_like(x)
            self.choose(lambda: by_torch(other), lambda i: run(i, other))
        return run(self.choice, x) if self.choice else by_torch(x)

    def choose(
        self, by_torch: Callable[[], Result], run: Callable[[int], Result], reset: Callable[[], object] | None = None
    ) -> None:
        """Time torch and the suggestions that compute the same, to the bit whenever they run; the fastest becomes the
        choice.

        Args:
            by_torch: computes the product in torch.
            run: computes it with a suggestion.
            reset: called before each comparison, if the product adds to something.
        """
        ways: dict[str, Callable[[], object]] = {"torch": by_torch}
        want = _matrix(by_torch()).clone()

        def computed(i: int) -> Tensor:
            if reset is not None:
                reset()
            return _matrix(run(i))

        for i in range(1, len(self.suggestions) + 1):
            first = computed(i).clone()
            if same(first, want) and all(torch.equal(computed(i), first) for _ in range(REPEATS)):
                ways[str(i)] = partial(run, i)
        name = fastest(self.what, ways, busy_milliseconds) or "torch"
        self._choice, self._chosen_in = 0 if name == "torch" else int(name), choices.run_number()

    def run(
        self, i: int, x: Tensor, W: Tensor, out: Tensor, bias: Tensor | None = None, aux: Tensor | None = None
    ) -> Tensor:
        """Compute with the i-th suggestion, counted from 1.

        Args:
            i: which suggestion.
            x: [M, K].
            W: [K, N].
            out: [M, N]; replaced, or added to.
            bias: [N], where the epilogue adds it.
            aux: [M, N], what the GELU reads: written by GELU_AUX_BIAS, read by DGELU.
        """
        one = self.suggestions[i - 1]
        space = torch.empty(max(one.workspace, 1), dtype=torch.uint8, device=x.device)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        at_W, at_x, at_out, at_space = (c_void_p(t.data_ptr()) for t in (W, x, out, space))
        with self.lock:
            if bias is not None:
                self.describe(BIAS_POINTER, c_void_p(bias.data_ptr()))
            if aux is not None:
                self.describe(AUX_POINTER, c_void_p(aux.data_ptr()))
            _call("Matmul", self.handle, self.description, byref(self.one), at_W, self.W, at_x, self.x,
                  byref(self.keep), at_out, self.out, at_out, self.out, byref(one.algorithm), at_space,
                  c_size_t(one.workspace), c_void_p(stream))  # fmt: skip
        return out


def _matrix(found: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the first of several results."""
    return found if isinstance(found, Tensor) else found[0]


def _plan_for(x: Tensor, W: Tensor, epilogue: int, adds: bool = False) -> Plan:
    return _plan(x.device, x.dtype, len(x), *W.shape, W.stride(1) == 1, epilogue, adds)


@functools.cache
def _plan(*what: Any) -> Plan:
    return Plan(*what)


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the library that torch has loaded."""
    return ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")


@functools.cache
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _call("Create", byref(handle))
    return handle


def _layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    """Describe a column-major matrix."""
    layout = c_void_p()
    _call("MatrixLayoutCreate", byref(layout), c_int(TYPES[dtype]), c_uint64(rows), c_uint64(columns), c_int64(rows))
    return layout


def _call(name: str, *arguments: Any) -> None:
    if status := getattr(_library(), f"cublasLt{name}")(*arguments):
        raise RuntimeError(f"cublasLt{name} failed with status {status}.")
