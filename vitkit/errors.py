"""Every error a user can cause, and the one way to look a name up in a table.

    VitkitError                  one sentence: what was expected, what came, what to do (CLI: exit code 2)
    ├── ConfigError              a number or a word in a configuration that cannot work   (also a ValueError)
    │   └── UnknownName          a name that is in none of the rows of a table
    ├── InputError               pixels or arguments that do not fit the model            (also a ValueError)
    ├── CheckpointError          a file of weights that cannot be read, written or matched
    │   ├── UnreadableFile       truncated, of another format, or not there
    │   ├── UnsafeFile           would have to run code to be read; it never is
    │   ├── UnknownDialect       tensor names that no dialect recognises
    │   ├── TensorMismatch       tensors missing, left over, or of another shape
    │   ├── CannotExpress        a property of the model that the target dialect has no place for
    │   └── HubError             a hub file that could not be fetched
    ├── DataError                a data set that cannot be used as asked
    │   └── BadImage             one image that cannot be decoded, always named
    ├── Diverged                 a training whose loss is no finite number any more
    ├── OutputError              a place that cannot be written to
    ├── RequestError             a request that the server cannot read
    │   ├── TooLarge             over one of the server's limits
    │   ├── TooSlow              did not arrive in time
    │   ├── Unauthorised         without the server's token
    │   └── Busy                 the server has no room just now; trying again later will do
    └── MissingDependency        an optional library that is not installed                (also an ImportError)

What belongs here: classes without behaviour, and `pick`. What does not: anything that imports another room.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


class VitkitError(Exception):
    """Root of all errors that a user can cause. `str(error)` is one sentence that can be shown as it is."""


class ConfigError(VitkitError, ValueError):
    """A configuration that cannot work."""


class UnknownName(ConfigError):
    """A name that is not in the table it was looked up in."""


class InputError(VitkitError, ValueError):
    """Pixels or arguments that do not fit the model."""


class CheckpointError(VitkitError):
    """A file of weights that cannot be read, written or matched."""


class UnreadableFile(CheckpointError):
    """The file is missing, truncated, or of a format that is not read."""


class UnsafeFile(CheckpointError):
    """Reading the file would run code that is inside it; it was not run."""


class UnknownDialect(CheckpointError):
    """No dialect recognises the tensor names."""


class TensorMismatch(CheckpointError):
    """Tensors are missing, left over, or of another shape."""


class CannotExpress(CheckpointError):
    """The model has a property that the target dialect has no place for."""


class HubError(CheckpointError):
    """A file of the hub could not be fetched."""


class DataError(VitkitError):
    """A data set that cannot be used as asked."""


class BadImage(DataError):
    """One image that cannot be decoded; the message names it."""


class Diverged(VitkitError):
    """The loss or its gradient is no finite number any more; what was saved before is kept."""


class OutputError(VitkitError):
    """A place that cannot be written to."""


class RequestError(VitkitError, ValueError):
    """A request that the server cannot read."""


class TooLarge(RequestError):
    """A request over one of the server's limits."""


class TooSlow(RequestError):
    """A request that did not arrive in time."""


class Unauthorised(RequestError):
    """A request without the server's token."""


class Busy(RequestError):
    """The server has no room just now; trying again later will do."""


class MissingDependency(VitkitError, ImportError):
    """An optional library is not installed; the message holds the command that installs it."""


def nearest(name: str, names: list[str]) -> str:
    """Return ", did you mean X?" for the closest of `names`, or an empty string when none is close."""
    lower = {n.lower(): n for n in names}
    close = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.5)
    return f", did you mean {lower[close[0]]!r}?" if close else ""


def pick(table: Mapping[str, T], name: str, kind: str) -> T:
    """Return `table[name]`.

    Args:
        table: one of the project's visible tables (VARIANTS, DIALECTS, RECIPES, SOURCES, PLOTS, ...).
        name: the row that is wanted.
        kind: what a row is, for the message ("variant", "recipe").

    Raises:
        UnknownName: lists what exists and offers the nearest.
    """
    if name in table:
        return table[name]
    hint = nearest(str(name), list(table)) or "."
    raise UnknownName(f"Unknown {kind} {name!r}{hint} Choose one of: {', '.join(table)}.")
