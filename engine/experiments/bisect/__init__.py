"""Bisection: the commit or build of llama.cpp that broke its rollback, and the place in its
graph."""

from __future__ import annotations

from pathlib import Path

from kernels.kernel_files import cache_folder


def progress_file() -> Path:
    """Progress of the latest search for windows, in the folder of all searches."""
    return cache_folder() / "bisect" / "progress.txt"
