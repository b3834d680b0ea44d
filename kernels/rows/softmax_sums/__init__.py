"""What a softmax of long rows is divided by, and its entropy's sum, without the softmax itself."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.rows.softmax_sums import naive, with_torch

__all__ = ["LEAST", "softmax_sums"]

LEAST = naive.LEAST
"""Numbers further below the largest count as this far below: finite, and e to the power of it is
0."""

_run = pick(
    naive.softmax_sums, with_torch.softmax_sums, llvm_module="kernels.rows.softmax_sums.with_llvm"
)


def softmax_sums(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Of every row the sum of e^s and that of s e^s, s = max(x - largest, LEAST).

    x: f32 [n, d]; largest: f32 [n]. Returns f32 [n, 2]; NaN where the row has one. A row has the
    same bits whatever rows stand beside it.
    """
    return _run(x, largest)
