"""Files of tensors, told apart by their first bytes: safetensors, PyTorch's `.pth` (weights only), NumPy's `.npz`.

A file that would have to run code to be read is refused; nothing in it is ever run.
"""

from __future__ import annotations

import argparse
import errno
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from vitkit.errors import TensorMismatch, UnreadableFile, UnsafeFile

# Where training scripts put the weights inside what they save, in order of preference.
NESTED = ("teacher", "model", "state_dict", "model_state_dict", "module", "params")
# What wrappers put before every name.
PREFIXES = ("module.", "_orig_mod.", "model.")
# Files that are not weights, by their first bytes.
IMPOSTORS = {
    b"version https://git-lfs": "is a Git LFS pointer, not the weights: run `git lfs pull`",
    b"<": "is a web page, not weights: download the file itself",
    b"\x1f\x8b": "is a gzip archive: unpack it first",
}


def read(path: Path, only: Collection[str] | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a file, and the strings it carries.

    Args:
        path: a safetensors, PyTorch or NumPy file, or the JSON index of a sharded one.
        only: names that are wanted from a safetensors file; all when not given.

    Returns:
        Tensors by name (mapped from the file where the format allows it), and safetensors' metadata.

    Raises:
        UnreadableFile: not there, truncated, or of another format.
        UnsafeFile: holds more than tensors.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(64)
    except OSError as error:
        raise UnreadableFile(f"Could not open {path}: {error.strerror or error}.") from None
    if path.name.endswith(".index.json"):
        return _read_shards(path, only)
    reader = _reader(path, start)
    return _read_safetensors(path, only) if reader is _read_safetensors else reader(path)


def _reader(path: Path, start: bytes) -> Callable[[Path], tuple[dict[str, Tensor], dict[str, str]]]:
    if start.startswith(b"PK"):
        return _read_zip
    if start[8:9] == b"{":
        return _read_safetensors
    if start.startswith(b"\x80"):
        return _read_torch
    for magic, what in IMPOSTORS.items():
        if start.lstrip().startswith(magic):
            raise UnreadableFile(f"{path} {what}.")
    what = f"begins with {start[:8]!r}" if start else "is empty"
    raise UnreadableFile(f"{path} {what}; expected a .safetensors, .pth, .pt, .bin or .npz file of weights.")


def _read_safetensors(path: Path, only: Collection[str] | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if only is None or name in only]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except Exception as error:
        raise UnreadableFile(
            f"{path} is no whole safetensors file ({_short(error)}); download or copy it again."
        ) from None


def _read_shards(path: Path, only: Collection[str] | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A sharded file: its index names the shard of every tensor."""
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(places.values()))
        outside = [shard for shard in shards if Path(shard).name != shard]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UnreadableFile(f"{path} is no index of a sharded checkpoint (no weight_map).") from None
    if outside:
        raise UnreadableFile(f"{path} names {outside[0]!r}, which is outside its own folder; that is not followed.")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        tensors |= read(path.parent / shard, only)[0]
    if odd := sorted(set(tensors) ^ {name for name in places if only is None or name in only}):
        raise TensorMismatch(f"{path} and its shards disagree about tensor {odd[0]!r}; download them again.")
    return tensors, {}


def _read_zip(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception as error:  # damaged bytes fail in many ways
        raise UnreadableFile(f"{path} is truncated or damaged ({_short(error)}); download or copy it again.") from None
    if any(name.endswith(".npy") for name in names):
        return _read_npz(path)
    if any(name.endswith("/constants.pkl") for name in names):
        raise UnsafeFile(f"{path} is a TorchScript program, not weights; it was not run. Save model.state_dict().")
    return _read_torch(path)


def _read_npz(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
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
                f"{path} holds Python objects, which could run code; it was not read. Save plain arrays only."
            ) from None
        raise UnreadableFile(f"{path} is truncated or damaged ({_short(error)}); download or copy it again.") from None
    return tensors, {}


def _read_torch(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        # Training scripts save their arguments beside the weights; a Namespace holds values and runs nothing.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd pickles; whether they are read is what matters
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if not re.search(r"GLOBAL|Unsupported (class|operand)|Can only build|reduce", str(error)):
            raise UnreadableFile(f"{path} is truncated or no file of PyTorch; download or copy it again.") from None
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f" ({found[1]})" if found else ""
        raise UnsafeFile(
            f"{path} holds Python objects{what}, not only tensors, and reading them could run code; it "
            f"was not read. Save model.state_dict() with the library that made it."
        ) from None
    except Exception as error:  # a damaged pickle can fail in any way; none of them runs anything
        raise UnreadableFile(
            f"{path} is truncated or no file of PyTorch ({_short(error)}); download or copy it again."
        ) from None
    return unwrap(saved, path), {}


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def unwrap(saved: Any, path: Path) -> dict[str, Tensor]:
    """The state dict inside what a training script has saved.

    Args:
        saved: what `torch.load` gave.
        path: for messages.

    Raises:
        TensorMismatch: no tensors, or something else among them.
    """
    while isinstance(saved, Mapping) and not any(isinstance(value, Tensor) for value in saved.values()):
        inner = [key for key in NESTED if isinstance(saved.get(key), Mapping)]
        if not inner:
            break
        saved = saved[inner[0]]
    if not isinstance(saved, Mapping) or not any(isinstance(value, Tensor) for value in saved.values()):
        keys = f" of {', '.join(map(str, list(saved)[:4]))}" if isinstance(saved, Mapping) and saved else ""
        raise TensorMismatch(
            f"{path} holds no state dict; expected tensors by name (or one of {', '.join(NESTED)} "
            f"with them), got a {type(saved).__name__}{keys}."
        )
    if odd := [str(name) for name, value in saved.items() if not isinstance(value, Tensor)]:
        raise TensorMismatch(f"{path} holds {odd[0]!r} among its tensors, which is none; save the state dict alone.")
    tensors = {str(name): tensor for name, tensor in saved.items()}
    while prefix := next((p for p in PREFIXES if all(name.startswith(p) for name in tensors)), ""):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _write_safetensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt", **metadata})


def _write_torch(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    # clone: a view would be written with all the memory it looks into
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
    """Write tensors to a file of the kind that its suffix says.

    Args:
        tensors: by name, on any device.
        path: ends in one of WRITERS.
        metadata: strings, which safetensors alone can hold.
    """
    try:
        on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        WRITERS[path.suffix.lower()](on_cpu, path, dict(metadata or {}))
    except (safetensors.SafetensorError, RuntimeError) as error:  # how these libraries report a failed write
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.ENOSPC, str(error)) from error
