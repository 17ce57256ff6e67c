"""The libraries that serving is made of, and the command that installs them."""

from __future__ import annotations

import importlib.util

from vitkit.errors import MissingDependency

NEEDS: dict[str, tuple[str, ...]] = {           # extra -> modules that it brings
    "serve": ("fastapi", "uvicorn", "python_multipart", "prometheus_client"),
    "scale": ("ray",),
}


def need(extra: str) -> None:
    """Refuse, with the cure, where a library of an extra is not installed.

    Args:
        extra: a row of NEEDS.
    """
    for module in NEEDS[extra]:
        if importlib.util.find_spec(module) is None:
            raise MissingDependency(f"This needs {module}: pip install 'vitkit[{extra}]'.")
