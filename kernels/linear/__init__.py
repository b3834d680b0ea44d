"""Matrix products with prepared weights in several compute modes."""

from __future__ import annotations

import torch

from kernels.dispatch import pick
from kernels.linear import fixed_blocks, naive, with_torch
from kernels.linear.packed import MODES, Packed

__all__ = ["MODES", "Packed", "linear", "pack"]

_pack = pick(naive.pack, with_torch.pack)
_linear = pick(naive.linear, with_torch.linear)


def pack(weight: torch.Tensor, mode: str) -> Packed:
    """Prepares a weight f32 [out, in] once, for many calls of `linear`.

    "f32" keeps the matrix (no copy). "bf16" rounds weight and activations to bfloat16 and sums
    in f32. "int8" rounds the weight to integers with one scale per output row and every
    activation row to -127..127 with its own scale, and sums in int32, so a row of the result has
    the same bits whatever rows stand beside it; "int8x2" does so with two such rows for every
    activation row, the second for what the first leaves over. The other modes promise nothing of
    the kind.

    Raises ValueError for any other mode.
    """
    if mode not in MODES:
        raise ValueError(f"compute mode {mode!r} is not one of {', '.join(MODES)}")
    return _pack(weight, mode)


def linear(x: torch.Tensor, packed: Packed, *, invariant: bool = False) -> torch.Tensor:
    """x @ weight.T in the mode of `packed`. x: f32 [..., in]; returns f32 [..., out].

    invariant: a row of the result has the same bits whatever rows stand beside it, in any mode.
    """
    return fixed_blocks.linear(_linear, x, packed) if invariant else _linear(x, packed)
