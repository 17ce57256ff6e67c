"""Checks of configuration fields and of the indices that a caller passes."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import sys
from collections.abc import Iterable
from typing import Any, get_args

from vitkit.errors import ConfigError, InputError, nearest

Indices = int | Iterable[int] | None

# The largest values that a configuration may have: far above every published model, and low enough that nothing takes
# for ever, or more memory than there is, before a configuration is compared with the tensors of its file.
LIMITS = {
    "hidden_size": 2**16,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**16,
    "intermediate_size": 2**20,
    "patch_size": 2**12,
    "num_channels": 2**12,
    "num_classes": 2**24,
    "num_register_tokens": 2**16,
    "image_size": 2**14,
    "size": 2**14,
}
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxlong = 100
_brief.maxother = 120


def brief(value: object) -> str:
    """Return a value as Python writes it, cut if it is long: a file may hold anything."""
    return _brief.repr(value)


def pair(size: int | Iterable[int]) -> tuple[int, int]:
    """Return (height, width) of a size given as one number or as two."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


def one_of(name: str, value: object, allowed: Any) -> None:
    """Raise unless the value is one of the words of the Literal `allowed`."""
    if value not in get_args(allowed):
        hint = nearest(str(value), list(get_args(allowed)))
        raise ConfigError(f"{name} must be one of {', '.join(get_args(allowed))}; got {brief(value)}{hint or '.'}")


def some_of(name: str, values: object, allowed: Any) -> tuple[Any, ...]:
    """Return a list of words of the Literal `allowed` in its order; raise if one is not among them."""
    if not isinstance(values, list | tuple | set | frozenset):
        raise ConfigError(f"{name} must be a list of {', '.join(get_args(allowed))}; got {values!r}.")
    for value in values:
        one_of(name, value, allowed)
    return tuple(value for value in get_args(allowed) if value in values)


def whole(name: str, value: object, least: int) -> None:
    """Raise unless the value is an integer of at least `least`, and at most that of LIMITS."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}; got {brief(value)}.")
    if value > LIMITS.get(name, value):
        raise ConfigError(f"{name} must be at most {LIMITS[name]:,}; got {brief(value)}.")


def flags(config: Any) -> None:
    """Raise unless every field of a dataclass that is declared as a bool holds one."""
    for field in dataclasses.fields(config):
        if field.type == "bool" and not isinstance(value := getattr(config, field.name), bool):
            raise ConfigError(f"{field.name} must be True or False; got {brief(value)}.")


def number(
    name: str, value: object, low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = False
) -> None:
    """Raise unless the value is a finite number between `low` and `high`; an open end is left out."""
    real = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    ends = open_low * [low] + open_high * [high]
    if not real or not low <= value <= high or value in ends:  # type: ignore[operator]
        span = f" {'over' if open_low else 'at least'} {low:g}" if low > -math.inf else ""
        span += f" and {'below' if open_high else 'at most'} {high:g}" if high < math.inf else ""
        raise ConfigError(f"{name} must be a finite number{span}; got {brief(value)}.")


def size(name: str, value: object) -> int | tuple[int, int]:
    """Check a size and normalise it: a number if square, else (height, width)."""
    sides = [value] if isinstance(value, int) else value
    if not isinstance(sides, list | tuple) or len(sides) not in (1, 2):
        raise ConfigError(f"{name} must be a number of pixels or (height, width); got {brief(value)}.")
    for side in sides:
        whole(name, side, 1)
    return sides[0] if len(set(sides)) == 1 else (sides[0], sides[1])


def indices(name: str, given: int | Iterable[int], count: int) -> list[int]:
    """Turn one index or several (negative ones count from the end) into a list of numbers in 0..count-1."""
    values = [given] if isinstance(given, int) else list(given)
    for value in values:
        if not -count <= value < count:
            raise InputError(f"{name} must lie between 0 and {count - 1} (or count from the end); got {value}.")
    return [value % count for value in values]
