"""Mixture of experts grouped by expert: each expert that occurs runs once, on all its rows."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.pointwise import pointwise

MIN_SUM = 2.0**-14


def route(logits: torch.Tensor, n_used: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.moe.route."""
    chosen, ids = logits.softmax(-1).topk(n_used, -1)
    return chosen / chosen.sum(-1, keepdim=True).clamp_min(MIN_SUM), ids


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """See kernels.moe.experts."""
    n_rows, n_used = ids.shape
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=gate.shape[0]).tolist()
    grouped = x[order // n_used]
    outputs, start = [], 0
    for e, count in enumerate(counts):
        if count == 0:
            continue
        part = grouped[start : start + count]
        hidden = functional.silu(functional.linear(part, gate[e])) * functional.linear(part, up[e])
        outputs.append(functional.linear(hidden, down[e]))
        start += count
    # back to one line per (row, choice), so that every row adds up in its own order
    lines = x.new_empty(n_rows * n_used, x.shape[1])
    lines[order] = torch.cat(outputs)
    return torch.bmm(weights.unsqueeze(1), lines.view(n_rows, n_used, -1)).squeeze(1)


def experts_invariant(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """experts with every row by itself: of few rows, hardly two have an expert in common."""
    n_rows, n_used = ids.shape
    width = gate.shape[1]
    opened, lifted = x.new_empty(2, n_rows * n_used, width)
    # rows in memory of their own: sums may depend on alignment
    rows = [row.clone() for row in x.split(1)]
    chosen = ids.flatten().tolist()
    for i, e in enumerate(chosen):
        opened[i] = functional.linear(rows[i // n_used], gate[e])[0]
        lifted[i] = functional.linear(rows[i // n_used], up[e])[0]
    hidden = pointwise(functional.silu, opened, invariant=True) * lifted
    closed = [
        functional.linear(part.clone(), down[e])
        for part, e in zip(hidden.split(1), chosen, strict=True)
    ]
    lines = torch.cat(closed).view(n_rows, n_used, -1) * weights.unsqueeze(2)
    total = lines[:, 0]
    for j in range(1, n_used):
        total = total + lines[:, j]
    return total
