"""A stretch of 256 weights in GGUF blocks at an address: vectors of bytes, and scales.

A byte is the integer of a weight plus the type's offset, so that it is never negative, or, for the
types with large integers, the integer with its sign. Vectors are made for several stretches, those
of the second after those of the first: two fill the vectors of AVX512.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from llvmlite import ir

from kernels.linear.block_parts import IQ4_LEVELS, MXFP4_LEVELS, SHORT, STEPS, grid
from kernels.linear.decode_with_llvm import sizes
from kernels.linear.integer_blocks.activations_with_llvm import FORMS, PER_STRETCH
from kernels.llvm import F32, Code, Value, vector
from kernels.llvm.values import F16, I8, I16, I32, I64

BYTES = 32
"""Bytes in a vector for one stretch."""

I8X32, I16X16, I32X8 = vector(I8, 32), vector(I16, 16), vector(I32, 8)
F32X8 = vector(F32, 8)
_I8X4, _I8X8, _I8X16 = vector(I8, 4), vector(I8, 8), vector(I8, 16)
_I32X4, _I64X8 = vector(I32, 4), vector(I64, 8)


class LongBlocks(NamedTuple):
    """n blocks of 256 weights: see kernels.linear.block_parts.IntegerBlockParts.

    bytes: PER_STRETCH vectors i8 [32 n] in the type's lanes. scales, minimums: f32 [n].
    group_scales, with their sign, and group_minimums: i8 [n * 256 / group], in their order.
    """

    bytes: Sequence[Value]
    scales: Value
    group_scales: Value
    minimums: Value | None = None
    group_minimums: Value | None = None


def short_blocks(
    code: Code, type: str, places: Sequence[tuple[Value, Value | int]]
) -> tuple[Sequence[Value], Value, Sequence[Value], Value | None]:
    """8 n blocks of 32 weights, each the address of a row's blocks and its place there: their
    bytes, PER_STRETCH vectors i8 [32 n], of which vector k holds the elements 4k .. 4k + 3 of each
    block, scales, scales of groups, if any, and minimums f32 [8 n]."""
    elements, n_bytes = sizes(type)
    together = elements // SHORT
    blocks = [row + index // together * n_bytes for row, index in places]
    if type == "NVFP4":
        parts = [index % together for _, index in places]
        return _nvfp4(code, blocks, parts)
    scales = _halves(code, blocks) if type != "MXFP4" else _powers(code, blocks)
    minimums = _halves(code, [block + 2 for block in blocks]) if FORMS[type].minimum else None
    return _SHORT[type](code, blocks), scales, (), minimums


def long_blocks(code: Code, type: str, blocks: Sequence[Value]) -> LongBlocks:
    """The blocks at n addresses."""
    return _grid_block(code, type, blocks) if type in _GRIDS else _LONG[type](code, blocks)


_SHUFFLES = {32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}


def table(code: Code, numbers: Sequence[int], index: Value) -> Value:
    """The numbers, 16 of them, that bytes 0..15 of i8 [32 n] point at."""
    count = index.type.count
    everywhere = code.constants(index.type, [*numbers] * (count // len(numbers)))
    return code.call(_SHUFFLES[count], index.type, everywhere, index)


def _down(x: Value, bits: int) -> Value:
    """Bytes moved down by a number of bits; the upper ones are undefined."""
    return (x.bits(vector(I16, x.type.count // 2)) >> bits).bits(x.type)


def _moved(code: Code, x: Value, *steps: tuple[int, int, int, int]) -> Value:
    """Of every four words of i8 each moved by its number of bits, up where that is positive, step
    by step; what comes in from other bytes is undefined."""
    words = x.bits(vector(I32, x.type.count // 4))
    for step in steps:
        amounts = code.constants(words.type, [abs(n) for n in step] * (words.type.count // 4))
        words = words << amounts if max(step) > 0 else words >> amounts
    return words.bits(x.type)


def _in_fours(x: Value, lanes: Sequence[int], other: Value | None = None) -> Value:
    """Value.take_in_fours of words of i8."""
    words = vector(I32, x.type.count // 4)
    return x.bits(words).take_in_fours(lanes, other.bits(words) if other else None).bits(x.type)


def _everywhere(x: Value, word: int) -> Value:
    """One of every four words of i8 in the place of all four."""
    return _in_fours(x, [word] * 4)


def _halves(code: Code, addresses: Sequence[Value]) -> Value:
    """f16 at addresses as f32."""
    halves = joined([code.load(at, I16) for at in addresses])
    return halves.bits(vector(F16, len(addresses))).widen()


def _powers(code: Code, addresses: Sequence[Value]) -> Value:
    """2^(e - 128) of the bytes e at addresses, f32."""
    e = joined([code.load(at, I8) for at in addresses]).resize(I32)
    # 2^-128 and 2^-127 are below the exponents that f32 has bits for
    tiny = code.constant(e.type, 1 << 21) << e
    return code.choose(e.less(2), tiny, (e - 1) << 23).bits(vector(F32, len(addresses)))


def joined(parts: Sequence[Value]) -> Value:
    """Numbers, or vectors of one length, joined; a power of two of them."""
    values = [part if isinstance(part.type, ir.VectorType) else part.alone() for part in parts]
    while len(values) > 1:
        values = [a.beside(b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _loaded(code: Code, blocks: Sequence[Value], at: int, type: ir.Type) -> Value:
    """What is at one place of every block."""
    return joined([code.load(block + at, type) for block in blocks])


def fours(code: Code, addresses: Sequence[Value]) -> list[Value]:
    """16 bytes at each of 8 n addresses: vector k i8 [32 n] holds bytes 4k .. 4k + 3 of each."""
    loaded = [code.load(address, _I8X16) for address in addresses]
    return _turned([joined(loaded[i::4]) for i in range(4)])


def _turned(parts: Sequence[Value]) -> list[Value]:
    """Four vectors, of every 16 bytes the first, second, … words of all four in one vector."""
    a, b, c, d = parts
    turned = []
    for side in ([0, 4, 1, 5], [2, 6, 3, 7]):
        ab, cd = _in_fours(a, side, b), _in_fours(c, side, d)
        turned += [_in_fours(ab, half, cd) for half in ([0, 1, 4, 5], [2, 3, 6, 7])]
    return turned


def _both_halves(bytes: Sequence[Value]) -> list[Value]:
    """The low four bits of all bytes, then the high ones."""
    return [both & 15 for both in bytes] + [_down(both, 4) & 15 for both in bytes]


def _nibbles(code: Code, addresses: Sequence[Value]) -> list[Value]:
    """The first 16 elements in the low halves of 16 bytes, the others in the high halves."""
    return _both_halves(fours(code, addresses))


def _five_bits(code: Code, blocks: Sequence[Value], start: int) -> list[Value]:
    """The fifth bits of the elements in 32 bits from `start` on, then the others."""
    words = _loaded(code, blocks, start, I32)
    nibbles = _nibbles(code, [block + (start + 4) for block in blocks])
    zero, sixteen = (code.constant(nibbles[0].type, n) for n in (0, 16))
    missing = [_missing(code, words, k) for k in range(len(nibbles))]
    both = zip(nibbles, missing, strict=True)
    return [four | code.choose(nothing, zero, sixteen) for four, nothing in both]


def _missing(code: Code, words: Value, k: int) -> Value:
    """Of bits 4k .. 4k + 3 of each i32 whether they are 0."""
    count = 4 * words.type.count
    # the byte that has the bits, four times
    byte = words.bits(vector(I8, count)).take([j // 4 * 4 + k // 2 for j in range(count)])
    bits = [1 << (4 * (k % 2) + i) for i in range(4)] * (count // 4)
    return (byte & code.constants(byte.type, bits)).equal(0)


def _q8_0(code: Code, blocks: Sequence[Value]) -> list[Value]:
    return [part for at in (2, 18) for part in fours(code, [block + at for block in blocks])]


def _iq4_nl(code: Code, blocks: Sequence[Value]) -> list[Value]:
    indices = _nibbles(code, [block + 2 for block in blocks])
    return [table(code, IQ4_LEVELS, index) for index in indices]


def _fp4(code: Code, addresses: Sequence[Value]) -> list[Value]:
    numbers = [level + FORMS["MXFP4"].offset for level in MXFP4_LEVELS]
    return [table(code, numbers, index) for index in _nibbles(code, addresses)]


def _nvfp4(
    code: Code, blocks: Sequence[Value], parts: Sequence[Value | int]
) -> tuple[Sequence[Value], Value, Sequence[Value], None]:
    """Half of a block of 64 at each place. A scale is a byte for 16 neighbours: four bits of
    exponent and three others, as in f16, except for 127, which is 0."""
    numbers = _fp4(code, [at + (part * 16 + 4) for at, part in zip(blocks, parts, strict=True)])
    pairs = [code.load(at + part * 2, I16) for at, part in zip(blocks, parts, strict=True)]
    scales = []
    for bits in (0, 8):
        bytes = (joined(pairs) >> bits) & 255
        halves = ((bytes & 127) << 7).bits(vector(F16, len(blocks)))
        nothing = code.constant(vector(F32, len(blocks)), 0.0)
        scales.append(code.choose(bytes.equal(127), nothing, halves.widen() * 128.0))
    in_order = [numbers[i] for i in (0, 1, 4, 5, 2, 3, 6, 7)]
    return in_order, code.constant(scales[0].type, 1.0), scales, None


_SHORT: dict[str, Callable[[Code, Sequence[Value]], list[Value]]] = {
    "Q4_0": lambda code, blocks: _nibbles(code, [block + 2 for block in blocks]),
    "Q4_1": lambda code, blocks: _nibbles(code, [block + 4 for block in blocks]),
    "Q5_0": lambda code, blocks: _five_bits(code, blocks, 2),
    "Q5_1": lambda code, blocks: _five_bits(code, blocks, 4),
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": lambda code, blocks: _fp4(code, [block + 1 for block in blocks]),
}


def _two_bits(code: Code, blocks: Sequence[Value], start: int) -> Iterator[Value]:
    """Of every 32 of 64 bytes four parts: the lowest two bits, then the next ones."""
    for half in (0, BYTES):
        packed = _loaded(code, blocks, start + half, I8X32)
        for word in range(4):
            yield _moved(code, _everywhere(packed, word), (0, -2, -4, -6)) & 3


def _q2_k(code: Code, blocks: Sequence[Value]) -> LongBlocks:
    scales = _loaded(code, blocks, 0, _I8X16)
    return LongBlocks(
        list(_two_bits(code, blocks, 16)),
        _halves(code, [block + 80 for block in blocks]),
        scales & 15,
        _halves(code, [block + 82 for block in blocks]),
        _down(scales, 4) & 15,
    )


def _q3_k(code: Code, blocks: Sequence[Value]) -> LongBlocks:
    """The third bit of part i is bit i of a mask of 32 bytes."""
    mask = _loaded(code, blocks, 0, I8X32)
    third = [
        _moved(code, _everywhere(mask, i % 4), *([(2, 2, 2, 2)] if i < 4 else []), down) & 4
        for i, down in enumerate([(0, -1, -2, -3)] * 4 + [(-2, -3, -4, -5)] * 4)
    ]
    integers = [two | more for two, more in zip(_two_bits(code, blocks, 32), third, strict=True)]
    words = []
    low, pair = 0x0F0F0F0F, 0x30303030
    for block in blocks:
        first, second, high = (code.load(block + at, I32) for at in (96, 100, 104))
        words += [
            (first & low) | ((high << 4) & pair),
            (second & low) | ((high << 2) & pair),
            ((first >> 4) & low) | (high & pair),
            ((second >> 4) & low) | ((high >> 2) & pair),
        ]
    scales = joined(words).bits(vector(I8, 4 * len(words))) - 32
    return LongBlocks(integers, _halves(code, [block + 108 for block in blocks]), scales)


# of the four words of scales and minimums: low bits that stand together, high ones apart from them
_K_BITS = (63, 15, 63, 15), (0, 48, 0, 48)


def _k_block(code: Code, blocks: Sequence[Value], integers: Sequence[Value]) -> LongBlocks:
    """Scales and minimums of a Q4_K or Q5_K block: 6 bits each in bytes 4 to 15; see
    kernels.linear.block_parts. Its scale and minimum are in front."""
    start = _loaded(code, blocks, 0, _I32X4).bits(vector(I8, 16 * len(blocks)))
    low = _moved(code, _in_fours(start, [1, 3, 2, 3]), (0, 0, 0, -4))
    high = _moved(code, _in_fours(start, [1, 1, 2, 2]), (-2, -2, -2, -2))
    low_bits, high_bits = ([n for n in four for _ in range(4)] * len(blocks) for four in _K_BITS)
    six = (low & code.constants(low.type, low_bits)) | (high & code.constants(low.type, high_bits))
    scales, minimums = (
        six.take([16 * n + i for n in range(len(blocks)) for i in range(at, at + PER_STRETCH)])
        for at in (0, PER_STRETCH)
    )
    both = start.bits(vector(F16, PER_STRETCH * len(blocks)))
    scale, minimum = (
        both.take([PER_STRETCH * n + at for n in range(len(blocks))]).widen() for at in (0, 1)
    )
    return LongBlocks(integers, scale, scales, minimum, minimums)


def _four_bits(code: Code, blocks: Sequence[Value], start: int) -> list[Value]:
    """Of every 32 of 128 bytes two parts: the low halves, then the high ones."""
    at = [start + BYTES * i for i in range(4)]
    return _both_halves(_turned([_loaded(code, blocks, place, I8X32) for place in at]))


def _q4_k(code: Code, blocks: Sequence[Value]) -> LongBlocks:
    return _k_block(code, blocks, _four_bits(code, blocks, 16))


def _q5_k(code: Code, blocks: Sequence[Value]) -> LongBlocks:
    """As Q4_K, with the fifth bits of part i in bit i of 32 bytes of their own."""
    fifth = _loaded(code, blocks, 16, I8X32)
    integers = _four_bits(code, blocks, 48)
    steps = [((4, 2, 0, 0), (0, 0, 0, -2))] * 4 + [((3, 1, 0, 0), (0, 0, -1, -3))] * 4
    for i, step in enumerate(steps):
        integers[i] |= _moved(code, _everywhere(fifth, i % 4), *step) & 16
    return _k_block(code, blocks, integers)


def _q6_k(code: Code, blocks: Sequence[Value]) -> LongBlocks:
    """Halves of 128 elements; in each the parts 0 and 2, 1 and 3 share bytes of four bits, and all
    four share bytes of two bits."""
    integers = _four_bits(code, blocks, 0)
    high = [_loaded(code, blocks, at, I8X32) for at in (128, 128 + BYTES)]
    for i, step in enumerate([(4, 2, 4, 2)] * 4 + [(0, -2, 0, -2)] * 4):
        word = i % 4
        two = _in_fours(high[0], [word, word, 4 + word, 4 + word], high[1])
        integers[i] |= _moved(code, two, step) & 48
    scale = _halves(code, [block + 208 for block in blocks])
    return LongBlocks(integers, scale, _loaded(code, blocks, 192, _I8X16))


def _iq4_xs(code: Code, blocks: Sequence[Value]) -> LongBlocks:
    """A scale has its low four bits in bytes 4 to 7, two more in bytes 2 and 3."""
    pairs = [_loaded(code, blocks, 8 + BYTES * i, I8X32) for i in range(4)]
    integers = [table(code, IQ4_LEVELS, index) for index in _both_halves(_turned(pairs))]
    scales = []
    for block in blocks:
        low = code.splat(code.load(block + 4, I32), 8) >> code.constants(I32X8, range(0, 32, 4))
        high = code.splat(code.load(block + 2, I16).resize(I32), 8)
        high = high >> code.constants(I32X8, range(0, 16, 2))
        scales.append((((low & 15) | ((high & 3) << 4)) - 32).resize(I8))
    return LongBlocks(integers, _halves(code, blocks), joined(scales))


def _part_of(words: Value, i: int, bits: int = 8) -> Value:
    """Part i of each number, a part having this many bits, as i32."""
    return ((words >> (bits * i)) & (2**bits - 1)).resize(I32)


def _odd(scales: Value, bits: int = 4) -> Value:
    """Twice the lowest bits and one, i8."""
    return (((scales & (2**bits - 1)) << 1) + 1).resize(I8)


def _odd_halves(bytes: Value) -> Value:
    """_odd of the low half of each byte, then of its high half."""
    return _odd(joined(bytes.interleaved(bytes >> 4)))


def _eight_signs(seven: Value) -> Value:
    """The signs in the lowest 28 bits of i32, seven for eight numbers, as bits of four bytes."""
    signs = seven & 127
    for i in range(1, 4):
        signs |= (seven & (127 << (7 * i))) << i
    odd = signs ^ ((signs >> 4) & 0x07070707)
    odd = odd ^ ((odd >> 2) & 0x03030303)
    odd = odd ^ ((odd >> 1) & 0x01010101)
    return signs | ((odd & 0x01010101) << 7)


def _from_grid(code: Code, type: str, indices: Sequence[Value]) -> list[Value]:
    """Bytes from the grid, plus the type's offset. indices: i32 [8 n] for 32 neighbours each, 4 of
    entries of 8 numbers or 8 of entries of 4."""
    entries = grid(type) + FORMS[type].offset
    words = entries.byte().view(torch.int32).flatten().tolist()
    if len(indices) == 4:
        indices = [(index << 1) + half for index in indices for half in (0, 1)]
    found = [code.chosen(f"grid.{type}", words, index) for index in indices]
    return [words.bits(vector(I8, 4 * words.type.count)) for words in found]


def _signed(code: Code, type: str, indices: Sequence[Value], signs: Value) -> list[Value]:
    """_from_grid, negated where a bit of signs, i32 [8 n] for 32 neighbours each, is set."""
    fours, twice = _from_grid(code, type, indices), 2 * FORMS[type].offset
    negative = [code.constant(four.type, twice) - four for four in fours]
    both = enumerate(zip(fours, negative, strict=True))
    return [code.choose(_missing(code, signs, k), *values) for k, values in both]


At = Callable[[int, ir.Type], Value]
"""What is at one place of every block."""
Found = tuple[Sequence[Value], Value | Sequence[Value], Value]
"""Indices and signs for `_signed`, or for IQ1 the signs of steps, i32 [8 n] for each index; and
scales of groups."""


def _iq3_s(_code: Code, at: At) -> Found:
    low, high = at(2, _I64X8), at(66, _I8X8)
    indices = [_part_of(low, k) | (_part_of(high, k, 1) << 8) for k in range(8)]
    return indices, at(74, I32X8), _odd_halves(at(106, _I8X4))


def _iq3_xxs(_code: Code, at: At) -> Found:
    index, others = at(2, _I64X8), at(66, I32X8)
    return [_part_of(index, k) for k in range(8)], _eight_signs(others), _odd(others >> 28)


def _iq2_s(_code: Code, at: At) -> Found:
    low, high = at(2, I32X8), at(66, _I8X8)
    indices = [_part_of(low, i) | (_part_of(high, i, 2) << 8) for i in range(4)]
    return indices, at(34, I32X8), _odd_halves(at(74, _I8X8))


def _iq2_xs(_code: Code, at: At) -> Found:
    four = at(2, _I64X8)
    both = [_part_of(four, i, 16) for i in range(4)]
    sevens = [(two >> 9) << (7 * i) for i, two in enumerate(both)]
    signs = _eight_signs(sevens[0] | sevens[1] | sevens[2] | sevens[3])
    return [two & 511 for two in both], signs, _odd_halves(at(66, _I8X8))


def _iq2_xxs(_code: Code, at: At) -> Found:
    both = at(2, _I64X8)
    index, others = both.resize(I32), (both >> 32).resize(I32)
    return [_part_of(index, i) for i in range(4)], _eight_signs(others), _odd(others >> 28)


def _iq1_s(_code: Code, at: At) -> Found:
    low, words = at(2, I32X8), at(34, vector(I16, 8)).resize(I32)
    indices = [_part_of(low, i) | (_part_of(words, i, 3) << 8) for i in range(4)]
    return indices, [words >> 15] * 4, _odd(words >> 12, 3)


def _iq1_m(code: Code, at: At) -> Found:
    low, high, words = at(0, I32X8), at(32, vector(I16, 8)), at(48, vector(I16, 4))
    more = [_part_of(high, i, 4) for i in range(4)]
    indices = [_part_of(low, i) | ((more[i] & 7) << 8) for i in range(4)]
    four = words.resize(I32).repeated(4)
    scales = four >> code.constants(four.type, [0, 3, 6, 9] * words.type.count)
    return indices, [part >> 3 for part in more], _odd(scales, 3)


_GRIDS: dict[str, Callable[[Code, At], Found]] = {
    "IQ3_S": _iq3_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ2_S": _iq2_s,
    "IQ2_XS": _iq2_xs,
    "IQ2_XXS": _iq2_xxs,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}


def _grid_block(code: Code, type: str, blocks: Sequence[Value]) -> LongBlocks:
    indices, signs, scales = _GRIDS[type](code, partial(_loaded, code, blocks))
    if isinstance(signs, Value):
        integers = _signed(code, type, indices, signs)
    else:
        # all of the same neighbours are one more or one less than eight times the grid's number
        steps = [(sign << 1) * 0x01010101 for sign in signs for _ in (0, 1)]
        fours = _from_grid(code, type, indices)
        integers = [n + 1 - step.bits(n.type) for n, step in zip(fours, steps, strict=True)]
    halves = _upper_halves(code, blocks) if type == "IQ1_M" else _halves(code, blocks)
    return LongBlocks(integers, halves * (1 / STEPS[type]), scales)


def _upper_halves(code: Code, blocks: Sequence[Value]) -> Value:
    """f16 of the upper four bits of each of four words, as f32."""
    words = _loaded(code, blocks, 48, vector(I16, 4))
    high = (words >> 12) << code.constants(words.type, [0, 4, 8, 12] * len(blocks))
    a, b, c, d = (high.take(range(i, high.type.count, 4)) for i in range(4))
    return (a | b | c | d).bits(vector(F16, len(blocks))).widen()


def _unscaled(
    code: Code, integers: Sequence[Value], blocks: Sequence[Value], at: int
) -> LongBlocks:
    """Of a scale at `at`, without scales of groups."""
    ones = code.constant(vector(I8, PER_STRETCH * len(blocks)), 1)
    return LongBlocks(integers, _halves(code, [block + at for block in blocks]), ones)


def _tq1_0(code: Code, blocks: Sequence[Value]) -> LongBlocks:
    """Digits to the base of 3; see kernels.linear.block_parts. The last sixteen are of a word."""
    sixteens = []
    for block in blocks:
        first, second, third = (code.load(block + at, _I8X16) for at in (0, 16, 32))
        last = code.splat(code.load(block + 48, I32), 4).bits(_I8X16)
        rests = [part * 3**i for i in range(5) for part in (first, second)]
        rests += [third * 3**i for i in range(5)]
        powers = [3**i for i in range(4) for _ in range(4)]
        rests.append(last * code.constants(_I8X16, powers))
        sixteens.append([(rest.resize(I16) * 3 >> 8).resize(I8) for rest in rests])
    integers = []
    for half in (0, 1):
        loaded = [part for block in sixteens for part in block[half::2]]
        integers += _turned([joined(loaded[i::4]) for i in range(4)])
    return _unscaled(code, integers, blocks, 52)


_LONG: dict[str, Callable[[Code, Sequence[Value]], LongBlocks]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "TQ2_0": lambda code, at: _unscaled(code, [*_two_bits(code, at, 0)], at, 64),
    "TQ1_0": _tq1_0,
}
