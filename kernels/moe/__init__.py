"""Mixture of experts: the router and the chosen experts' SwiGLU networks."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.moe import naive, with_torch

_route = pick(naive.route, with_torch.route)
_experts = pick(naive.experts, with_torch.experts)


def route(logits: torch.Tensor, n_used: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `n_used` most probable experts of every row, most probable first.

    logits: f32 [n, E], 1 <= n_used <= E. Softmax over all E, then the selected probabilities are
    divided by max(their sum, 2^-14). Returns weights f32 [n, n_used] and ids int64 [n, n_used].
    """
    return _route(logits, n_used)


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """Weighted sum of down(silu(gate x) * up x) over each row's experts, in the order of `ids`.

    x: f32 [n, d]; weights, ids: [n, k] as from route; gate, up: f32 [E, f, d];
    down: f32 [E, d, f]. Returns f32 [n, d].

    invariant: a row of the result has the same bits whatever rows stand beside it.
    """
    if invariant:
        return with_torch.experts_invariant(x, weights, ids, gate, up, down)
    return _experts(x, weights, ids, gate, up, down)
