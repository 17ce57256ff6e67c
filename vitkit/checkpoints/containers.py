"""Files of tensors, told apart by their first bytes: safetensors, PyTorch's `.pth` (weights only), NumPy's `.npz`.

A file that cannot be read without running code is refused; nothing in a file is ever run.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import pickle
import pickletools
import re
import stat
import warnings
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from vitkit.errors import TensorMismatch, UnreadableFile, UnsafeFile

# The keys under which training scripts save weights, best first: a teacher or an average before what is being trained.
NESTED = (
    *("teacher", "state_dict_ema", "model_ema", "ema"),
    *("model", "state_dict", "model_state_dict", "model_state", "module", "params", "net", "student"),
)
# A zip file may decompress to INFLATED bytes, or to INFLATES times its own size; weights hardly compress at all.
INFLATED, INFLATES = 2**30, 20
DEEPEST = 100  # tuples inside tuples in a pickle: Python hashes a tuple recursively, and overflows the stack
# What files that are not weights begin with.
IMPOSTORS = {
    b"version https://git-lfs": "is a Git LFS pointer, not the weights: run `git lfs pull`",
    b"<": "is a web page, not weights: download the file itself",
    b"\x1f\x8b": "is a gzip archive: unpack it first",
}


def read(
    path: Path, only: Collection[str] | None = None, *, key: str | None = None, notes: list[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a file, and its metadata.

    Args:
        path: a safetensors, PyTorch or NumPy file, or the JSON index of a sharded one.
        only: the tensors to read from a safetensors file (default: all).
        key: where a PyTorch file that holds more than weights keeps them (default: the first of NESTED).
        notes: receives a sentence that says where in such a file the weights were found.

    Returns:
        Tensors by name (memory-mapped if the format allows it), and the metadata of a safetensors file.

    Raises:
        UnreadableFile: missing, truncated, or of another format.
        UnsafeFile: holds more than tensors.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a named pipe would wait for ever
            raise UnreadableFile(f"Expected a file of weights; {path} is not a regular file.")
        with open(path, "rb") as file:
            start = file.read(64)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise UnreadableFile(f"Could not open {path}: {getattr(error, 'strerror', None) or error}.") from None
    if path.name.endswith(".index.json"):
        return _read_shards(path, only)
    notes = [] if notes is None else notes
    if (
        start[8:9] == b"{"
    ):  # asked first: the 8 bytes before it are a length, which may look like any other magic number
        return _read_safetensors(path, only)
    if start.startswith(b"PK"):
        return _read_zip(path, key, notes), {}
    if start.startswith(b"\x80"):
        return _read_torch(path, key, notes), {}
    for magic, what in IMPOSTORS.items():
        if start.lstrip().startswith(magic):
            raise UnreadableFile(f"{path} {what}.")
    if path.suffix.lower() in (".onnx", ".xml"):
        raise UnreadableFile(f"Expected weights; {path} is an exported file, which predict, eval and serve can run.")
    what = f"begins with {start[:8]!r}" if start else "is empty"
    raise UnreadableFile(f"Expected weights in a .safetensors, .pth, .pt, .bin or .npz file; {path} {what}.")


def _read_safetensors(path: Path, only: Collection[str] | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if only is None or name in only]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except Exception as error:
        raise UnreadableFile(
            f"{path} is not a complete safetensors file ({_short(error)}); download or copy it again."
        ) from None


def read_index(path: Path) -> tuple[dict[str, str], list[str]]:
    """Read the index of a sharded checkpoint: the file of each tensor, and the files, all in the index's own folder.

    Raises:
        UnreadableFile: it is not an index, or names something else than files of weights next to it.
    """
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(places.values()))
        outside = [shard for shard in shards if Path(shard).name != shard]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnreadableFile(f"{path} is not the index of a sharded checkpoint (it has no weight_map).") from None
    if outside:
        raise UnreadableFile(
            f"{path} refers to {outside[0]!r}, which is outside its own folder; such paths are not followed."
        )
    if indices := [shard for shard in shards if shard.endswith(".index.json")]:
        raise UnreadableFile(f"{path} must name files of weights; it names an index, {indices[0]!r}.")
    return places, shards


def _read_shards(path: Path, only: Collection[str] | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a sharded file; its index names the shard of each tensor."""
    places, shards = read_index(path)
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors |= read(path.parent / shard, only)[0]
    if odd := sorted(set(tensors) ^ {name for name in places if only is None or name in only}):
        raise TensorMismatch(f"{path} and its shards disagree about tensor {odd[0]!r}; download them again.")
    return tensors, {}


