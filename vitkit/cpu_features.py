"""What this CPU names and cannot run: asked once, before anything computes in 8 or 16 bits."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from pathlib import Path

log = logging.getLogger("vitkit")

ISA = "ONEDNN_MAX_CPU_ISA"  # oneDNN's own switch; torch, OpenVINO and ONNX Runtime compute with that library
PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def check_type(device: str, dtype: object) -> None:
    """`check_instructions`, where the CPU is to compute in 16 bits.

    Args:
        device: the kind of the device: cpu, cuda, ...
        dtype: torch's type of floating point, or its name; None for full precision.
    """
    if device == "cpu" and str(dtype).removeprefix("torch.") in ("bfloat16", "float16"):
        check_instructions()


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
        log.warning(
            "This machine names AMX instructions but cannot run them; they are not used (%s=%s).", ISA, os.environ[ISA]
        )


def has_amx() -> bool:
    """Whether the CPU says that it has AMX (Linux)."""
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
