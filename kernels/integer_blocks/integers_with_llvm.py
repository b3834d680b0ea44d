"""A stretch of 256 weights in GGUF blocks at an address: vectors of bytes, and scales.

A byte is the integer of a weight plus the type's offset, so that it is never negative, or, for the
types with large integers, the integer with its sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kernels.integer_blocks.parts import IQ4_LEVELS, MXFP4_LEVELS
from kernels.llvm import F32, Code, Value, vector
from kernels.llvm.values import F16, I8, I16, I32

BYTES = 32
"""Bytes in a vector: a short block, an eighth of a long one."""
PER_STRETCH = 8
"""Vectors of bytes, and short blocks, in a stretch."""

I8X32, I16X16, I32X8 = vector(I8, 32), vector(I16, 16), vector(I32, 8)
F32X8 = vector(F32, 8)
_I8X16 = vector(I8, 16)


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

    bytes: PER_STRETCH vectors i8 [32]. scale, minimum: f32. group_scales, with their sign, and
    group_minimums: i8 [256 / group].
    """

    bytes: Iterator[Value]
    scale: Value
    group_scales: Value
    minimum: Value | None = None
    group_minimums: Value | None = None


class ShortBlocks(NamedTuple):
    """Eight blocks of 32 weights.

    bytes: PER_STRETCH vectors i8 [32]; vector k holds the elements 4k .. 4k + 3 of each block.
    scales, minimums: f32 [8].
    """

    bytes: Sequence[Value]
    scales: Value
    minimums: Value | None = None


def short_blocks(code: Code, type: str, blocks: Sequence[Value]) -> ShortBlocks:
    """The blocks at eight addresses."""
    scales = _halves(code, blocks) if type != "MXFP4" else _powers(code, blocks)
    minimums = _halves(code, [block + 2 for block in blocks]) if FORMS[type].minimum else None
    return ShortBlocks(_SHORT[type](code, blocks), scales, minimums)


def long_block(code: Code, type: str, block: Value) -> LongBlock:
    """The block at an address, its elements in their order."""
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


def _half(code: Code, address: Value) -> Value:
    return code.load(address, F16).widen()


def _halves(code: Code, addresses: Sequence[Value]) -> Value:
    """f16 at eight addresses as f32 [8]."""
    return joined(code, [code.load(at, I16) for at in addresses]).bits(vector(F16, 8)).widen()


def _powers(code: Code, addresses: Sequence[Value]) -> Value:
    """2^(e - 128) of the bytes e at eight addresses, f32 [8]."""
    e = joined(code, [code.load(at, I8) for at in addresses]).resize(I32)
    # 2^-128 and 2^-127 are below the exponents that f32 has bits for
    tiny = code.constant(I32X8, 1 << 21) << e
    return code.choose(e.less(2), tiny, (e - 1) << 23).bits(F32X8)


def joined(code: Code, numbers: Sequence[Value]) -> Value:
    """A power of two of numbers as a vector."""
    parts = [code.splat(number, 1) for number in numbers]
    while len(parts) > 1:
        parts = [a.beside(b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def fours(code: Code, addresses: Sequence[Value]) -> list[Value]:
    """16 bytes at each of eight addresses: vector k i8 [32] holds bytes 4k .. 4k + 3 of each."""
    loaded = [code.load(address, _I8X16) for address in addresses]
    a, b, c, d = (x.beside(y).bits(I32X8) for x, y in zip(loaded[:4], loaded[4:], strict=True))
    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    first, second = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    columns = []
    for side in (low, high):
        ab, cd = a.take(side, b), c.take(side, d)
        columns += [ab.take(half, cd).bits(I8X32) for half in (first, second)]
    return columns


def _nibbles(code: Code, addresses: Sequence[Value]) -> list[Value]:
    """The first 16 elements in the low halves of 16 bytes, the others in the high halves."""
    pairs = fours(code, addresses)
    return [pair & 15 for pair in pairs] + [_down(pair, 4) & 15 for pair in pairs]


def _five_bits(code: Code, blocks: Sequence[Value], start: int) -> list[Value]:
    """The fifth bits of the elements in 32 bits from `start` on, the others behind them."""
    fifth = joined(code, [code.load(block + start, I32) for block in blocks]).bits(I8X32)
    zero, sixteen = code.constant(I8X32, 0), code.constant(I8X32, 16)
    found = []
    for k, four in enumerate(_nibbles(code, [block + (start + 4) for block in blocks])):
        # the byte that has the bits, four times
        byte = fifth.take([4 * j + k // 2 for j in range(8) for _ in range(4)])
        bits = byte & code.constants(I8X32, [1 << (4 * (k % 2) + i) for i in range(4)] * 8)
        found.append(four | code.choose(bits.equal(zero), zero, sixteen))
    return found


def _q8_0(code: Code, blocks: Sequence[Value]) -> list[Value]:
    return [part for at in (2, 18) for part in fours(code, [block + at for block in blocks])]


def _iq4_nl(code: Code, blocks: Sequence[Value]) -> list[Value]:
    indices = _nibbles(code, [block + 2 for block in blocks])
    return [table(code, IQ4_LEVELS, index) for index in indices]


def _mxfp4(code: Code, blocks: Sequence[Value]) -> list[Value]:
    numbers = [level + FORMS["MXFP4"].offset for level in MXFP4_LEVELS]
    return [table(code, numbers, i) for i in _nibbles(code, [block + 1 for block in blocks])]


_SHORT: dict[str, Callable[[Code, Sequence[Value]], list[Value]]] = {
    "Q4_0": lambda code, blocks: _nibbles(code, [block + 2 for block in blocks]),
    "Q4_1": lambda code, blocks: _nibbles(code, [block + 4 for block in blocks]),
    "Q5_0": lambda code, blocks: _five_bits(code, blocks, 2),
    "Q5_1": lambda code, blocks: _five_bits(code, blocks, 4),
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
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
    return joined(code, words).bits(vector(I8, 4 * len(words)))


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
            pairs = code.load(block + (8 + 16 * i), _I8X16)
            twice = pairs.beside(pairs).bits(I32X8) >> code.constants(I32X8, [0] * 4 + [4] * 4)
            yield table(code, IQ4_LEVELS, twice.bits(I8X32) & 15)

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
