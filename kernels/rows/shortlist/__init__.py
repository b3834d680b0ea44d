"""Which values of long rows are the largest, found without the host: the candidates of a draft."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.rows.shortlist import naive, with_torch

_run = pick(naive.shortlist, with_torch.shortlist, None, "kernels.rows.shortlist.with_llvm")


def shortlist(x: torch.Tensor, k: int) -> torch.Tensor:
    """Where the k largest values of every row stand, the largest first; of equal ones the lowest
    index comes first.

    x: f32 [..., n] of numbers, contiguous, 1 <= k <= n. Returns int64 [..., k], always within the
    row. Where a NaN or -inf is among the values, indices may come twice.
    """
    return _run(x, k)
