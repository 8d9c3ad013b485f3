"""What the figures were measured on, without names."""

import os
import platform
from pathlib import Path

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe(threads: int) -> dict[str, object]:
    """Processor, what it can do, memory, system and threads."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = [line.partition(":") for line in info.splitlines()]
    flags = next((value.split() for key, _, value in fields if key.strip() == "flags"), [])
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": next((value.strip() for key, _, value in fields if key.strip() == "model name"), "?"),
        "cores": os.cpu_count(),
        "threads": threads,
        "flags": [flag for flag in _FLAGS if flag in flags],
        "memory_gb": round(pages / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
    }
