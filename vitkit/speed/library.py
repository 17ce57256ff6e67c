"""Optional libraries of this room: imported where they are used, and their absence carries the cure."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vitkit.errors import MissingDependency

log = logging.getLogger("vitkit")

ISA = "ONEDNN_MAX_CPU_ISA"      # oneDNN's own switch; torch, OpenVINO and ONNX Runtime compute with that library
PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


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


@functools.cache
def check_instructions() -> None:
    """Keep oneDNN from matrix instructions (AMX) that this machine names but cannot run.

    Some virtual machines do so, and 8-bit or bf16 products then end the process. A child process tries it out; where it
    dies, oneDNN's own switch is set for this process. The switch set by the user is left as it is.
    """
    if ISA in os.environ or not has_amx():
        return
    if subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False).returncode < 0:
        os.environ[ISA] = "AVX512_CORE_FP16"
        log.warning("This machine names AMX instructions but cannot run them; they are not used (%s=%s).", ISA,
                    os.environ[ISA])


def has_amx() -> bool:
    """Whether the CPU says that it has AMX (Linux)."""
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
