"""Seeded mutations of files and of JSON values, for benchmarks/fuzz.py."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from typing import Any

NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 10**6, 10**9, 10**18, 10**400, 0.5, -1.5, 1e308, 1e-320, float("nan")),
    *("", "x", "\x1b[31m", "9" * 400, "x" * 100_000, "../../etc/passwd", "gelu", "\ud800", "=1+1"),
    *([], {}, [[]], [1, 2, 3], {"a": 1}, [0] * 2000, {"height": 10**7, "width": 1}, [["x", [0]]], [[0, [10**9]]]),
)


def mutate(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Return `data` with one to four random changes.

    Args:
        data: a file of the corpus.
        rng: the case's own generator.
        other: another file, from which pieces may be taken.
    """
    raw = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = min(int(len(raw) * rng.random() ** rng.choice((1, 4))), max(len(raw) - 1, 0))  # often near the beginning
        size = rng.choice((1, 2, 4, 8, 64, 1024))
        match rng.randrange(9) if raw else 8:
            case 0:
                raw[at] ^= 1 << rng.randrange(8)
            case 1:
                raw[at] = rng.randrange(256)
            case 2:
                raw[at : at + size] = rng.randbytes(size)
            case 3:
                number, order = rng.choice(NUMBERS), rng.choice("<>")
                raw[at : at + 4] = struct.pack(f"{order}I", number & 0xFFFFFFFF)
            case 4:
                raw[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
            case 5:
                del raw[at:]
            case 6:
                del raw[at : at + size]
            case 7:
                raw[at:at] = raw[at : at + size] * rng.choice((1, 2, 50))
            case 8:
                begin = rng.randrange(len(other)) if other else 0
                raw[at : at + size] = other[begin : begin + size]
    return bytes(raw)


def mutate_json(value: Any, rng: random.Random) -> Any:
    """Return a JSON value in which one to three places hold something else, are missing, or are new."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        spots = list(_spots(value))
        if not spots:
            return rng.choice(VALUES)
        holder, key = rng.choice(spots)
        if rng.random() < 0.15:
            del holder[key]
        elif rng.random() < 0.1 and isinstance(holder, dict):
            holder[str(rng.choice(VALUES))[:50]] = holder[key]
        else:
            holder[key] = json.loads(json.dumps(rng.choice(VALUES)))  # a copy: it may be changed next
    return value


def _spots(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list) and len(inner) < 100:
            yield from _spots(inner)


def text_of(value: Any, rng: random.Random) -> bytes:
    """Write JSON, sometimes nested deeply or cut."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.02:
        return b"[" * 100_000
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.05 else text
