"""Lines of a text: their places, the numbers in them, and their shapes. Lines of one shape differ
only in their numbers or in the text of a token. One pass over the bytes, in machine code, without
torch."""

from __future__ import annotations

import ctypes
import functools
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from kernels.kernel_files import kept
from kernels.llvm.code import Code
from kernels.llvm.object_cache import compiled, loaded, program_key
from kernels.llvm.values import I8, I64, Value

_N_ARGS = 16
_KEY = secrets.randbits(64) | 1
"""Random, so that no one can write a text with two shapes of the same hash."""
_NEW_LINE, _ZERO, _QUOTE, _BRACE, _SPACE = b"\n0'{ "
_WORD = 8
_TOKENS = b"draft candidate", b"next token:"
"""One of these precedes the quote before a token's text."""
_FARTHEST = 96
"""Greatest distance in bytes between them."""
_NO_TOKENS = b"\\\x1b"
"""The text of a token with one of these stays part of the shape."""
_AFTER_TOKENS = b'\n"\\'
"""Bytes that may follow the quote after the text."""
_CHUNK = b"http: streamed chunk: data: "
CUT = 2
"""Bit in the hash of a shape whose lines are read only up to an object that a server sends."""


class ScannedLines(NamedTuple):
    """ends: of each line, the place of its line end. first: of each line, the index of the next
    number in or after it. shape_of: of each line, the number of its shape; first_of, hashes: of
    each shape, its first line, and 64 bits that no other shape of this process has. stops, lengths,
    values: of each number of ASCII digits, where it ends, its number of digits, and its value
    modulo 2^64. All int64."""

    ends: np.ndarray
    first: np.ndarray
    shape_of: np.ndarray
    first_of: np.ndarray
    hashes: np.ndarray
    stops: np.ndarray
    lengths: np.ndarray
    values: np.ndarray


def scanned(data: bytes, *, cuts: bool = False) -> ScannedLines:
    """The lines of a text, each of which ends with a line feed. Texts of tokens count as equal
    unless they have numbers, quotes or escapes, or another quote follows. cuts: objects that a
    server sends, and all after them, count as equal too, without their numbers."""
    text = np.frombuffer(data + bytes(_WORD), np.uint8)  # words are read whole
    n_lines, n_most = int(np.count_nonzero(text == _NEW_LINE)), len(data) // 2 + 1
    lines = [np.empty(n_lines, np.int64) for _ in range(5)]
    numbers = [np.empty(n_most, np.int64) for _ in range(3)]
    bits = max(n_lines, 1).bit_length() + 1
    table, counts = np.zeros((1 << bits, 2), np.int64), np.zeros(2, np.int64)
    arrays = *lines, *numbers, table, counts
    addresses = [one.ctypes.data for one in arrays]
    _scan()(text.ctypes.data, len(data), n_lines, _KEY, 64 - bits, cuts, *addresses)
    n_shapes, n_numbers = counts.tolist()
    ends, first, shape_of, first_of, hashes = lines
    stops, lengths, values = (one[:n_numbers] for one in numbers)
    shapes = first_of[:n_shapes], hashes[:n_shapes]
    return ScannedLines(ends, first, shape_of, *shapes, stops, lengths, values)


@functools.cache
def _scan() -> Callable[..., None]:
    key = program_key(_write, _N_ARGS)
    code = _compiled() if key is None else kept(key, _compiled)
    engine = loaded(code, has_threads=False)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_uint64] * _N_ARGS)
    found = call(engine.get_function_address("scan"))
    found.engine = engine  # type: ignore[attr-defined]
    return found


def _compiled() -> bytes:
    module = ir.Module("lines")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * _N_ARGS), "scan")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    _write(Code(builder), [Value(builder, one) for one in function.args])
    builder.ret_void()
    return compiled(module)


