"""Optional libraries of this room: imported where they are used, and their absence carries the cure."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from vitkit.errors import MissingDependency


def library(name: str) -> Any:
    """Import an optional library.

    Args:
        name: of the module.

    Raises:
        MissingDependency: it is not installed; the message holds the command.
    """
    if importlib.util.find_spec(name.split(".", maxsplit=1)[0]) is None:
        raise MissingDependency(f"This needs {name}: pip install 'vitkit[export]'.")
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]    # optional: reports use to its maker
    os.environ.setdefault("NNCF_CI", "1")                                           # the same, of NNCF
    return importlib.import_module(name)
