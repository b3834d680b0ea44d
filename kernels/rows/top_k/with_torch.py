"""The largest values in two steps: the largest of every stretch, then the best stretches alone.

The k largest values of a row lie in the k stretches with the largest maxima. PyTorch finds
maxima at the speed of memory, but sorts out the largest elements of a vocabulary seven times
slower than this.
"""

from __future__ import annotations

import torch

STRETCH = 128
# shorter rows are not worth the second step, those of which one is wanted even less
LONG, LONG_FOR_ONE = 32 * STRETCH, 160 * STRETCH


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.rows.top_k.top_k."""
    n = x.shape[-1]
    n_stretches = n // STRETCH
    if n < (LONG_FOR_ONE if k == 1 else LONG) or 8 * k > n_stretches:
        return _largest(x, k)
    whole = x[..., : n_stretches * STRETCH].unflatten(-1, (n_stretches, STRETCH))
    best = _largest(whole.amax(-1), k)[1].unsqueeze(-1)
    candidates = whole.gather(-2, best.expand(*best.shape[:-1], STRETCH)).flatten(-2)
    ids = (best * STRETCH + torch.arange(STRETCH, device=x.device)).flatten(-2)
    start = n_stretches * STRETCH
    if start < n:
        rest = torch.arange(start, n, device=x.device)
        candidates = torch.cat((candidates, x[..., start:]), -1)
        ids = torch.cat((ids, rest.expand(*ids.shape[:-1], -1)), -1)
    values, where = _largest(candidates, k)
    return values, ids.gather(-1, where)


def _largest(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    # only max promises the first of equal values
    values, ids = x.max(-1, keepdim=True) if k == 1 else torch.topk(x, k)
    return values, ids
