"""SiTU in few operations."""

from __future__ import annotations

from functools import partial

import torch

from kernels.llvm.pointwise import pointwise


def situ(
    gate: torch.Tensor,
    up: torch.Tensor,
    beta: float,
    linear_beta: float,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """See kernels.pointwise.situ.situ."""
    apply = partial(pointwise, invariant=invariant)
    if linear_beta > 0:
        up = apply(torch.tanh, up / linear_beta) * linear_beta
    return apply(torch.tanh, gate / beta) * beta * apply(torch.sigmoid, gate) * up


def situ_invariant(
    gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float
) -> torch.Tensor:
    """situ, with each result's bits independent of the numbers around it."""
    return situ(gate, up, beta, linear_beta, invariant=True)
