"""Weights out of their blocks, as an arithmetic wants to multiply them."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.block_linear.arithmetic import Arithmetic
from kernels.dequant import decode_with_llvm
from kernels.llvm import F32X16, Code, Value

PLAIN = "F32"
"""Numbers that are no blocks: 32 of them count as one."""


def sizes(type: str) -> tuple[int, int]:
    """Elements and bytes of a block."""
    return (32, 128) if type == PLAIN else decode_with_llvm.sizes(type)


def operands(code: Code, type: str, block: Value, how: Arithmetic) -> Iterator[Value]:
    """The weights of the block at an address as operands, in their order."""
    decoded = _plain(code, block) if type == PLAIN else decode_with_llvm.decode(code, type, block)
    if not how.fused:
        yield from (how.operand(code, weights) for weights in decoded)
        return
    for low in decoded:
        yield how.operand(code, low, next(decoded))


def _plain(code: Code, block: Value) -> Iterator[Value]:
    yield from (code.load(block + at, F32X16) for at in (0, 64))
