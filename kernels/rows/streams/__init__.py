"""Several residual streams (hyper-connections, Zhu et al., arXiv 2409.19606): how one row is made
of them, and how a row is added to them."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.rows.streams import naive, with_torch

_LLVM = "kernels.rows.streams.with_llvm"
_open = pick(naive.open_low, with_torch.open_low, None, _LLVM)
_open_invariant = pick(with_torch.open_low_invariant, with_torch.open_low_invariant, None, _LLVM)
_mix = pick(naive.mix_streams, with_torch.mix_streams, None, _LLVM)
_mix_invariant = pick(
    with_torch.mix_streams_invariant, with_torch.mix_streams_invariant, None, _LLVM
)
_add = pick(naive.add_to_streams, with_torch.add_to_streams, None, _LLVM)
_add_invariant = pick(
    with_torch.add_to_streams_invariant, with_torch.add_to_streams_invariant, None, _LLVM
)


def open_low(low: torch.Tensor, n_streams: int, *, invariant: bool = False) -> torch.Tensor:
    """silu(low / n_streams), between the two matrices of a gate.

    low: f32 [..., rank], any strides. Returns [..., rank]. Differentiable, as are the other two.

    invariant: each result has the same bits whatever numbers stand before and behind it.
    """
    return (_open_invariant if invariant else _open)(low, n_streams)


def mix_streams(x: torch.Tensor, gate: torch.Tensor, *, invariant: bool = False) -> torch.Tensor:
    """The mean of x * sigmoid(gate) over the streams.

    x, gate: f32 [..., n_streams, d], the last two axes contiguous. Returns [..., d]. invariant: as
    above.
    """
    return (_mix_invariant if invariant else _mix)(x, gate)


def add_to_streams(
    x: torch.Tensor, y: torch.Tensor, gain: torch.Tensor, *, invariant: bool = False
) -> torch.Tensor:
    """x + y times 2 sigmoid(gain / n_streams), each stream with a gain of its own.

    x: f32 [..., n_streams, d]; y: [..., d]; gain: [..., n_streams], any strides. Returns the shape
    of x. invariant: as above.
    """
    return (_add_invariant if invariant else _add)(x, y, gain)
