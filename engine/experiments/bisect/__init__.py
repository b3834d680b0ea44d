"""Which commit or build of llama.cpp broke its rollback, and where in its graph."""

from __future__ import annotations

from pathlib import Path

from kernels.kernel_files import cache_folder


def progress_file() -> Path:
    """The lines that windows show of the latest search, in the folder that holds all searches."""
    return cache_folder() / "bisect" / "progress.txt"
