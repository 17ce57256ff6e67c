"""Kernels for Hopper GPUs in CUDA: compiled when they are first used, kept in vitkit's cache folder, and launched.

NVRTC, which comes with torch, compiles them; nothing else needs to be installed. The source of a kernel is hopper.cuh,
the products that it needs (`wgmma`), and its own `.cu` file. Triton cannot express what these kernels need: groups of
warps that do different work at the same time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.places import cache_folder
from vitkit.speed.choices import keep

BOX = 64  # numbers in a row of a box that is copied
THREADS = 384  # of a block: one group of four warps loads, two compute
BF16, SWIZZLE_128, PROMOTE_256 = 9, 3, 3  # CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion
MAX_SHARED = 8  # CUfunction_attribute


@functools.cache
def available(device: torch.device) -> bool:
    """Return whether the device is a Hopper GPU for which kernels can be compiled."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        return bool(_driver()) and bool(_compiler())
    except OSError:
        return False


@functools.cache
def compiles(build: Callable[..., object], *which: object) -> bool:
    """Return whether a kernel can be compiled and loaded; a process tries it once.

    Args:
        build: returns the kernel, and remembers it.
        which: the arguments of `build`.
    """
    try:
        return bool(build(*which))
    except (OSError, RuntimeError):
        return False


def wgmma(name: str, columns: int, turn_a: bool = False, turn_b: bool = False, held: bool = False) -> str:
    """Return the source of a function name(d, a, b, adds): d += a b for 64 rows, 16 deep; d = a b if `adds` is 0.

    Args:
        name: of the function; one name can stand for several numbers of columns.
        columns: of d, a multiple of 8.
        turn_a: whether a's columns are contiguous in shared memory, and not its rows.
        turn_b: whether b's rows are contiguous there, and not its columns.
        held: whether a is held in registers.
    """
    count = columns // 2
    outs, a = (", ".join(f"%{i}" for i in numbers) for numbers in (range(count), range(count, count + 4)))
    a, b, last = (f"{{{a}}}", count + 4, count + 5) if held else (f"%{count}", count + 1, count + 2)
    turns = f"{int(turn_b)}" if held else f"{int(turn_a)}, {int(turn_b)}"
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if held else '"l"(a)'
    kind = "const u32 (&a)[4]" if held else "u64 a"
    return f"""
__device__ __forceinline__ void {name}(float (&d)[{count}], {kind}, u64 b, int adds) {{
    asm volatile(
        "{{ .reg .pred adds; setp.ne.b32 adds, %{last}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{outs}}}, {a}, %{b}, adds, 1, 1, {turns}; }}"
        : {", ".join(f'"+f"(d[{i}])' for i in range(count))} : {inputs}, "l"(b), "r"(adds));
}}
"""


class Kernel:
    """A compiled kernel on a device.

    Args:
        file: the kernel's source; its name is the kernel's.
        device: where it runs.
        shared: bytes of shared memory of a block.
        parts: what is put before the source.

    Raises:
        OSError: the driver or the compiler is not there.
        RuntimeError: one of them refused.
    """

    def __init__(self, file: Path, device: torch.device, shared: int, parts: Sequence[str] = ()) -> None:
        header = Path(__file__).with_name("hopper.cuh").read_text(encoding="utf-8")
        source = "\n".join([header, *parts, file.read_text(encoding="utf-8")]).encode()
        key = hashlib.sha256(source + str(torch.version.cuda).encode()).hexdigest()[:24]
        path = cache_folder() / "kernels" / f"{file.stem}-{key}.cubin"
        self.device, self.shared, self.function, module = device, shared, c_void_p(), c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes sure that there is a context
            try:
                _call("cuModuleLoadData", byref(module), path.read_bytes())
            except (OSError, RuntimeError):  # not there, or damaged
                binary = _compiled(source, file.name)
                _call("cuModuleLoadData", byref(module), binary)
                keep(path, binary)
            _call("cuModuleGetFunction", byref(self.function), module, file.stem.encode())
            _call("cuFuncSetAttribute", self.function, c_int(MAX_SHARED), c_int(shared))

    def __call__(self, blocks: int, *values: Any) -> None:
        """Start the kernel on torch's current stream.

        Args:
            blocks: how many.
            values: its arguments: maps, tensors as pointers, and numbers.
        """
        given = [_argument(value) for value in values]
        arguments = (c_void_p * len(given))(*(ctypes.addressof(one) for one in given))
        stream = c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        size = (c_uint32(n) for n in (blocks, 1, 1, THREADS, 1, 1, self.shared))
        _call("cuLaunchKernel", self.function, *size, stream, arguments, None)


def tensor_map(matrix: Tensor, rows: int) -> Any:
    """Describe a matrix [..., N], or several, that is copied in boxes of 64 columns.

    Args:
        matrix: bf16; the last dimension is contiguous. What a box has beyond it is read as 0, and not written.
        rows: of a box.
    """
    room = ctypes.create_string_buffer(128 + 64)  # a CUtensorMap, which must start at a multiple of 64
    found = (ctypes.c_char * 128).from_buffer(room, -ctypes.addressof(room) % 64)
    n, sizes, strides = matrix.ndim, matrix.shape[::-1], [2 * stride for stride in matrix.stride()[-2::-1]]
    box = [BOX, rows, *[1] * (n - 2)]
    _call("cuTensorMapEncodeTiled", byref(found), c_int(BF16), c_uint32(n), c_void_p(matrix.data_ptr()),
          (c_uint64 * n)(*sizes), (c_uint64 * (n - 1))(*strides), (c_uint32 * n)(*box), (c_uint32 * n)(*[1] * n),
          c_int(0), c_int(SWIZZLE_128), c_int(PROMOTE_256), c_int(0))  # fmt: skip
    return found


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return c_void_p(value.data_ptr())
    if isinstance(value, float):
        return c_float(value)
    return c_int(value) if isinstance(value, int) else value


def _compiled(source: bytes, name: str) -> bytes:
    """Compile a kernel to machine code.

    Raises:
        OSError: the compiler is not there.
        RuntimeError: it refused.
    """
    library, program, size = _compiler(), c_void_p(), c_size_t()
    if library.nvrtcCreateProgram(byref(program), c_char_p(source), c_char_p(name.encode()), c_int(0), None, None):
        raise RuntimeError(f"{name} cannot be compiled.")
    try:
        if library.nvrtcCompileProgram(program, c_int(1), (c_char_p * 1)(b"--gpu-architecture=sm_90a")):
            library.nvrtcGetProgramLogSize(program, byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"{name} cannot be compiled: {log.value.decode(errors='replace')}")
        library.nvrtcGetCUBINSize(program, byref(size))
        binary = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, binary)
        return binary.raw
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _call(name: str, *arguments: Any) -> None:
    if status := getattr(_driver(), name)(*arguments):
        raise RuntimeError(f"{name} failed with status {status}.")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _compiler() -> ctypes.CDLL:
    """Return NVRTC, which torch loads only when it needs it: from the packages next to torch, or from the system."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations if package else None
    found = [str(path) for folder in folders or () for path in Path(folder).glob(f"*/lib/{name}")]
    return ctypes.CDLL(found[0] if found else name)
