"""Choices by timing: which of several ways to compute the same thing is fastest here.

A choice is made once and kept on disk in `kernels.json`, in vitkit's cache folder, so that the next process does not
time again. Its key names everything that the answer depends on: the device, the versions of torch, Triton and vitkit,
what is computed and the shapes. A file that cannot be read or written costs time and nothing else.

Another choice rounds differently, so a training run keeps its own (`pinned`): it is resumed with the choices that it
began with, even where that cache is gone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

import vitkit
from vitkit.cuda_capture import capture, warm_up
from vitkit.places import cache_folder

NAME = "kernels.json"
TURNS = 3  # each way is timed so often, in turns, because a device's speed changes; its best time counts
Ways = Mapping[str, Callable[[], object]]  # {name: CUDA work}


class _Run:
    """The training run whose choices are pinned: its file and what that holds. There is one at a time, whatever thread
    asks, because backward passes run in threads of torch's own."""

    path: Path | None = None
    known: dict[str, str] = {}
    number = 0  # changes with every run that begins or ends


@contextmanager
def pinned(path: Path) -> Iterator[None]:
    """A context in which the choices of a file apply, and new ones are added to it.

    Args:
        path: a JSON file of a training run; it need not exist.
    """
    before = _Run.path, _Run.known
    _Run.path, _Run.known = path, _read(path)
    _Run.number += 1
    try:
        yield
    finally:
        _Run.path, _Run.known = before
        _Run.number += 1


def pinning() -> bool:
    """Return whether a training run keeps what is chosen now."""
    return _Run.path is not None


def run_number() -> int:
    """Return a number that changes when a pinned run begins or ends, and with it what `fastest` may answer."""
    return _Run.number


def milliseconds(work: Callable[[], object], times: int = 10) -> float:
    """Time CUDA work without the time that launching it takes.

    Small kernels finish before the next is launched, so the work is replayed from a graph.

    Args:
        work: CUDA work.
        times: how often it is repeated in the graph; the result is for all repetitions.
    """

    def many() -> None:
        for _ in range(times):
            work()

    warm_up(work)
    graph, _ = capture(many)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def busy_milliseconds(work: Callable[[], object], times: int = 5) -> float:
    """Time CUDA work that takes longer than launching it; no graph is captured, which takes longer than the work.

    Args:
        work: CUDA work.
        times: how often it is repeated; the result is for all repetitions.
    """
    work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def fastest(what: str, ways: Ways, time: Callable[[Callable[[], object]], float] = milliseconds) -> str | None:
    """Return the name of the fastest way; None if none of them runs.

    Args:
        what: what is computed, with its shapes and types.
        ways: what to choose from; one that raises does not take these shapes or types.
        time: returns how long a way takes, in any unit.
    """
    key = f"{_where()}; {what}"
    among = f"{key}; of {', '.join(ways)}"  # a run keeps its choice, whatever else there is to choose from later
    best = next((name for name in (_Run.known.get(key), _known().get(among)) if name in ways), None)
    if best is None:
        took = _timed(ways, time)
        if not took:
            return None
        best = min(took, key=lambda name: took[name])
        _remember(among, best)
    if _Run.path is not None and _Run.known.get(key) != best:
        _Run.known[key] = best
        _write(_Run.path, _Run.known)
    return best


def _timed(ways: Ways, time: Callable[[Callable[[], object]], float]) -> dict[str, float]:
    took: dict[str, float] = {}
    for turn in range(TURNS):
        for name, work in ways.items():
            if turn and name not in took:
                continue
            with contextlib.suppress(Exception):  # kernels and their compilers raise every kind of error
                took[name] = min(time(work), took.get(name, math.inf))
    return took


def _where() -> str:
    return _on(torch.cuda.current_device() if torch.cuda.is_available() else None)


@functools.cache
def _on(index: int | None) -> str:
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "none"
    device = "cpu" if index is None else torch.cuda.get_device_name(index)
    return f"{device}; torch {torch.__version__}; triton {triton}; vitkit {vitkit.__version__}"


@functools.cache
def _known() -> dict[str, str]:
    """Return the choices of earlier processes; this one adds to them."""
    return _read(cache_folder() / NAME)


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {key: name for key, name in pairs if isinstance(name, str)}


def _remember(key: str, name: str) -> None:
    _known()[key] = name
    path = cache_folder() / NAME
    _write(path, _read(path) | {key: name})  # another process may have added its own


def _write(path: Path, found: dict[str, str]) -> None:
    keep(path, json.dumps(found, indent=1).encode())


def keep(path: Path, data: bytes) -> None:
    """Write a file of the cache, whole or not at all; one that cannot be written costs time and nothing else."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".vitkit-", delete=False) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)
