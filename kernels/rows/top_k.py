"""The largest values of long rows: what a sampler and a drafter read of the logits."""

from __future__ import annotations

import torch

from kernels.dispatch import pick


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of every row, largest first, and where they stand.

    x: [..., n] of numbers or -inf, 1 <= k <= n. Returns values [..., k] and indices int64
    [..., k]. Of equal values any may come first, except that k = 1 gives the lowest index.
    """
    return _run(x, k)


def top_k_naive(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest values by sorting everything. Of equal values the lowest index comes first."""
    values, ids = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


STRETCH = 128
# shorter rows are not worth the second step, those of which one is wanted even less
LONG, LONG_FOR_ONE = 32 * STRETCH, 160 * STRETCH


def top_k_with_torch(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest values in two steps: the largest of every stretch, then the best stretches alone.

    The k largest values of a row lie in the k stretches with the largest maxima. PyTorch finds
    maxima at the speed of memory, but sorts out the largest elements of a vocabulary seven times
    slower than this.
    """
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


_run = pick(top_k_naive, top_k_with_torch)
