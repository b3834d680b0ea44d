"""The LLVM version of tests/kernels/test_dispatch.py's operation."""

from __future__ import annotations


def implementation(x: object, *, more: int = 0) -> str:
    return "llvm"
