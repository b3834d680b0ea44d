"""SwiGLU: what a feed-forward network does between its projections."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.pointwise.swiglu import naive, with_torch

_LLVM = "kernels.pointwise.swiglu.with_llvm"
_run = pick(naive.swiglu, with_torch.swiglu, "kernels.pointwise.swiglu.with_triton", _LLVM)
_invariant = pick(with_torch.swiglu_invariant, with_torch.swiglu_invariant, None, _LLVM)


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, limit: float | None = None, *, invariant: bool = False
) -> torch.Tensor:
    """silu(gate) * up, silu(x) = x / (1 + e^-x) (Shazeer 2020, arXiv 2002.05202).

    gate, up: f32 [..., d], of one shape, any strides. limit: the first factor is cut off above it,
    the second on both sides. Returns [..., d]. Differentiable.

    invariant: each result has the same bits whatever numbers stand before and behind it.
    """
    return (_invariant if invariant else _run)(gate, up, limit)
