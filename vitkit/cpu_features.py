"""CPU instructions that this machine advertises but cannot run; checked once, before computing in 8 or 16 bits."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from pathlib import Path

log = logging.getLogger("vitkit")

ISA = "ONEDNN_MAX_CPU_ISA"  # read by oneDNN, which torch, OpenVINO and ONNX Runtime compute with
PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def check_type(device: str, dtype: object) -> None:
    """Call `check_instructions` if the CPU is about to compute in 16 bits.

    Args:
        device: the device type: cpu, cuda, ...
        dtype: a torch floating-point type or its name; None for full precision.
    """
    if device == "cpu" and str(dtype).removeprefix("torch.") in ("bfloat16", "float16"):
        check_instructions()


@functools.cache
def check_instructions() -> None:
    """Stop oneDNN from using matrix instructions (AMX) that this machine advertises but cannot run.

    On some virtual machines, 8-bit and bf16 matrix products kill the process for this reason. A child process tries one
    product; if it dies, ONEDNN_MAX_CPU_ISA is set for this process, unless the user has already set it.
    """
    if ISA in os.environ or not has_amx():
        return
    if subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False).returncode < 0:
        os.environ[ISA] = "AVX512_CORE_FP16"
        log.warning("This machine advertises AMX but cannot run it, so it is disabled (%s=%s).", ISA, os.environ[ISA])


def has_amx() -> bool:
    """Whether the CPU advertises AMX (on Linux; False elsewhere)."""
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
