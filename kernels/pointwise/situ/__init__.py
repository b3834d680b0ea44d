"""SiTU: what a feed-forward network of kimi-k3 does between its projections."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.pointwise.situ import naive, with_torch

_LLVM = "kernels.pointwise.situ.with_llvm"
_run = pick(naive.situ, with_torch.situ, "kernels.pointwise.situ.with_triton", _LLVM)
_invariant = pick(with_torch.situ_invariant, with_torch.situ_invariant, None, _LLVM)


def situ(
    gate: torch.Tensor,
    up: torch.Tensor,
    beta: float,
    linear_beta: float,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """beta tanh(gate / beta) sigmoid(gate) times up, which passes as linear_beta
    tanh(up / linear_beta) if that is above 0.

    gate, up: f32 [..., d], of one shape, any strides; beta > 0. Returns [..., d]. Differentiable.

    invariant: each result has the same bits whatever numbers stand before and behind it.
    """
    return (_invariant if invariant else _run)(gate, up, beta, linear_beta)
