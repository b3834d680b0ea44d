"""Mixture of experts row by row and expert by expert."""

from __future__ import annotations

import torch

from kernels.swiglu.naive import swiglu


def route(logits: torch.Tensor, n_used: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.moe.route."""
    weights, ids = [], []
    for row in logits:
        p = torch.exp(row - row.max())
        p = p / p.sum()
        order = sorted(range(len(p)), key=lambda e: (-float(p[e]), e))[:n_used]
        chosen = p[order]
        weights.append(chosen / max(float(chosen.sum()), 2.0**-14))
        ids.append(torch.tensor(order))
    return torch.stack(weights), torch.stack(ids)


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """See kernels.moe.experts."""
    rows = []
    for i in range(x.shape[0]):
        total = torch.zeros_like(x[i])
        for weight, e in zip(weights[i], ids[i].tolist(), strict=True):
            total = total + weight * (down[e] @ swiglu(gate[e] @ x[i], up[e] @ x[i]))
        rows.append(total)
    return torch.stack(rows)
