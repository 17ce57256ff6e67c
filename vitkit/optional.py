"""Optional libraries, imported where they are used. A missing one raises an error with the install command."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from vitkit.errors import MissingDependency


def need(extra: str, *modules: str) -> None:
    """Check that optional libraries are installed, without importing them.

    Args:
        extra: the extra in pyproject.toml that installs them.
        modules: module names, dotted or not.

    Raises:
        MissingDependency: one is not installed; the message contains the install command.
    """
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise MissingDependency(f"This needs {module}: pip install 'vitkit[{extra}]'.")


def library(name: str, extra: str) -> Any:
    """Import an optional library.

    Args:
        name: module name.
        extra: the extra in pyproject.toml that installs it.

    Raises:
        MissingDependency: it is not installed; the message contains the install command.
    """
    need(extra, name)
    # openvino and nncf send usage statistics to their makers unless told not to.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    os.environ.setdefault("NNCF_CI", "1")
    return importlib.import_module(name)
