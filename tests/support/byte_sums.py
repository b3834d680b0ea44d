"""The instruction that adds products of bytes in fours, for processors that do not have it."""

from __future__ import annotations

from kernels.llvm import Code, Value
from kernels.llvm.values import I32


def added_fours(code: Code, total: Value, one: Value, other: Value) -> Value:
    """What VNNI does in one instruction."""
    products = one.resize(I32) * other.extended(I32)
    for _ in range(2):
        lanes = range(0, products.type.count, 2)
        products = products.take(lanes) + products.take([lane + 1 for lane in lanes])
    assert products.type == total.type
    return total + products