def _read_zip(path: Path, key: str | None, notes: list[str]) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            names, inflated = archive.namelist(), sum(entry.file_size for entry in archive.infolist())
    except Exception as error:  # damaged bytes fail in many ways
        raise UnreadableFile(f"{path} is truncated or damaged ({_short(error)}); download or copy it again.") from None
    if inflated > max(INFLATED, INFLATES * path.stat().st_size):
        raise UnreadableFile(
            f"{path} would grow from {path.stat().st_size:,} bytes to {inflated:,} when decompressed, as no weights do "
            f"(a decompression bomb?); it was not read. Save the arrays without compression if they are yours."
        )
    if any(name.endswith(".npy") for name in names):
        return _read_npz(path)
    if any(name.endswith("/constants.pkl") for name in names):
        raise UnsafeFile(
            f"{path} is a TorchScript program, not weights; it was not run. Save model.state_dict() instead."
        )
    return _read_torch(path, key, notes)


def _read_npz(path: Path) -> dict[str, Tensor]:
    tensors = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                array = archive[name]
                if array.dtype == np.dtype("V2"):  # NumPy has no bfloat16: JAX writes its bytes
                    tensors[name] = torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
                else:
                    tensors[name] = torch.from_numpy(array)
    except Exception as error:  # damaged bytes fail in many ways
        if "pickle" in str(error):
            raise UnsafeFile(
                f"{path} holds Python objects, and reading them could run code; it was not read. Save only plain "
                f"arrays."
            ) from None
        raise UnreadableFile(f"{path} is truncated or damaged ({_short(error)}); download or copy it again.") from None
    return tensors


def _read_torch(path: Path, key: str | None, notes: list[str]) -> dict[str, Tensor]:
    try:
        if _too_deep(path):
            raise ValueError(f"more than {DEEPEST} tuples inside each other")
        # Training scripts save their arguments with the weights; a Namespace holds values and runs nothing.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about odd pickles: they are either read or refused
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if not re.search(r"GLOBAL|Unsupported (class|operand)|Can only build|reduce", str(error)):
            raise UnreadableFile(f"{path} is truncated or not a PyTorch file; download or copy it again.") from None
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f" ({found[1]})" if found else ""
        raise UnsafeFile(
            f"{path} holds Python objects{what} besides tensors, and reading them could run code; it was not read. "
            f"Save model.state_dict() with the library that made it."
        ) from None
    except Exception as error:  # a damaged pickle can fail in any way, but never runs anything
        raise UnreadableFile(
            f"{path} is truncated or not a PyTorch file ({_short(error)}); download or copy it again."
        ) from None
    return unwrap(saved, path, key, notes)


