"""Mixture of experts row by row and expert by expert."""

from __future__ import annotations

from functools import partial

import torch

from kernels.linear import PackedWeight, linear
from kernels.linear import naive as products
from kernels.linear.blocks import takes_any_rows
from kernels.linear.packed import WEIGHT_LEVELS
from kernels.moe.activation import SWIGLU, Activation
from kernels.moe.packed import Matrices, PackedExperts, pack_each
from kernels.moe.routing import Choice


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


def route_biased(
    logits: torch.Tensor, bias: torch.Tensor | None, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.moe.route_biased."""
    weights, ids = [], []
    for row in logits:
        exp = torch.exp(row - row.max())
        p = 1 / (1 + torch.exp(-row)) if choice.scores == "sigmoid" else exp / exp.sum()
        sums = p if bias is None else p + bias
        groups = sums.chunk(choice.n_groups)
        best_two = [float(group.sort().values[-2:].sum()) for group in groups]
        # sorting leaves equal ones in their order
        kept = sorted(range(len(groups)), key=best_two.__getitem__, reverse=True)
        if choice.n_groups > 1:
            kept = kept[: choice.n_groups_used]
        size = len(row) // choice.n_groups
        candidates = [e for e in range(len(row)) if e // size in kept]
        numbers = sums.tolist()
        order = sorted(candidates, key=numbers.__getitem__, reverse=True)[: choice.n_used]
        chosen = p[order]
        if choice.normalised:
            chosen = chosen / max(float(chosen.sum()), 2.0**-14)
        weights.append(chosen * choice.scale)
        ids.append(torch.tensor(order))
    return torch.stack(weights), torch.stack(ids)


def pack(
    example: torch.Tensor,
    matrices: Matrices,
    mode: str,
    activation: Activation = SWIGLU,
    levels: int = WEIGHT_LEVELS,
) -> PackedExperts:
    """See kernels.moe.pack_experts. example: one of the matrices, for its device. levels: see
    kernels.linear.naive.pack."""
    return pack_each(partial(products.pack, levels=levels), matrices, mode, activation)


def experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: PackedExperts
) -> torch.Tensor:
    """See kernels.moe.experts."""
    rows = []
    for i in range(x.shape[0]):
        total = torch.zeros_like(x[i])
        for weight, e in zip(weights[i], ids[i].tolist(), strict=True):
            inner, down = packed.data[e]
            opened = packed.activation.law(_linear(x[i : i + 1], inner))
            total = total + weight * _linear(opened, down)[0]
        rows.append(total)
    return torch.stack(rows)


def _linear(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    return linear(x, packed) if takes_any_rows(packed) else products.linear(x, packed)
