"""The library whose threads torch runs its own operations on."""

from __future__ import annotations

import functools
from pathlib import Path

import torch


@functools.cache
def gnu_openmp() -> Path | None:
    """GNU's OpenMP, as torch brings it on Linux; None where it uses another."""
    libraries = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    return libraries[0] if libraries else None
