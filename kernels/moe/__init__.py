"""Mixture of experts: the router and the chosen experts' networks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch

from kernels.dispatch import pick
from kernels.linear import MODES
from kernels.moe import naive, with_torch
from kernels.moe.activation import RELU2, SWIGLU, Activation, situ_activation, swiglu_within
from kernels.moe.packed import PackedExperts, put_together
from kernels.moe.routing import Choice

__all__ = [
    "RELU2",
    "SWIGLU",
    "Activation",
    "Choice",
    "PackedExperts",
    "experts",
    "pack_experts",
    "put_together",
    "route",
    "route_biased",
    "situ_activation",
    "swiglu_within",
]

_TRITON, _LLVM = "kernels.moe.with_triton", "kernels.moe.with_llvm"
_route = pick(naive.route, with_torch.route, _TRITON, _LLVM)
_route_biased = pick(naive.route_biased, with_torch.route_biased, None, _LLVM)
_pack = pick(naive.pack, with_torch.pack, _TRITON)
_experts = pick(naive.experts, with_torch.experts, _TRITON, _LLVM)


def route(logits: torch.Tensor, n_used: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `n_used` most probable experts of every row, most probable first.

    logits: f32 [n, E], 1 <= n_used <= E. Softmax over all E, then the selected probabilities are
    divided by max(their sum, 2^-14). Of equal ones the lower id comes first. Returns weights
    f32 [n, n_used] and ids int64 [n, n_used].
    """
    return _route(logits, n_used)


def route_biased(
    logits: torch.Tensor, bias: torch.Tensor | None, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of every row by score and bias (DeepSeek-V3, arXiv 2412.19437), the largest sum
    first.

    logits: f32 [n, E]; bias: f32 [E], or None for none. Of equal sums the lower id comes first.
    Returns weights f32 [n, n_used] and ids int64 [n, n_used]. A row has the same bits whatever rows
    stand beside it.
    """
    return _route_biased(logits, bias, choice)


def pack_experts(
    gate: Iterable[torch.Tensor] | None,
    up: Iterable[torch.Tensor],
    down: Iterable[torch.Tensor],
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


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    packed: PackedExperts,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """Weighted sum of down(activation(gate x, up x)) over each row's experts, in order of `ids`.

    x: f32 [n, d]; weights, ids: [n, k] as from route. Returns f32 [n, d].

    invariant: a row of the result has the same bits whatever rows stand beside it.
    """
    if invariant and packed.places is None:
        return with_torch.experts_invariant(x, weights, ids, packed)
    return _experts(x, weights, ids, packed)
