"""The CPU: its vendor, and instructions that it advertises but cannot run; checked before computing in 8 or 16 bits."""

from __future__ import annotations

import functools
import logging
import os
import platform
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
    return "amx_tile" in _cpuinfo()


def vendor() -> str:
    """Return the name that an x86 CPU gives its vendor, such as GenuineIntel or AuthenticAMD; empty if unknown."""
    for line in _cpuinfo().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "vendor_id":
            return value.strip()
    words = platform.processor().split()  # on Windows, the last one
    return words[-1] if words and words[-1] in ("GenuineIntel", "AuthenticAMD") else ""


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
