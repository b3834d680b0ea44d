"""Mixture of experts row by row and expert by expert."""

from __future__ import annotations

from functools import partial

import torch

from kernels.linear import PackedWeight, linear
from kernels.linear import naive as products
from kernels.linear.blocks import takes_any_rows
from kernels.linear.packed import WEIGHT_LEVELS
from kernels.moe.packed import Matrices, PackedExperts, pack_each
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


def pack(
    example: torch.Tensor, matrices: Matrices, mode: str, levels: int = WEIGHT_LEVELS
) -> PackedExperts:
    """See kernels.moe.pack_experts. example: one of the matrices, for its device. levels: see
    kernels.linear.naive.pack."""
    return pack_each(partial(products.pack, levels=levels), matrices, mode)


def experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: PackedExperts
) -> torch.Tensor:
    """See kernels.moe.experts."""
    rows = []
    for i in range(x.shape[0]):
        total = torch.zeros_like(x[i])
        for weight, e in zip(weights[i], ids[i].tolist(), strict=True):
            gate_up, down = packed.data[e]
            gate, up = _linear(x[i : i + 1], gate_up).chunk(2, 1)
            total = total + weight * _linear(swiglu(gate, up), down)[0]
        rows.append(total)
    return torch.stack(rows)


def add_shared(routed: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """See kernels.moe.add_shared."""
    return routed + 1 / (1 + torch.exp(-gate)) * shared


def _linear(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    return linear(x, packed) if takes_any_rows(packed) else products.linear(x, packed)
