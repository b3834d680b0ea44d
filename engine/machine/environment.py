"""The software and the machine that a measurement was made on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from typing import Any

from engine.version import version
from kernels.processor import processor_name as processor_name


def environment() -> dict[str, Any]:
    """Versions, machine, threads in use, and the time now (UTC, ISO 8601)."""
    return {**machine(), "date": datetime.now(UTC).isoformat(timespec="seconds")}


def machine() -> dict[str, Any]:
    """Versions, machine, and threads in use."""
    import torch

    return {
        "draftscope": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
