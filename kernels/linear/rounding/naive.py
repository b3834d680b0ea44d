"""Rounding number by number, from the bits of float32 and Python's own half floats."""

from __future__ import annotations

import math
import struct

import torch


def rounded(x: torch.Tensor, type: str) -> torch.Tensor:
    """See kernels.linear.rounding.rounded."""
    one = {"bf16": _bf16, "f16": _f16}[type]
    numbers = [one(number) for number in x.flatten().tolist()]
    return torch.tensor(numbers, dtype=torch.float32).view(x.shape)


def round_in_place(x: torch.Tensor, type: str) -> None:
    """See kernels.linear.rounding.round_in_place."""
    x.copy_(rounded(x, type))


def round_rows(table: torch.Tensor, numbers: torch.Tensor, type: str) -> None:
    """See kernels.linear.rounding.round_rows."""
    for number in numbers.flatten().tolist():
        round_in_place(table[number], type)


def _bf16(number: float) -> float:
    """The upper half of the bits, one more where the lower half is more than half of it."""
    if math.isnan(number):
        return number
    (bits,) = struct.unpack("I", struct.pack("f", number))
    upper, lower = divmod(bits, 1 << 16)
    upper += lower > 0x8000 or (lower == 0x8000 and upper % 2 == 1)
    found: float = struct.unpack("f", struct.pack("I", upper << 16))[0]
    return found


def _f16(number: float) -> float:
    try:
        found: float = struct.unpack("e", struct.pack("e", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
    return found
