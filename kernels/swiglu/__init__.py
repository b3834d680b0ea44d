"""SwiGLU: what a feed-forward network does between its projections."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.swiglu import naive, with_torch

_LLVM = "kernels.swiglu.with_llvm"
_run = pick(naive.swiglu, with_torch.swiglu, "kernels.swiglu.with_triton", _LLVM)
_invariant = pick(with_torch.swiglu_invariant, with_torch.swiglu_invariant, None, _LLVM)


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, invariant: bool = False) -> torch.Tensor:
    """silu(gate) * up, silu(x) = x / (1 + e^-x) (Shazeer 2020, arXiv 2002.05202).

    gate, up: f32 [..., d], of one shape, any strides. Returns [..., d]. Differentiable.

    invariant: each result has the same bits whatever numbers stand before and behind it.
    """
    if invariant:
        return _invariant(gate, up)
    return _run(gate, up)
