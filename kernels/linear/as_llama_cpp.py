"""Rows rounded as llama.cpp rounds them on a CPU before it multiplies them with a weight.

A weight in blocks of 32 meets rows of 8 bits with a half-precision scale for every 32 numbers
(q8_0; q8_1 has the same numbers), one in blocks of 256 rows of 8 bits with a float scale for every
256 (q8_K), half precision and bfloat16 their own kind. In float32 nothing is rounded.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.linear.block_parts import is_long, quantise
from kernels.linear.packed import PackedWeight

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def as_llama_cpp(packed: PackedWeight, type: str) -> PackedWeight:
    """A weight, of this GGML type in its file, that `linear` multiplies with such rows."""
    return replace(packed, rounding=None if type == "F32" else type)


def round_rows(x: torch.Tensor, type: str) -> torch.Tensor:
    """x f32 [..., in] as a weight of a GGML type meets it: the same shape, f32.

    in has to be a multiple of the numbers in a block of the type.
    """
    if type in _FLOATS:
        return x.to(_FLOATS[type]).float()
    rows = quantise(x.reshape(-1, x.shape[-1]), long=is_long(type))
    return (rows.integers * rows.scales.unsqueeze(-1)).view(x.shape)
