"""Mixture of experts on a processor: of few rows every (row, expert) pair in programs that read the
choices from memory, of more rows each expert on all of its own."""

from __future__ import annotations

import torch

from kernels.moe import with_torch
from kernels.moe.combine_with_llvm import combine
from kernels.moe.packed import PackedExperts
from kernels.moe.pairs_with_llvm import multiply_pairs
from kernels.moe.route_biased_with_llvm import route_biased
from kernels.moe.route_with_llvm import route

__all__ = ["experts", "route", "route_biased"]

FEW = 16
"""More rows than this many share experts."""


def experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: PackedExperts
) -> torch.Tensor:
    """See kernels.moe.experts; a row has the same bits for any number of rows, if it has them in
    the products."""
    places = packed.places
    if places is None or len(x) > FEW:
        lines = with_torch.apply_each(x, ids, packed)
    else:
        opened = packed.activation.run(multiply_pairs(x, ids, places.inner).flatten(0, 1))
        lines = multiply_pairs(opened, ids.view(-1, 1), places.down).view(*ids.shape, -1)
    return combine(lines, weights)
