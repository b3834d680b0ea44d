"""The sums in few operations."""

from __future__ import annotations

import torch

from kernels.norm import rms_norm
from kernels.whole_vectors import pointwise


def mix_rows(
    x: torch.Tensor,
    others: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """See kernels.rows.row_mixture.mix_rows."""
    rows = torch.cat((others, x[None]))
    scores = rms_norm(rows, weight, eps).sum(-1, keepdim=True)
    weights = pointwise(torch.exp, scores - scores.amax(0), invariant=invariant)
    return (weights / weights.sum(0) * rows).sum(0)


def mix_rows_invariant(
    x: torch.Tensor, others: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """mix_rows, with each row's bits independent of the rows around it."""
    return mix_rows(x, others, weight, eps, invariant=True)
