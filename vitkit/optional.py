"""Optional libraries: imported where they are used. A missing one raises an error with the install command."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from vitkit.errors import MissingDependency

SERVE = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")


def need(extra: str, *modules: str) -> None:
    """Raise where a library of an extra is not installed.

    Args:
        extra: the extra in pyproject.toml that installs it.
        modules: names of modules, any of which may be dotted.

    Raises:
        MissingDependency: with the command that installs it.
    """
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise MissingDependency(f"This needs {module}: pip install 'vitkit[{extra}]'.")


def library(name: str, extra: str) -> Any:
    """Import an optional library.

    Args:
        name: the module's name.
        extra: the extra in pyproject.toml that installs it.

    Raises:
        MissingDependency: it is not installed; the message holds the install command.
    """
    need(extra, name)
    # These two report their use to their makers unless told not to.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    os.environ.setdefault("NNCF_CI", "1")
    return importlib.import_module(name)
