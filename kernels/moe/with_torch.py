"""Mixture of experts grouped by expert: each expert that occurs runs once, on all its rows."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.swiglu import swiglu

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
        hidden = swiglu(functional.linear(part, gate[e]), functional.linear(part, up[e]))
        outputs.append(functional.linear(hidden, down[e]))
        start += count
    # back to one line per (row, choice), so that every row adds up in its own order
    lines = x.new_empty(n_rows * n_used, x.shape[1])
    lines[order] = torch.cat(outputs)
    return torch.bmm(weights.unsqueeze(1), lines.view(n_rows, n_used, -1)).squeeze(1)
