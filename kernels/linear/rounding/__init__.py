"""Numbers rounded to what a shorter type holds, and kept as float32.

To the nearest, ties to the even one; beyond the largest float16 there is infinity.
"""

from __future__ import annotations

from kernels.dispatch import pick
from kernels.linear.rounding import naive, with_torch

_LLVM = "kernels.linear.rounding.with_llvm"

rounded = pick(naive.rounded, with_torch.rounded, None, _LLVM)
"""(x, type): x f32 [..., d], any strides, as the numbers that `type`, "bf16" or "f16", holds: f32,
new memory of the same shape."""

round_in_place = pick(naive.round_in_place, with_torch.round_in_place, None, _LLVM)
"""(x, type): the same in the memory of x."""

round_rows = pick(naive.round_rows, with_torch.round_rows, None, _LLVM)
"""(table, numbers, type): the same for rows of a table f32 [n, *row], each contiguous. numbers:
int64, any shape, 0 .. n - 1, not looked at by the host. The other rows keep their bits."""
