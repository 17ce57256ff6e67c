"""The matrix products around an MLP's GELU in training, by a kernel for Hopper GPUs (gelu_products.cu).

The forward product stores GELU(h) and, instead of h, the derivative GELU'(h) in 8 bits, which is all that the backward
pass needs: a quarter less to write, half as much to read, and nothing to compute again.

NVRTC, which comes with torch, compiles the kernel for the device when it is first used; the result is kept in vitkit's
cache folder. Where any of that fails, `takes` says no.

Legend: M rows of tokens, a product is [M, K] [K, N].
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.places import cache_folder
from vitkit.speed.choices import busy_milliseconds, fastest, run_number
from vitkit.speed.cublas import same
from vitkit.speed.kernels import sum_rows

SOURCE = Path(__file__).with_name("gelu_products.cu")
NAME = b"product_gelu"
ROWS, COLUMNS, DEPTH, BOX = 128, 128, 64, 64  # a tile, the depth of a part in shared memory, and the side of a copy
STAGES = 6  # parts in shared memory
SHARED = STAGES * (ROWS + COLUMNS) * DEPTH * 2 + 2 * ROWS * BOX * 2 + 128  # bytes: parts, two boxes, barriers
THREADS, CLUSTER = 384, 2
SUMS = 4  # sums of columns that a tile has: one per warp
BF16, SWIZZLE_128, PROMOTE_256 = 9, 3, 3  # CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion
MAX_SHARED = 8  # CUfunction_attribute
Pair = Callable[..., tuple[Tensor, Tensor]]
Results = tuple[Tensor, Tensor, Tensor]
_faster: dict[tuple[str, torch.device, int], bool] = {}


def takes(x: Tensor, W: Tensor) -> bool:
    """Return whether the kernel computes this product: bf16 on Hopper, in whole tiles but for the rows.

    Args:
        x: [M, K].
        W: [K, N], rows or columns contiguous.
    """
    K, N = W.shape
    if not x.is_cuda or x.dtype != torch.bfloat16 or W.dtype != torch.bfloat16 or K % DEPTH or N % COLUMNS:
        return False
    ordered = x.is_contiguous() and W.stride() in ((1, K), (N, 1))
    return ordered and available(x.device)


def faster(u: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, tanh: bool, activate: Pair, derive: Pair) -> bool:
    """Return whether the kernel is faster than a library, forward and backward together; a run times both once.

    Args:
        u: [M, K].
        W1: [N, K], the MLP's first weight.
        b1: [N], its bias.
        W2: [K, N], the MLP's second weight.
        tanh: whether GELU is the tanh approximation.
        activate: (u, W1, b1, tanh) -> GELU(h), h by the library.
        derive: (dy, W2, h, tanh) -> dh and its sums by the library.
    """
    if not (takes(u, W1.mT) and takes(u, W2)):
        return False
    what = f"GELU between products {len(u)} x {' x '.join(map(str, W1.mT.shape))}, {u.dtype}"
    key = what, u.device, run_number()
    if key not in _faster:

        def library() -> Results:
            g, h = activate(u, W1, b1, tanh)
            return g, *derive(u, W2, h, tanh)

        def ours() -> Results:
            g, slopes = linear_gelu(u, W1.mT, b1, tanh)
            return g, *product_dgelu(u, W2, slopes)

        ways = {"library": library}
        if all(map(same, ours(), library())):
            ways["ours"] = ours
        _faster[key] = fastest(what, ways, busy_milliseconds) == "ours"
    return _faster[key]


@functools.cache
def available(device: torch.device) -> bool:
    """Return whether the device is a Hopper GPU for which the kernel can be compiled."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        return bool(_kernel(device, False, True))
    except (OSError, AttributeError, RuntimeError):
        return False


