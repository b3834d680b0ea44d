"""The largest values of long rows: what a sampler and a drafter read of the logits."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.rows.top_k import naive, with_torch

_run = pick(naive.top_k, with_torch.top_k)


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of every row, largest first, and where they stand.

    x: [..., n] of numbers or -inf, 1 <= k <= n. Returns values [..., k] and indices int64
    [..., k]. Of equal values any may come first, except that k = 1 gives the lowest index.
    """
    return _run(x, k)
