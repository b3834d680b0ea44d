"""int8x2: weights of 8 bits, every row of activations as two rows of 8 bits, some 15 bits together.

With z = x / largest * 127, the first row is z to the nearest integer; the second is what that
left over, in steps of 1/254 of the first row's.
"""

from __future__ import annotations

import torch

from kernels.linear import fbgemm
from kernels.linear.packed import ROW_LEVELS, Packed
from kernels.norm import max_norm

STEPS = 2 * ROW_LEVELS
"""The rest lies within half a step of the first row, and becomes -127..127."""


def split_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x f32 [..., in] -> both rows of integers as f32, and the largest magnitude [..., 1]:
    x ~ (first + second / STEPS) * largest / ROW_LEVELS."""
    rows, largest = max_norm(x)
    z = rows * ROW_LEVELS
    first = z.round()
    return first, ((z - first) * STEPS).round(), largest


def law(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """The product with pack_int8's matrix, exact before the scales come in."""
    integers, scale = packed.data
    first, second, largest = split_rows(x)
    sums = (first.double() * STEPS + second.double()) @ integers.double().T
    return (sums * (largest.double() / (ROW_LEVELS * STEPS)) * scale.double()).float()


def linear(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """The same through one product of both rows with the matrix that fbgemm has packed."""
    first, second, largest = split_rows(x)
    rows = torch.stack((first, second)).reshape(-1, x.shape[-1]) / ROW_LEVELS
    sums = fbgemm.product(rows, packed.data)
    high, low = sums.view(2, *x.shape[:-1], -1)
    # every operation by itself: fused ones might round the last numbers of a tensor otherwise
    y: torch.Tensor = (low / STEPS + high) * largest
    return y
