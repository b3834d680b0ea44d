"""Rows of x as integers of 8 bits with a scale for each block of them, the way ggml has them.

A weight type in blocks of 32 ("short") meets ggml's q8_0 or q8_1, which have the same integers; one
in blocks of 256 ("long") meets q8_K. With a the largest magnitude of a block, the integer of a
number x is x * (127 / a), rounded to the nearest, ties to even. The scale is a / 127 rounded to
f16 in short blocks, and 1 / (127 / a) in long ones.

Integers that are undefined are 0: all of a block with an infinity or NaN, whose scale is then no
number either, and so is every result of the row; and all of a block below 127 / FLT_MAX. The scale
of a short block above 8.3e6 is an infinity, so results are infinite or NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

SHORT, LONG = 32, 256
"""Numbers in a block."""
GROUP = 16
"""Numbers that have a sum of their own in a long block; q8_K calls them bsums."""
MOST = 127
"""The largest integer."""


class IntegerRows(NamedTuple):
    """Rows of x f32 [n, in] in blocks of `elements`.

    integers: int64 [n, blocks, elements]. scales: f32 [n, blocks]. sums: f32 [n, blocks], the
    scale before it is rounded times the sum of the integers, rounded to f16; of short blocks only.
    """

    integers: Tensor
    scales: Tensor
    sums: Tensor | None


def is_long(type: str) -> bool:
    """Whether weights of this GGML type meet rows in long blocks."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[type]][0] == LONG


def quantise(x: Tensor, *, long: bool) -> IntegerRows:
    """x f32 [n, in], in whole blocks."""
    blocks = x.unflatten(-1, (-1, LONG if long else SHORT))
    largest = blocks.abs().amax(-1)
    # `MOST / largest` would be MOST times a rounded 1 / largest
    factor = torch.full_like(largest, MOST) / largest
    steps = blocks * factor.unsqueeze(-1)
    integers = torch.where(steps.isfinite(), steps, 0.0).round().long()
    if long:
        return IntegerRows(integers, 1 / factor, None)
    exact = largest / MOST
    return IntegerRows(integers, exact.half().float(), (exact * integers.sum(-1)).half().float())
