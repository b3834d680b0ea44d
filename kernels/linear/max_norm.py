"""Rows divided by their largest magnitude, as they are rounded to integers of 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.dispatch import operation
from kernels.llvm import F32X16, Code, Value, kernel
from kernels.llvm.functions import rows, run, start, vectors

SUMS = 4
"""Maxima formed at a time: each waits for the one before."""


@operation(llvm=__name__)
def max_norm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x / max(|x|) over the last axis, and these largest magnitudes.

    x: f32 [..., d]. Returns [..., d] and [..., 1]; the largest magnitude counts as the smallest
    normal number at least, so that a row of zeros stays zero.
    """
    # the infinity norm would be one operation less and up to twenty times slower
    largest = x.abs().amax(-1, True).clamp_min_(torch.finfo(x.dtype).tiny)
    return x / largest, largest


def max_norm_naive(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See max_norm."""
    largest = x.abs().max(-1, keepdim=True).values.clamp(min=torch.finfo(x.dtype).tiny)
    return x / largest, largest


def max_norm_with_llvm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See max_norm."""
    d, y = x.shape[-1], x.new_empty(*x.shape)
    largest = x.new_empty(*x.shape[:-1], 1)
    x, x_rows = rows(x)
    run(_max_program(d), largest.numel(), d, *x_rows, y.data_ptr(), largest.data_ptr())
    return y, largest


@kernel(6)
def _max_program(code: Code, args: Sequence[Value], row: Value, d: int) -> None:
    """Arguments: x in RowPlaces, y, the largest magnitudes."""
    *x, y, maxima = args
    tiny = code.constant(F32X16, torch.finfo(torch.float32).tiny)
    source, target = start(x, row), y + row * (4 * d)
    most = [code.variable(tiny) for _ in range(SUMS)]
    for i, (at, count) in enumerate(vectors(code, d, SUMS)):
        part = code.load_first(source + at, F32X16, count)
        magnitude, so_far = code.call("llvm.fabs.v16f32", F32X16, part), most[i % SUMS]
        so_far.set(code.larger(magnitude, so_far.value))
    a, b, c, e = (so_far.value for so_far in most)
    largest = code.maximum(code.larger(code.larger(a, b), code.larger(c, e)))
    code.store(largest, maxima + row * 4)
    divisor = code.splat(largest)
    for at, count in vectors(code, d):
        code.store_first(code.load_first(source + at, F32X16, count) / divisor, target + at, count)
