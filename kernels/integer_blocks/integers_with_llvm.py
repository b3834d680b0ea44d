"""A GGUF block at an address as vectors of bytes, and its scales as they are multiplied.

A byte is the integer of a weight plus the type's offset, so that it is never negative, or, for the
types with large integers, the integer with its sign. Elements are in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kernels.integer_blocks.parts import IQ4_LEVELS, MXFP4_LEVELS
from kernels.llvm import F32, Code, Value, vector
from kernels.llvm.values import F16, I1, I8, I16, I32

BYTES = 32
"""Bytes in a vector: a short block, an eighth of a long one."""
PER_STRETCH = 8
"""Vectors of bytes, and short blocks, in a stretch."""

I8X32, I16X16, I32X8, F32X8 = vector(I8, 32), vector(I16, 16), vector(I32, 8), vector(F32, 8)
_I8X16, _BITS = vector(I8, 16), vector(I1, 32)


class Form(NamedTuple):
    """How a type's bytes stand for integers.

    offset: what a byte is more than the integer. most: the largest byte; None where bytes have a
    sign. minimum: whether the type has minimums. group: elements with a scale of their own in a
    long block.
    """

    offset: int
    most: int | None
    minimum: bool = False
    group: int | None = None


FORMS = {
    "Q4_0": Form(8, 15),
    "Q4_1": Form(0, 15, minimum=True),
    "Q5_0": Form(16, 31),
    "Q5_1": Form(0, 31, minimum=True),
    "Q8_0": Form(0, None),
    "IQ4_NL": Form(0, None),
    "MXFP4": Form(12, 24),
    "Q2_K": Form(0, 3, minimum=True, group=16),
    "Q3_K": Form(4, 7, group=16),
    "Q4_K": Form(0, 15, minimum=True, group=32),
    "Q5_K": Form(0, 31, minimum=True, group=32),
    "Q6_K": Form(32, 63, group=16),
    "IQ4_XS": Form(0, None, group=32),
}


class LongBlock(NamedTuple):
    """A block of 256 weights: see kernels.integer_blocks.parts.BlockParts.

    bytes: i8 [32], PER_STRETCH of them. scale, minimum: f32. group_scales, with their sign, and
    group_minimums: i8 [256 / group].
    """

    bytes: Iterator[Value]
    scale: Value
    group_scales: Value
    minimum: Value | None = None
    group_minimums: Value | None = None


def short_bytes(code: Code, type: str, block: Value) -> Value:
    """The bytes i8 [32] of the short block at an address."""
    return _SHORT[type](code, block)


def short_scale(code: Code, type: str, block: Value) -> Value:
    """The scale f32 of the short block at an address."""
    if type != "MXFP4":
        return code.load(block, F16).widen()
    exponent = code.load(block, I8).resize(I32)
    # 2^-128 and 2^-127 are below the exponents that f32 has bits for
    tiny = code.constant(I32, 1 << 21) << exponent
    return code.choose(exponent.less(2), tiny, (exponent - 1) << 23).bits(F32)


def short_minimum(code: Code, block: Value) -> Value:
    """The minimum f32 of the Q4_1 or Q5_1 block at an address."""
    return code.load(block + 2, F16).widen()


def long_block(code: Code, type: str, block: Value) -> LongBlock:
    """The parts of the long block at an address."""
    return _LONG[type](code, block)


def table(code: Code, numbers: Sequence[int], index: Value) -> Value:
    """The numbers, 16 of them, that bytes 0..15 of i8 [32] point at."""
    twice = code.constants(I8X32, [*numbers, *numbers])
    return code.call("llvm.x86.avx2.pshuf.b", I8X32, twice, index)


def _down(x: Value, bits: int) -> Value:
    """Bytes moved down by so many bits; the upper ones are not told."""
    return (x.bits(vector(I16, x.type.count // 2)) >> bits).bits(x.type)


def _up(x: Value, bits: int) -> Value:
    """Bytes moved up by so many bits; the lower ones are not told."""
    return (x.bits(vector(I16, x.type.count // 2)) << bits).bits(x.type)


def _moved(x: Value, up: int) -> Value:
    return _up(x, up) if up > 0 else _down(x, -up) if up < 0 else x


def _nibbles(code: Code, pairs: Value) -> Value:
    """The first 16 elements in the low halves of 16 bytes, the others in the high halves."""
    low = code.load(pairs, _I8X16)
    return low.beside(_down(low, 4)) & 15


def _fifth_bits(code: Code, bits: Value) -> Value:
    """The 32 bits at an address as bytes of 0 or 16."""
    which = code.load(bits, I32).bits(_BITS)
    return code.choose(which, code.constant(I8X32, 16), code.constant(I8X32, 0))


def _half(code: Code, address: Value) -> Value:
    return code.load(address, F16).widen()


_SHORT: dict[str, Callable[[Code, Value], Value]] = {
    "Q4_0": lambda code, block: _nibbles(code, block + 2),
    "Q4_1": lambda code, block: _nibbles(code, block + 4),
    "Q5_0": lambda code, block: _nibbles(code, block + 6) | _fifth_bits(code, block + 2),
    "Q5_1": lambda code, block: _nibbles(code, block + 8) | _fifth_bits(code, block + 4),
    "Q8_0": lambda code, block: code.load(block + 2, I8X32),
    "IQ4_NL": lambda code, block: table(code, IQ4_LEVELS, _nibbles(code, block + 2)),
    "MXFP4": lambda code, block: table(
        code, [level + FORMS["MXFP4"].offset for level in MXFP4_LEVELS], _nibbles(code, block + 1)
    ),
}


def _two_bits(code: Code, block: Value) -> Iterator[Value]:
    """Of every 32 of 64 bytes first the lowest two bits, then the next ones, not masked."""
    for start in (0, BYTES):
        fours = code.load(block + start, I8X32)
        for shift in range(0, 8, 2):
            yield _down(fours, shift)


def _q2_k(code: Code, block: Value) -> LongBlock:
    scales = code.load(block, _I8X16)
    return LongBlock(
        (four & 3 for four in _two_bits(code, block + 16)),
        _half(code, block + 80),
        scales & 15,
        _half(code, block + 82),
        _down(scales, 4) & 15,
    )


def _q3_k(code: Code, block: Value) -> LongBlock:
    """The third bit of vector i of bytes is bit i of a mask of 32 bytes."""

    def integers() -> Iterator[Value]:
        mask = code.load(block, I8X32)
        for i, four in enumerate(_two_bits(code, block + 32)):
            yield (four & 3) | (_moved(mask, 2 - i) & 4)

    first, second, high = (code.load(block + at, I32) for at in (96, 100, 104))
    low, pair = 0x0F0F0F0F, 0x30303030
    words = [
        (first & low) | ((high << 4) & pair),
        (second & low) | ((high << 2) & pair),
        ((first >> 4) & low) | (high & pair),
        ((second >> 4) & low) | ((high >> 2) & pair),
    ]
    return LongBlock(integers(), _half(code, block + 108), _bytes(code, words) - 32)


def _bytes(code: Code, words: Sequence[Value]) -> Value:
    """i32, a power of two of them, as i8 side by side."""
    parts = [code.splat(word, 1) for word in words]
    while len(parts) > 1:
        parts = [a.beside(b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0].bits(vector(I8, 4 * len(words)))


def _k_scales(code: Code, block: Value) -> tuple[Value, Value]:
    """Scales and minimums i8 [8] of a Q4_K or Q5_K block: 6 bits each in bytes 4 to 15; see
    kernels.integer_blocks.parts."""
    first, second, third = (code.load(block + at, I32) for at in (4, 8, 12))
    six, four, two = 0x3F3F3F3F, 0x0F0F0F0F, 0x30303030
    scales = [first & six, (third & four) | ((first >> 2) & two)]
    minimums = [second & six, ((third >> 4) & four) | ((second >> 2) & two)]
    return _bytes(code, scales), _bytes(code, minimums)


def _k_block(code: Code, block: Value, integers: Iterator[Value]) -> LongBlock:
    scales, minimums = _k_scales(code, block)
    scale, minimum = _half(code, block), _half(code, block + 2)
    return LongBlock(integers, scale, scales, minimum, minimums)


def _four_bits(code: Code, block: Value, start: int) -> Iterator[Value]:
    """Of every 32 of 128 bytes first the low halves, then the high ones."""
    for pair in range(4):
        both = code.load(block + (start + BYTES * pair), I8X32)
        yield both & 15
        yield _down(both, 4) & 15


def _q4_k(code: Code, block: Value) -> LongBlock:
    return _k_block(code, block, _four_bits(code, block, 16))


def _q5_k(code: Code, block: Value) -> LongBlock:
    """As Q4_K, with the fifth bits of vector i in bit i of 32 bytes of their own."""

    def integers() -> Iterator[Value]:
        fifth = code.load(block + 16, I8X32)
        for i, four in enumerate(_four_bits(code, block, 48)):
            yield four | (_moved(fifth, 4 - i) & 16)

    return _k_block(code, block, integers())


def _q6_k(code: Code, block: Value) -> LongBlock:
    """Halves of 128 elements; in each the vectors 0 and 2, 1 and 3 share bytes of four bits, and
    all four share bytes of two bits."""

    def integers() -> Iterator[Value]:
        for half in range(2):
            low = [code.load(block + (64 * half + at), I8X32) for at in (0, BYTES)]
            high = code.load(block + (128 + BYTES * half), I8X32)
            for i in range(4):
                four = _down(low[i % 2], 4) if i > 1 else low[i % 2]
                yield (four & 15) | (_moved(high, 4 - 2 * i) & 48)

    return LongBlock(integers(), _half(code, block + 208), code.load(block + 192, _I8X16))


def _iq4_xs(code: Code, block: Value) -> LongBlock:
    """A scale has its low four bits in bytes 4 to 7, two more in bytes 2 and 3."""

    def integers() -> Iterator[Value]:
        for i in range(PER_STRETCH):
            yield table(code, IQ4_LEVELS, _nibbles(code, block + (8 + 16 * i)))

    low = code.splat(code.load(block + 4, I32), 8) >> code.constants(I32X8, range(0, 32, 4))
    high = code.splat(code.load(block + 2, I16).resize(I32), 8)
    high = high >> code.constants(I32X8, range(0, 16, 2))
    scales = ((low & 15) | ((high & 3) << 4)) - 32
    return LongBlock(integers(), _half(code, block), scales.resize(I8))


_LONG: dict[str, Callable[[Code, Value], LongBlock]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}
