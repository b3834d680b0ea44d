"""The environment of a result, software and machine: for `--version`, traces and reports."""

from __future__ import annotations

import os
import platform
import tomllib
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from kernels.processor import processor_name as processor_name


@cache
def version() -> str:
    """The installed version; in a checkout that is not installed, that of pyproject.toml."""
    try:
        return metadata.version("draftscope")
    except metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parent.parent / "pyproject.toml"
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])


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
