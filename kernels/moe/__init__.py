"""Mixture of experts: the router and the chosen experts' networks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby

import torch
from torch import Tensor
from torch.nn import functional

from kernels.dispatch import operation, pick, runs_triton
from kernels.linear import finish_rows, linear, multiply_rows, prepare_rows
from kernels.linear import naive as linear_naive
from kernels.linear import with_torch as linear_with_torch
from kernels.linear.block_parts import PreparedRows, Residual, Rows
from kernels.linear.blocks import pack_blocks, stack_weights, takes_any_rows
from kernels.linear.packed import MODES, WEIGHT_LEVELS, BlockData, PackedWeight
from kernels.moe.packed import SWIGLU, Activation, Matrices, PackedExperts, pack_each, put_together
from kernels.pointwise import add, output_gate
from kernels.pointwise.with_torch import pointwise

_TRITON, _LLVM = "kernels.moe.with_triton", "kernels.moe.with_llvm"


Added = tuple[Tensor | None, Tensor | None, Residual | None]
"""What a layer adds to the sums over experts: the shared expert's result f32 [n, d], its gate f32
[n, 1], and a residual of n rows."""
NOTHING: Added = (None, None, None)


@operation(triton=_TRITON, llvm=_LLVM)
def route(logits: Tensor, bias: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    """The experts of every row by score and bias (DeepSeek-V3, arXiv 2412.19437), the largest sum
    first; without a bias the most probable.

    logits: f32 [n, E]; bias: f32 [E], or None for none. Of equal sums the lower id comes first.
    Returns weights f32 [n, n_used] and ids int64 [n, n_used]. A row has the same bits whatever the
    other rows are.
    """
    p = _scores(logits, choice)
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
    return _weights(p, ids, choice), ids


def route_product(
    x: Tensor,
    packed: PackedWeight,
    n_experts: int,
    bias: Tensor | None,
    choice: Choice,
    *,
    invariant: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """In one launch, on a GPU and for few rows alone: linear(x, packed), and route of the
    first n_experts of each row of it. x: f32 [n, in]."""
    if not runs_triton(x):
        return None
    from kernels.moe.with_triton import route_product as run

    return run(x, packed, n_experts, bias, choice, invariant=invariant)


@operation(llvm=_LLVM)
def route_given(logits: Tensor, ids: Tensor, choice: Choice) -> Tensor:
    """The weights that experts get which are chosen already, as those of route.

    logits: f32 [n, E]; ids: int64 [n, n_used], not looked at by the host. Returns f32 [n, n_used].
    """
    return _weights(_scores(logits, choice), ids, choice)


def pack_experts(
    gate: Iterable[Tensor] | None,
    up: Iterable[Tensor],
    down: Iterable[Tensor],
    mode: str,
    activation: Activation = SWIGLU,
) -> PackedExperts:
    """Prepares the matrices of all experts once, for many calls of `experts`.

    gate, up: f32 [f, d] and down: f32 [d, f] for each of the E experts: three tensors with E in
    front, or whatever yields one expert after the other, which are then taken one at a time. The
    modes are those of kernels.linear.pack, with its promise for int8; gate and up become one
    matrix. gate is None for an activation without one.

    Raises ValueError for any other mode, for int8 on a GPU, and for unequal numbers of matrices.
    """
    if mode not in MODES:
        raise ValueError(f"compute mode {mode!r} is not one of {', '.join(MODES)}")
    inner = up if gate is None else map(torch.cat, zip(gate, up, strict=True))
    pairs = iter(zip(inner, down, strict=True))
    first = next(pairs)
    return _pack(first[0], chain([first], pairs), mode, activation=activation)


def pack_expert_blocks(
    parts: Sequence[BlockData], mode: str, activation: Activation = SWIGLU
) -> PackedExperts:
    """Experts that stay in the blocks of their file, for a GPU: in mode "q8" or "blocks".

    parts: gate and up, or gate above up in one, or up alone; and down; uint8 [E, out, bytes of a
    row], kept where they are."""
    n_bytes, (*first, down) = sum(part.bytes.numel() for part in parts), parts
    if not runs_triton(down.bytes):
        of_each = [[pack_blocks(one, part.type, mode) for one in part.bytes] for part in parts]
        pairs = ((stack_weights(inner), last) for *inner, last in zip(*of_each, strict=True))
        return put_together(pairs, mode, activation)
    if activation.gated and len(first) == 1:
        first = [BlockData(half, first[0].type) for half in first[0].bytes.chunk(2, 1)]
    n_experts, width = first[0].bytes.shape[:2]
    shape = n_experts, width, down.bytes.shape[1]
    return PackedExperts(mode, shape, n_bytes, (*first, down), activation)


def experts(
    x: Rows,
    weights: Tensor,
    ids: Tensor,
    packed: PackedExperts,
    *,
    invariant: bool = False,
    added: Added = NOTHING,
) -> Tensor:
    """Weighted sum of down(activation(gate x, up x)) over each row's experts, in order of `ids`.

    x: f32 [n, d]; weights, ids: [n, k] as from route. Returns f32 [n, d].

    invariant: a row of the result has the same bits whatever the other rows are. added: see
    add_to_experts.
    """
    numbers = x.numbers if isinstance(x, PreparedRows) else x
    if runs_triton(x):
        from kernels.moe import blocks_with_triton, with_triton

        if packed.mode == "q8":
            return blocks_with_triton.experts(x, weights, ids, packed, added)
        return with_triton.experts(numbers, weights, ids, packed, added, invariant=invariant)
    run_all = _experts_invariant if invariant and packed.places is None else _experts
    return add_to_experts(run_all(numbers, weights, ids, packed), added, invariant=invariant)


def add_to_experts(y: Tensor, added: Added, *, invariant: bool = False) -> Tensor:
    """residual + (y + shared * sigmoid(gate)), with those of them that are given."""
    shared, gate, residual = added
    if shared is not None and gate is not None:
        shared = output_gate(shared, gate, invariant=invariant)
    y = y if shared is None else add(y, shared)
    return y if residual is None else add(residual.x.view(y.shape), y)


@dataclass(frozen=True, slots=True)
class Choice:
    """How experts are chosen by biased scores, and what weights they get.

    scores: "sigmoid" or "softmax" of logits, or the square root of their "softplus". Chosen are the
    n_used experts of the largest score plus bias; weights are their scores without it, if
    `normalised` divided by max(their sum, 2^-14), and times `scale`. n_groups: experts form this
    many groups of neighbours; only those of the n_groups_used groups whose two best experts have
    the largest sum can be chosen.
    """

    n_used: int
    scores: str = "sigmoid"
    normalised: bool = True
    scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1


# Mixture of experts row by row and expert by expert.


def route_naive(logits: Tensor, bias: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    weights, ids = [], []
    for row in logits:
        p = _scores_naive(row, choice)
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


def route_given_naive(logits: Tensor, ids: Tensor, choice: Choice) -> Tensor:
    weights = []
    for row, chosen in zip(logits, ids.tolist(), strict=True):
        p = _scores_naive(row, choice)[chosen]
        if choice.normalised:
            p = p / max(float(p.sum()), 2.0**-14)
        weights.append(p * choice.scale)
    return torch.stack(weights)


def _scores_naive(row: Tensor, choice: Choice) -> Tensor:
    if choice.scores == "softmax":
        exp = torch.exp(row - row.max())
        return exp / exp.sum()
    if choice.scores == "softplus":
        return torch.logaddexp(row, torch.zeros_like(row)) ** 0.5
    return 1 / (1 + torch.exp(-row))


def pack_naive(
    example: Tensor,
    matrices: Matrices,
    mode: str,
    activation: Activation = SWIGLU,
    levels: int = WEIGHT_LEVELS,
) -> PackedExperts:
    """See pack_experts. example: one of the matrices, for its device. levels: see
    kernels.linear.naive.pack."""
    return pack_each(partial(linear_naive.pack, levels=levels), matrices, mode, activation)


def experts_naive(x: Tensor, weights: Tensor, ids: Tensor, packed: PackedExperts) -> Tensor:
    rows = []
    for i in range(x.shape[0]):
        total = torch.zeros_like(x[i])
        for weight, e in zip(weights[i], ids[i].tolist(), strict=True):
            inner, down = packed.data[e]
            opened = packed.activation.reference(_linear(x[i : i + 1], inner))
            total = total + weight * _linear(opened, down)[0]
        rows.append(total)
    return torch.stack(rows)


def _linear(x: Tensor, packed: PackedWeight) -> Tensor:
    return linear(x, packed) if takes_any_rows(packed) else linear_naive.linear(x, packed)


# Mixture of experts grouped by expert: each expert that occurs runs once, on all its rows.
MIN_SUM = 2.0**-14


def _scores(logits: Tensor, choice: Choice) -> Tensor:
    if choice.scores == "softmax":
        return logits.softmax(-1)
    if choice.scores == "softplus":
        return pointwise(functional.softplus, logits, invariant=True).sqrt()
    return pointwise(torch.sigmoid, logits, invariant=True)


def _weights(p: Tensor, ids: Tensor, choice: Choice) -> Tensor:
    weights = p.gather(1, ids)
    if choice.normalised:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(MIN_SUM)
    return weights if choice.scale == 1.0 else weights * choice.scale


def pack_with_torch(
    example: Tensor, matrices: Matrices, mode: str, activation: Activation = SWIGLU
) -> PackedExperts:
    """See pack_experts. example: one of the matrices, for its device."""
    return pack_each(linear_with_torch.pack, matrices, mode, activation)


def experts_with_torch(x: Tensor, weights: Tensor, ids: Tensor, packed: PackedExperts) -> Tensor:
    return torch.bmm(weights.unsqueeze(1), apply_each(x, ids, packed)).squeeze(1)


def apply_each(x: Tensor, ids: Tensor, packed: PackedExperts) -> Tensor:
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


def experts_invariant_with_torch(
    x: Tensor, weights: Tensor, ids: Tensor, packed: PackedExperts
) -> Tensor:
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


def _products(rows: Tensor, runs: list[tuple[PackedWeight, int]]) -> Tensor:
    """Each matrix with its number of rows, in turn."""
    parts = rows.split_with_sizes([n for _, n in runs])
    return torch.cat(
        [multiply_rows(part, matrix) for part, (matrix, _) in zip(parts, runs, strict=True)]
    )


_pack = pick(pack_naive, pack_with_torch, _TRITON)
_experts = pick(experts_naive, experts_with_torch, None, _LLVM)
_experts_invariant = experts_invariant_with_torch
