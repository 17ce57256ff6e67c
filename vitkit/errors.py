"""Every error a user can cause, and `pick`, which looks a name up in a table.

    VitkitError                  one sentence: what was expected, what was received, what to do (CLI: exit code 2)
    ├── ConfigError              a setting that cannot work                               (also a ValueError)
    │   └── UnknownName          a name that is not in its table
    ├── InputError               pixels or arguments that do not fit the model            (also a ValueError)
    ├── CheckpointError          a weights file that cannot be read, written or matched
    │   ├── UnreadableFile       missing, truncated, or in an unsupported format
    │   ├── UnsafeFile           reading it would run code from the file, so it is refused
    │   ├── UnknownDialect       tensor names that no dialect recognises
    │   ├── TensorMismatch       missing tensors, unexpected tensors, or wrong shapes
    │   ├── CannotExpress        the target dialect cannot store a property of the model
    │   └── HubError             a file that could not be downloaded from the hub
    ├── DataError                a data set that cannot be used as requested
    │   └── BadImage             an image that cannot be decoded; the message names it
    │       └── Unreachable      an image that its storage did not deliver; it may be fine
    ├── Diverged                 training whose loss or gradient became NaN or infinite
    ├── OutputError              a path that cannot be written to
    │   ├── Occupied             a path that holds something else already
    │   └── SaveFailed           a run that could no longer be saved                      (CLI: exit code 3)
    ├── LostWorker               a process that died or no longer answers                 (CLI: exit code 4)
    ├── OutOfMemory              no memory was left                                       (CLI: exit code 5)
    ├── RequestError             a request that the server cannot process
    │   ├── TooLarge             exceeds one of the server's limits
    │   ├── TooSlow              took too long to arrive
    │   ├── Unauthorised         lacks the server's token
    │   └── Busy                 the server is at capacity; retry later
    └── MissingDependency        an optional library that is not installed                (also an ImportError)

What belongs here: classes without behaviour, and `pick`. What does not belong here: imports from other rooms.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")
LONGEST = 1500  # characters of a message


class VitkitError(Exception):
    """Base class of all errors that a user can cause. `str(error)` is a sentence to show to the user."""

    exit_code = 2  # of the command line
    transient = False  # whether the same request may succeed later

    def __str__(self) -> str:
        text = super().__str__()  # which may quote a file, and a file may hold a name of 100 kB
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} [...] {text[-LONGEST // 2 :]}"


class ConfigError(VitkitError, ValueError):
    """A setting that cannot work."""


class UnknownName(ConfigError):
    """A name that is not in the table it was looked up in."""


class InputError(VitkitError, ValueError):
    """Pixels or arguments that do not fit the model."""


class CheckpointError(VitkitError):
    """A weights file that cannot be read, written or matched."""


class UnreadableFile(CheckpointError):
    """The file is missing, truncated, or in an unsupported format."""


class UnsafeFile(CheckpointError):
    """Reading the file would run code that it contains, so it was not read."""


class UnknownDialect(CheckpointError):
    """No dialect recognises the tensor names."""


class TensorMismatch(CheckpointError):
    """Tensors are missing, unexpected, or have the wrong shape."""


class CannotExpress(CheckpointError):
    """The target dialect cannot store a property of the model."""


class HubError(CheckpointError):
    """A file could not be downloaded from the hub."""

    transient = True


class DataError(VitkitError):
    """A data set that cannot be used as requested."""


class BadImage(DataError):
    """An image that cannot be decoded; the message names it.

    Args:
        sentence: its name and the reason.
        cure: what to do on the command line; a server gives other advice.
    """

    def __init__(self, sentence: str, cure: str = "") -> None:
        super().__init__(f"{sentence} {cure}".strip())
        self.sentence = sentence


class Unreachable(BadImage):
    """An image that its storage did not deliver; it may be fine, so trying again may help."""

    transient = True


class Diverged(VitkitError):
    """The loss or its gradient became NaN or infinite; earlier checkpoints are kept."""


class OutputError(VitkitError):
    """A path that cannot be written to."""

    transient = True


class Occupied(OutputError):
    """A path that holds something else already."""

    transient = False


class SaveFailed(OutputError):
    """A run could no longer be saved; the message says what is kept."""

    exit_code = 3


class LostWorker(VitkitError):
    """A process that the work depends on has died or no longer answers."""

    exit_code = 4
    transient = True


class OutOfMemory(VitkitError):
    """No memory was left."""

    exit_code = 5
    transient = True


class RequestError(VitkitError, ValueError):
    """A request that the server cannot process."""


class TooLarge(RequestError):
    """A request that exceeds one of the server's limits."""


class TooSlow(RequestError):
    """A request that took too long to arrive."""


class Unauthorised(RequestError):
    """A request without the server's token."""


class Busy(RequestError):
    """The server is at capacity; retry later."""


class MissingDependency(VitkitError, ImportError):
    """An optional library is not installed; the message contains the install command."""


def nearest(name: str, names: list[str]) -> str:
    """Return `", did you mean X?"` with the closest of `names`, or an empty string if none is close."""
    lower = {n.lower(): n for n in names}
    close = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=0.5)
    return f", did you mean {lower[close[0]]!r}?" if close else ""


def pick(table: Mapping[str, T], name: str, kind: str) -> T:
    """Return `table[name]`.

    Args:
        table: one of the project's tables (VARIANTS, DIALECTS, RECIPES, SOURCES, PLOTS, ...).
        name: the key to look up.
        kind: what the table holds, for the message ("variant", "recipe").

    Raises:
        UnknownName: `name` is not in the table; the message lists the choices and suggests the closest.
    """
    if name in table:
        return table[name]
    hint = nearest(str(name), list(table)) or "."
    raise UnknownName(f"Unknown {kind} {name!r}{hint} Choose one of: {', '.join(table)}.")
