"""What this machine has, asked without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path


def gpu_names() -> list[str]:
    """What the driver calls the GPUs of this machine, e.g. `NVIDIA H200`; empty where it does not say."""
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            match = re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        names += [match[1].strip()] if match else []
    return names


def host_memory_bytes() -> int | None:
    """The memory of this machine; None where it cannot be told."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
