"""Softmax attention over the cells of a key/value cache."""

from __future__ import annotations

import torch

from kernels.attention import naive, with_torch
from kernels.dispatch import pick

_LLVM = "kernels.attention.with_llvm"
_run = pick(naive.attend, with_torch.attend, "kernels.attention.with_triton", _LLVM)
# the law promises no bits
_run_invariant = pick(with_torch.attend_invariant, with_torch.attend_invariant, None, _LLVM)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """softmax(scale q k^T) v over the visible cells, softmax in f32.

    q: f32 [B, T, H, hd]; k: f32 [B, H_kv, N, hd], v: f32 [B, H_kv, N, hd_v], H a multiple of
    H_kv, query head h reads key/value head h // (H / H_kv); mask: bool [B, T, N], True = visible.
    T, N >= 1, any strides; v may be columns of k, as in latent attention. scale: 1 / sqrt(hd)
    unless given. sinks: f32 [H], the score of one more cell of each query head, which has no value
    and which every query sees (Xiao et al. 2023, arXiv 2309.17453, with learnt scores). Returns f32
    [B, T, H, hd_v].

    Every query must see at least one cell. Cells that are not visible are weighed with zero, not
    skipped: whoever owns the cache has to keep freed and unused cells finite, because a NaN
    there would reach the output.

    invariant: a query's output has the same bits whatever other queries and hidden cells there
    are, as long as its visible cells come in the same order. Hidden cells are then skipped.
    """
    return (_run_invariant if invariant else _run)(q, k, v, mask, scale, sinks)
