"""Mixture of experts grouped by expert: each expert that occurs runs once, on all its rows."""

from __future__ import annotations

from itertools import groupby

import torch

from kernels.linear import PackedWeight, finish_rows, linear, multiply_rows, prepare_rows
from kernels.linear import with_torch as products
from kernels.moe.activation import SWIGLU, Activation
from kernels.moe.packed import Matrices, PackedExperts, pack_each
from kernels.moe.routing import Choice
from kernels.whole_vectors import pointwise

MIN_SUM = 2.0**-14


def route(logits: torch.Tensor, n_used: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.moe.route."""
    # topk, which is faster, leaves open which of two equal experts it takes
    p, order = torch.sort(logits.softmax(-1), dim=-1, descending=True, stable=True)
    chosen, ids = p[:, :n_used], order[:, :n_used]
    return chosen / chosen.sum(-1, keepdim=True).clamp_min(MIN_SUM), ids


def route_biased(
    logits: torch.Tensor, bias: torch.Tensor | None, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.moe.route_biased."""
    if choice.scores == "sigmoid":
        p = pointwise(torch.sigmoid, logits, invariant=True)
    else:
        p = logits.softmax(-1)
    sums = p if bias is None else p + bias
    if choice.n_groups > 1:
        groups = sums.unflatten(-1, (choice.n_groups, -1))
        best_two = groups.sort(-1).values[..., -2:].sum(-1)
        order = torch.sort(best_two, dim=-1, descending=True, stable=True).indices
        left_out = order[:, choice.n_groups_used :, None].expand(-1, -1, groups.shape[2])
        sums = groups.scatter(1, left_out, -torch.inf).flatten(1)
    # topk, which is faster, leaves open which of two equal experts it takes
    order = torch.sort(sums, dim=-1, descending=True, stable=True).indices
    ids = order[:, : choice.n_used]
    weights = p.gather(1, ids)
    if choice.normalised:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(MIN_SUM)
    return (weights if choice.scale == 1.0 else weights * choice.scale), ids


def pack(
    example: torch.Tensor, matrices: Matrices, mode: str, activation: Activation = SWIGLU
) -> PackedExperts:
    """See kernels.moe.pack_experts. example: one of the matrices, for its device."""
    return pack_each(products.pack, matrices, mode, activation)


def experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: PackedExperts
) -> torch.Tensor:
    """See kernels.moe.experts."""
    return torch.bmm(weights.unsqueeze(1), apply_each(x, ids, packed)).squeeze(1)


def apply_each(x: torch.Tensor, ids: torch.Tensor, packed: PackedExperts) -> torch.Tensor:
    """What each row's experts make of it: f32 [n, k, d]."""
    n_rows, n_used = ids.shape
    in_order, order = ids.flatten().sort(stable=True)
    runs = [(e, len(list(rows))) for e, rows in groupby(in_order.tolist())]
    source = order // n_used

    rows, scale = prepare_rows(x, packed.data[0][0])
    opened = _products(rows.index_select(0, source), [(packed.data[e][0], n) for e, n in runs])
    opened = finish_rows(opened, None if scale is None else scale.index_select(0, source))
    rows, scale = prepare_rows(packed.activation.run(opened), packed.data[0][1])
    found = finish_rows(_products(rows, [(packed.data[e][1], n) for e, n in runs]), scale)
    # back to one line per (row, choice), so that every row adds up in its own order
    return torch.empty_like(found).index_copy_(0, order, found).view(n_rows, n_used, -1)


def experts_invariant(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: PackedExperts
) -> torch.Tensor:
    """experts with every row by itself: of few rows, hardly two have an expert in common."""
    n_rows, n_used = ids.shape
    # rows in memory of their own: sums may depend on alignment
    rows = [row.clone() for row in x.split(1)]
    found = []
    for i, e in enumerate(ids.flatten().tolist()):
        inner, down = packed.data[e]
        found.append(linear(packed.activation.run(linear(rows[i // n_used], inner)), down))
    lines = torch.cat(found).view(n_rows, n_used, -1) * weights.unsqueeze(2)
    total = lines[:, 0]
    for j in range(1, n_used):
        total = total + lines[:, j]
    return total


def _products(rows: torch.Tensor, runs: list[tuple[PackedWeight, int]]) -> torch.Tensor:
    """Each matrix with as many of the rows as stand beside it, in turn."""
    parts = rows.split_with_sizes([n for _, n in runs])
    return torch.cat(
        [multiply_rows(part, matrix) for part, (matrix, _) in zip(parts, runs, strict=True)]
    )
