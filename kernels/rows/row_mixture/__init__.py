"""Softmax-weighted sums of rows: the residual attention across layers of kimi-k3."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.rows.row_mixture import naive, with_torch

_LLVM = "kernels.rows.row_mixture.with_llvm"
_run = pick(naive.mix_rows, with_torch.mix_rows, None, _LLVM)
_invariant = pick(with_torch.mix_rows_invariant, with_torch.mix_rows_invariant, None, _LLVM)

MOST_ROWS = 1024
"""Other rows that a row is mixed with, at most."""


def mix_rows(
    x: torch.Tensor,
    others: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """The rows of x and those of `others` beside them, weighted by the softmax of their scores; a
    score is the sum of weight * row / sqrt(mean(row^2) + eps).

    x: f32 [..., d]; others: f32 [n, ..., d], contiguous, n from 1 to MOST_ROWS; weight: f32 [d].
    Returns [..., d]. Differentiable.

    invariant: each row of the result has the same bits whatever rows stand beside it.
    """
    return (_invariant if invariant else _run)(x, others, weight, eps)
