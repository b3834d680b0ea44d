"""The modes that sum integers: through LLVM where the processor multiplies bytes in fours, else
through fbgemm, else exactly and slowly. The packed matrix tells which of them it is for."""

from __future__ import annotations

import functools

import torch

from kernels.dispatch import uses_llvm
from kernels.linear import byte_panels, fbgemm, naive, two_rows
from kernels.linear.byte_panels import BytePanels
from kernels.linear.packed import ROW_LEVELS, WEIGHT_LEVELS, Packed
from kernels.norm import max_norm
from kernels.processor import has_feature

# rows of integers that a row of x becomes
N_INTEGERS = {"int8": 1, "int8x2": 2}


def pack(weight: torch.Tensor, mode: str) -> Packed:
    """A weight f32 [out, in] for one of INTEGER_MODES."""
    if has_vnni():
        return byte_panels.pack(weight, mode)
    return fbgemm.pack(weight, mode) if fbgemm.available() else naive.pack_int8(weight, mode)


def linear(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """See kernels.linear.linear."""
    if isinstance(packed.data, BytePanels):
        from kernels.linear import bytes_with_llvm

        return bytes_with_llvm.linear(x, N_INTEGERS[packed.mode], packed.data, packed.shape[0])
    if isinstance(packed.data, tuple):
        return naive.linear(x, packed)
    if packed.mode == "int8x2":
        return two_rows.linear(x, packed)
    rows, largest = max_norm(x)
    return fbgemm.product(rows, packed.data).mul_(largest)


def prepare(x: torch.Tensor, packed: Packed) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See kernels.linear.shared_rows.prepare."""
    if isinstance(packed.data, BytePanels):
        from kernels.linear import byte_rows_with_llvm

        return byte_rows_with_llvm.quantise(x, N_INTEGERS[packed.mode]), None
    return (x, None) if packed.mode == "int8x2" else max_norm(x)


def product(rows: torch.Tensor, packed: Packed) -> torch.Tensor:
    """See kernels.linear.shared_rows.product."""
    if isinstance(packed.data, BytePanels):
        from kernels.linear import bytes_with_llvm

        n_integers = N_INTEGERS[packed.mode]
        return bytes_with_llvm.product(rows, n_integers, packed.data, packed.shape[0])
    if packed.mode == "int8x2":
        return linear(rows, packed)
    if isinstance(packed.data, tuple):
        integers, scale = packed.data
        sums = (rows * ROW_LEVELS).round().double() @ integers.double().T
        return (sums * (scale.double() / ROW_LEVELS)).float()
    return fbgemm.product(rows, packed.data)


def weight_levels() -> int:
    """The largest integer that `pack` makes of a weight on this processor."""
    through_fbgemm = not has_vnni() and fbgemm.available()
    return fbgemm.levels() if through_fbgemm else WEIGHT_LEVELS


@functools.cache
def has_vnni() -> bool:
    """Whether LLVM compiles products of bytes for this processor."""
    return uses_llvm() and has_feature("avx512vnni")
