"""The short convolution inside a drafted block, whose weights depend on the row (DFlash2)."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.recurrence.block_conv import naive, with_torch

_run = pick(
    naive.block_conv, with_torch.block_conv, None, "kernels.recurrence.block_conv.with_llvm"
)


def block_conv(x: torch.Tensor, base: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """y[a] = sum over taps t of (base[t] + own[a, t]) * x[a - t]; rows before the first are zero.

    x: f32 [B, T, d]; base: f32 [K, d]; own: f32 [B, T, K, G], G a divisor of d: each number counts
    for d / G neighbouring channels. Any strides. Returns f32 [B, T, d]; a row's bits depend on
    itself and the K - 1 rows before it alone.
    """
    return _run(x, base, own)
