"""The learner's function, from a Python file."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitkit.errors import InputError
from vitkit.learn.exercise import Exercise


def function_of(path: str | Path, exercise: Exercise) -> Callable[..., Any]:
    """Run a learner's own file and return the function that it defines for an exercise.

    Args:
        path: the Python file.
        exercise: names the function: `def NAME(...)` of its `start`.
    """
    path = Path(path).expanduser()
    name = re.match(r"def (\w+)", exercise.start)[1]  # type: ignore[index]
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise InputError(f"Expected a Python file that defines {name}; {path} {what}.")
    try:
        found = runpy.run_path(str(path)).get(name)
    except Exception as error:
        raise InputError(
            f"{path} stopped with {type(error).__name__}: {error}. Make it run by itself first."
        ) from error
    if not callable(found):
        raise InputError(f"Expected {path} to define the function {name}. Start from: {exercise.start}")
    return found