def _write(code: Code, args: Sequence[Value]) -> None:
    """The loop over all words, each up to the first byte with a meaning."""
    text, n_bytes, n_lines, key, shift, cuts, ends, first, shape_of, first_of, *rest = args
    hashes, stops, lengths, values, table, counts = rest
    zero, one = code.integer(0), code.integer(1)
    at, begin, line, n_shapes, number = (code.variable(zero) for _ in range(5))
    value, slot, found, opened, n_quotes = (code.variable(zero) for _ in range(5))
    # the hash of a line so far, the same without the text of a token, and before that text
    state, other, before = (code.variable(key) for _ in range(3))
    is_token, is_cut = code.variable(zero), code.variable(zero)

    def mixed(hash_: Value, more: Value | int) -> Value:
        # twice, because otherwise the highest bits of a word would have a predictable effect
        half = (hash_ ^ more) * key
        half = (half ^ (half >> 32)) * key
        return half ^ (half >> 32)

    def mix(more: Value | int) -> None:
        state.set(mixed(state.value, more))
        other.set(mixed(other.value, more))

    def byte_at(place: Value) -> Value:
        return code.load(text + place, I8)

    def digit() -> Value:
        return (byte_at(at.value) - _ZERO).resize(I64)

    def is_other() -> Value:
        found.set(code.load(table + slot.value * 16, I64))
        is_free = found.value.equal(0)
        return (is_free | found.value.equal(state.value)).equal(0)

    def quote() -> None:
        """A quote in a line: the first one after a space may begin the text of a token."""
        with code.builder.if_else(n_quotes.value.equal(0).ir) as (is_first, is_later):
            with (
                is_first,
                code.when(begin.value.less(at.value)),
                code.when(byte_at(at.value - 1).equal(_SPACE)),
            ):
                n_most = code.smaller(at.value - begin.value, code.integer(_FARTHEST))
                with code.loop(_WORD, n_most + 1) as back:
                    place = text + at.value - back
                    for name in _TOKENS:
                        parts = name[:_WORD], name[-_WORD:]
                        head, tail = (int.from_bytes(part, "little") for part in parts)
                        with code.when(code.load(place, I64).equal(head)):
                            after = code.load(place + (len(name) - _WORD), I64)
                            with code.when(after.equal(tail)):
                                is_token.set(one)
                n_quotes.set(one)
                opened.set(at.value + 1)
                before.set(state.value)
            with is_later:
                with code.when((n_quotes.value.equal(1) & opened.value.less(at.value)).equal(0)):
                    is_token.set(zero)
                with code.when(is_token.value.equal(1)):
                    with code.loop(opened.value, at.value) as place:
                        for no in _NO_TOKENS:
                            with code.when(byte_at(place).equal(no)):
                                is_token.set(zero)
                    other.set(mixed(before.value, key))  # as if there were no text
                    follows = byte_at(at.value + 1)
                    ends_text = [follows.equal(byte) for byte in _AFTER_TOKENS]
                    with code.when(functools.reduce(Value.__or__, ends_text).equal(0)):
                        is_token.set(zero)
                n_quotes.set(n_quotes.value + 1)

    def end_line() -> None:
        with code.when(n_quotes.value.equal(2) & is_token.value.equal(1)):
            state.set(other.value)
        # 0 marks an empty place of the table
        state.set(((state.value | CUT) ^ CUT) | 1 | is_cut.value * CUT)
        slot.set((state.value * key) >> shift)
        with code.repeat(is_other):
            slot.set(slot.value + 1)
            with code.when((slot.value >> (zero - shift + 64)).equal(1)):
                slot.set(zero)
        with code.when(found.value.equal(0)):
            code.store(state.value, table + slot.value * 16)
            code.store(n_shapes.value, table + slot.value * 16 + 8)
            code.store(state.value, hashes + n_shapes.value * 8)
            code.store(line.value, first_of + n_shapes.value * 8)
            n_shapes.set(n_shapes.value + 1)
        code.store(code.load(table + slot.value * 16 + 8, I64), shape_of + line.value * 8)
        code.store(at.value, ends + line.value * 8)
        line.set(line.value + 1)
        with code.when(line.value.less(n_lines)):
            code.store(number.value, first + line.value * 8)
        state.set(key)
        other.set(key)
        begin.set(at.value + 1)
        n_quotes.set(zero)
        is_token.set(zero)
        is_cut.set(zero)

    def brace() -> None:
        """A brace in a line: the rest may not count."""
        n = len(_CHUNK)
        with code.when(cuts.equal(1) & (begin.value + (n - 1)).less(at.value)):
            same = [
                code.load(text + at.value - n + i, I64).equal(
                    int.from_bytes(_CHUNK[i : i + _WORD], "little")
                )
                for i in (0, 8, 16, n - _WORD)
            ]
            is_cut.set(functools.reduce(Value.__and__, same).resize(I64))
        at.set(at.value + 1)
        with code.when(is_cut.value.equal(1)):
            with code.repeat(lambda: _marks(code.load(text + at.value, I64), b"\n").equal(0)):
                at.set(at.value + _WORD)
            at.set(at.value + _n_before(code, _marks(code.load(text + at.value, I64), b"\n")))

    code.store(zero, first)
    with code.repeat(lambda: at.value.less(n_bytes)):
        word = code.load(text + at.value, I64)
        marks = _marks(word, b"\n'{", digits=True)
        with code.builder.if_else(marks.equal(0).ir) as (has_none, has_some):
            with has_none:
                mix(word)
                at.set(at.value + _WORD)
            with has_some:
                n = _n_before(code, marks)
                with code.when(zero.less(n)):
                    # cannot be predicted to equal a whole word
                    mix((word & ((one << (n * 8)) - 1)) ^ (n << 56) ^ (key >> 1))
                    at.set(at.value + n)
                with code.builder.if_else(digit().less(10).ir) as (is_digit, is_none):
                    with is_digit:
                        mix(_ZERO)
                        with code.when(n_quotes.value.equal(1)):
                            is_token.set(zero)
                        start = at.value
                        value.set(zero)
                        with code.repeat(lambda: digit().less(10)):
                            value.set(value.value * 10 + digit())
                            at.set(at.value + 1)
                        sizes = (
                            (stops, at.value),
                            (lengths, at.value - start),
                            (values, value.value),
                        )
                        for array, size in sizes:
                            code.store(size, array + number.value * 8)
                        number.set(number.value + 1)
                    with is_none:
                        is_end = byte_at(at.value).equal(_NEW_LINE)
                        is_brace = byte_at(at.value).equal(_BRACE)
                        with code.builder.if_else(is_end.ir) as (ends_line, goes_on):
                            with ends_line:
                                end_line()
                                at.set(at.value + 1)
                            with goes_on, code.builder.if_else(is_brace.ir) as (yes, no):
                                with yes:
                                    mix(_BRACE)
                                    brace()
                                with no:
                                    mix(_QUOTE)
                                    quote()
                                    at.set(at.value + 1)
    code.store(n_shapes.value, counts)
    code.store(number.value, counts + 8)


def _marks(word: Value, of: bytes, *, digits: bool = False) -> Value:
    """The highest bit of each byte that is one of these."""

    def each(byte: int) -> int:
        return int.from_bytes(bytes([byte]) * _WORD, "little", signed=True)

    def differs(byte: int, most: int = 1) -> Value:
        """The highest bit where a byte is not one of `most` from this one on."""
        part = word ^ each(byte)
        return ((part & each(0x7F)) + each(0x80 - most)) | part

    parts = [differs(byte) for byte in of] + [differs(_ZERO, 10)] * digits
    return (functools.reduce(Value.__and__, parts) ^ -1) & each(0x80)


def _n_before(code: Code, marks: Value) -> Value:
    """Bytes before the first that is marked."""
    return code.call("llvm.cttz.i64", I64, marks, code.constant(ir.IntType(1), 0)) >> 3
