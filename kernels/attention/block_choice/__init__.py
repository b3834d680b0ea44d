"""Which cells a query looks at where an indexer chooses among blocks of tokens (QSA)."""

from __future__ import annotations

import torch

from kernels.attention.block_choice import naive, with_torch
from kernels.attention.block_choice.indexer import Indexer
from kernels.dispatch import pick

__all__ = ["Indexer", "choose_blocks"]

_LLVM = "kernels.attention.block_choice.with_llvm"
_run = pick(naive.choose_blocks, with_torch.choose_blocks, None, _LLVM)
_invariant = pick(
    with_torch.choose_blocks_invariant, with_torch.choose_blocks_invariant, None, _LLVM
)


def choose_blocks(
    q: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    indexer: Indexer,
    *,
    invariant: bool = False,
) -> torch.Tensor:
    """The cells of `mask` that lie in the best blocks of a query or behind the last whole one.

    A block is `ratio` positions one after the other, whole for a query that sees all of them. Its
    key is the mean of its cells' keys, RMS-normed with `weight` and turned as the block's first
    position; its score is the sum over heads of what is positive of q . key. Of equal scores that
    of the earlier block is the larger one.

    q: f32 [B, T, H, d], turned; keys: f32 [B, N, d], neither normed nor turned; positions: int64
    [B, N], whatever they are in cells that the last of the tokens does not see; mask: bool
    [B, T, N]; weight: f32 [d]; table: f32 [n_positions, n_rot], cosines, then sines. Any strides.
    Returns bool [B, T, N]. The host of a processor looks at no number.

    invariant: a token's choice is the same whatever tokens stand beside it.
    """
    given = q, keys, positions, mask, weight, table, indexer
    return (_invariant if invariant else _run)(*given)
