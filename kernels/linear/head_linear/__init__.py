"""A small matrix for every head, as latent attention has before and behind its softmax."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.linear.head_linear import naive, with_torch

_LLVM = "kernels.linear.head_linear.with_llvm"
_run = pick(
    naive.head_linear, with_torch.head_linear, "kernels.linear.head_linear.with_triton", _LLVM
)
_invariant = pick(with_torch.head_linear_invariant, with_torch.head_linear_invariant, None, _LLVM)


def head_linear(x: torch.Tensor, weight: torch.Tensor, *, invariant: bool = False) -> torch.Tensor:
    """x of every head times the matrix of that head.

    x: f32 [B, T, H, n], any strides; weight: f32 [H, n, m], contiguous: the rows of a head's
    matrix are its inputs. Returns f32 [B, T, H, m].

    invariant: a token's result has the same bits whatever tokens stand beside it.
    """
    return (_invariant if invariant else _run)(x, weight)
