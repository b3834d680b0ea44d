"""What every Triton kernel shares: how it is compiled, and on which memory it can run."""

from __future__ import annotations

import os

# Fusing a product and a sum into one rounding is off. The kernels then round as the naive
# versions do, GGUF blocks decode to the bits that gguf-py gives, and neither Triton's release
# (3.9 fuses by default, 3.10 will not) nor the interpreter changes a result. These kernels wait
# for memory, not for arithmetic; where a fused sum pays, tl.fma asks for it. A user's setting wins.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")

import torch
import triton

__all__ = ["INTERPRETED", "LEAST_DEPTH", "as_rows", "cdiv", "jit", "power_of_2"]

jit = triton.jit

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, which knows no instructions of a GPU."""

LEAST_DEPTH = 16
"""The least depth K of `tl.dot` with operands of 16 bits and more: Triton up to 3.7 asks for 16,
3.8 for 8 of f32 (`min_dot_size` in triton/backends/nvidia/compiler.py)."""


def power_of_2(n: int) -> int:
    """The smallest power of two that is not below n >= 1, as the sides of a tile must be."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[n, d] with neighbours side by side, a view where the strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