def _too_deep(path: Path) -> bool:
    """Return whether a pickle of a PyTorch file has more than DEEPEST tuples inside each other; builds none."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                pickles = (name for name in archive.namelist() if name.endswith(".pkl"))
                return any(_nested(io.BytesIO(archive.read(name))) for name in pickles)
        with open(path, "rb") as file:  # a magic number, the version, the machine, the object, its storages
            return any(_nested(file) for _ in range(5))
    except Exception:  # damaged: torch says how
        return False


def _nested(file: IO[bytes]) -> bool:
    """Return whether the pickle that begins here has more than DEEPEST tuples inside each other."""
    stack, marks, memo = list[int](), list[int](), dict[Any, int]()  # numbers of nested tuples
    for op, value, _ in pickletools.genops(file):
        if op.name == "MARK":
            marks.append(len(stack))
        elif op.name.endswith("PUT"):
            memo[value] = stack[-1]
        elif op.name.endswith("GET"):
            stack.append(memo[value])
        else:
            cut = len(stack) - len(op.stack_before)
            if pickletools.markobject in op.stack_before:
                cut = marks.pop() - op.stack_before.index(pickletools.markobject)
            depth = max(stack[cut:], default=0) + ("TUPLE" in op.name)
            if depth > DEEPEST:
                return True
            stack[cut:] = [depth] * len(op.stack_after)
    return False


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def unwrap(saved: Any, path: Path, key: str | None, notes: list[str]) -> dict[str, Tensor]:
    """Return the state dict inside what a training script has saved.

    Args:
        saved: the result of `torch.load`.
        path: for messages.
        key: the entry to take (default: the first of NESTED that holds tensors).
        notes: receives a sentence that says which entry was taken.

    Raises:
        TensorMismatch: no tensors, or values of another kind among them.
    """
    passed = set[int]()
    while isinstance(saved, Mapping) and not any(isinstance(value, Tensor) for value in saved.values()):
        holding = [str(name) for name, value in saved.items() if _holds_tensors(value)]
        known = [name for name in NESTED if name in holding]
        if id(saved) in passed:
            raise TensorMismatch(f"Expected a state dict; {path} holds a dictionary that contains itself.")
        passed.add(id(saved))
        chosen = key or next(iter(known), None)
        if chosen not in holding:
            raise TensorMismatch(
                f"Expected a state dict, or one under {key or ' or '.join(NESTED)}; {path} holds "
                + (f"tensors under {', '.join(holding)}. Choose with key= (--key)." if holding else _kind(saved))
            )
        if len(known) > 1:
            notes.append(
                f"The file holds several sets of weights ({', '.join(known)}); those under {chosen!r} are used. "
                f"Choose others with key= (--key)."
            )
        else:
            notes.append(f"The weights are those under {chosen!r} in the file.")
        saved, key = next(value for name, value in saved.items() if str(name) == chosen), None
    if key is not None:
        raise TensorMismatch(f"{path} holds its tensors at the top level, not under {key!r}; leave key= (--key) out.")
    if not isinstance(saved, Mapping):
        raise TensorMismatch(f"Expected a state dict; {path} holds {_kind(saved)}")
    if odd := [str(name) for name, value in saved.items() if not isinstance(value, Tensor)]:
        raise TensorMismatch(
            f"Expected only tensors; {path} also holds {odd[0]!r}, which is not one. Save the state dict alone."
        )
    return {str(name): tensor for name, tensor in saved.items()}


def _holds_tensors(value: Any) -> bool:
    """Whether tensors are anywhere in nested dictionaries, which may be deep, and may contain themselves."""
    seen, left = set[int](), [value]
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            return value is not one
        if isinstance(one, Mapping) and id(one) not in seen:
            seen.add(id(one))
            left.extend(one.values())
    return False


def _kind(saved: Any) -> str:
    keys = f" of {', '.join(map(str, list(saved)[:4]))}" if isinstance(saved, Mapping) and saved else ""
    return f"a {type(saved).__name__}{keys}. Save model.state_dict()."


def _write_safetensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    # A single key, because safetensors writes several in random order; without one transformers refuses the file.
    assert len(metadata) <= 1, metadata
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata=metadata or {"format": "pt"})


def _write_torch(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    # clone: a view would be written with all of its underlying storage
    torch.save({name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}, path)


def _write_npz(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    arrays = {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in tensors.items()}
    with open(path, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


WRITERS: dict[str, Callable[[dict[str, Tensor], Path, dict[str, str]], None]] = {
    ".safetensors": _write_safetensors,
    ".pth": _write_torch,
    ".pt": _write_torch,
    ".bin": _write_torch,
    ".npz": _write_npz,
}


def write(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors to a file in the format of its suffix. Equal tensors and metadata give equal bytes.

    Args:
        tensors: by name, on any device.
        path: ends in a suffix that is in WRITERS.
        metadata: at most one string by name; only safetensors files can hold it.
    """
    try:
        on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        WRITERS[path.suffix.lower()](on_cpu, path, dict(metadata or {}))
    except (safetensors.SafetensorError, RuntimeError) as error:  # how these libraries report a failed write
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.ENOSPC, str(error)) from error