def linear_gelu(x: Tensor, W: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return GELU(h), h = x W + bias, and GELU'(h) in 8 bits, in an order that `product_dgelu` knows.

    Args:
        x: [M, K].
        W: [K, N], rows or columns contiguous.
        bias: [N].
        tanh: whether GELU is the tanh approximation.
    """
    g = x.new_empty(len(x), W.shape[1])
    slopes = torch.empty(CLUSTER * _pairs(x), W.shape[1] // COLUMNS, ROWS, COLUMNS, device=x.device, dtype=torch.uint8)
    _launch(x, W, g, bias.contiguous(), slopes, tanh)
    return g, slopes


def product_dgelu(x: Tensor, W: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return dh = x W times GELU'(h), and the sums of that over the rows in fp32.

    Args:
        x: [M, K], the gradient of the layer after the GELU.
        W: [K, N], its weight, rows or columns contiguous.
        slopes: GELU'(h), from `linear_gelu` for as many rows and columns.
    """
    dh = x.new_empty(len(x), W.shape[1])
    sums = torch.empty(CLUSTER * SUMS * _pairs(x), W.shape[1], device=x.device)
    _launch(x, W, dh, sums, slopes)
    return dh, sum_rows(sums)


def _pairs(x: Tensor) -> int:
    """Return the number of pairs of tiles that cover the rows of x."""
    return -(-len(x) // (CLUSTER * ROWS))


def _launch(x: Tensor, W: Tensor, out: Tensor, other: Tensor, slopes: Tensor, tanh: bool | None = None) -> None:
    """Start the kernel; `tanh` is None in the backward pass."""
    K, N = W.shape
    columns = W.stride(0) == 1
    pairs, tiles = _pairs(x), N // COLUMNS
    maps = [
        _map(x, len(x), K, ROWS),
        _map(W, N, K, BOX) if columns else _map(W, K, N, BOX),
        _map(out, len(x), N, ROWS),
    ]
    pointers = [c_void_p(other.data_ptr()), c_void_p(slopes.data_ptr())]
    values = [*maps, *pointers, c_int(pairs), c_int(tiles), c_int(K // DEPTH)]
    arguments = (c_void_p * len(values))(*(ctypes.addressof(one) for one in values))
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    blocks = CLUSTER * min(processors // CLUSTER, pairs * tiles)
    stream = c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
    size = (c_uint32(blocks), c_uint32(1), c_uint32(1), c_uint32(THREADS), c_uint32(1), c_uint32(1), c_uint32(SHARED))
    _driver("cuLaunchKernel", _kernel(x.device, tanh, columns), *size, stream, arguments, None)


def _map(matrix: Tensor, rows: int, columns: int, box: int) -> Any:
    """Describe a matrix in memory, rows contiguous, that is copied in boxes of 64 columns and `box` rows."""
    room = ctypes.create_string_buffer(128 + 64)  # a CUtensorMap, which must start at a multiple of 64
    found = (ctypes.c_char * 128).from_buffer(room, -ctypes.addressof(room) % 64)
    _driver("cuTensorMapEncodeTiled", byref(found), c_int(BF16), c_uint32(2), c_void_p(matrix.data_ptr()),
            (c_uint64 * 2)(columns, rows), (c_uint64 * 1)(2 * columns), (c_uint32 * 2)(BOX, box),
            (c_uint32 * 2)(1, 1), c_int(0), c_int(SWIZZLE_128), c_int(PROMOTE_256), c_int(0))  # fmt: skip
    return found


@functools.cache
def _kernel(device: torch.device, tanh: bool | None, columns: bool) -> c_void_p:
    """Return the kernel, compiled or from the cache, in the device's context."""
    options = [b"--gpu-architecture=sm_90a"]
    options += [b"-DCOLUMNS"] * columns + [b"-DFORWARD"] * (tanh is not None) + [b"-DTANH"] * bool(tanh)
    source = SOURCE.read_bytes()
    key = hashlib.sha256(b"\0".join([source, *options, str(torch.version.cuda).encode()])).hexdigest()[:24]
    path = cache_folder() / "kernels" / f"{key}.cubin"
    module, function = c_void_p(), c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes sure that there is a context
        try:
            _driver("cuModuleLoadData", byref(module), path.read_bytes())
        except (OSError, RuntimeError):  # not there, or damaged
            binary = _compiled(source, options)
            _driver("cuModuleLoadData", byref(module), binary)
            _keep(path, binary)
        _driver("cuModuleGetFunction", byref(function), module, NAME)
        _driver("cuFuncSetAttribute", function, c_int(MAX_SHARED), c_int(SHARED))
    return function


def _compiled(source: bytes, options: list[bytes]) -> bytes:
    """Compile the kernel to machine code.

    Raises:
        OSError: the compiler is not there.
        RuntimeError: it refused.
    """
    library = _compiler()
    program, size = c_void_p(), c_size_t()
    if library.nvrtcCreateProgram(byref(program), c_char_p(source), c_char_p(NAME + b".cu"), c_int(0), None, None):
        raise RuntimeError("The kernel cannot be compiled.")
    try:
        if library.nvrtcCompileProgram(program, c_int(len(options)), (c_char_p * len(options))(*options)):
            library.nvrtcGetProgramLogSize(program, byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"The kernel cannot be compiled: {log.value.decode(errors='replace')}")
        library.nvrtcGetCUBINSize(program, byref(size))
        binary = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _keep(path: Path, binary: bytes) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".vitkit-", delete=False) as file:
            file.write(binary)
        os.replace(file.name, path)


def _driver(name: str, *arguments: Any) -> None:
    if status := getattr(_library(), name)(*arguments):
        raise RuntimeError(f"{name} failed with status {status}.")


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _compiler() -> ctypes.CDLL:
    """Return NVRTC, which torch loads only when it needs it: from the packages next to torch, or from the system."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations if package else None
    found = [str(path) for folder in folders or () for path in Path(folder).glob(f"*/lib/{name}")]
    return ctypes.CDLL(found[0] if found else name)
