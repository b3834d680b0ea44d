"""Lines of a text: where they are, the numbers in them, and their shapes: lines of one shape differ
in their numbers alone. One pass over the bytes, in machine code, and without torch."""

from __future__ import annotations

import ctypes
import functools
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from kernels.llvm.code import Code
from kernels.llvm.compiler import compiled, loaded
from kernels.llvm.values import I8, I64, Value

_N_ARGS = 15
_KEY = secrets.randbits(64) | 1
"""No text is known to have two shapes of the same hash."""
_NEW_LINE, _ZERO = 10, 48


class ScannedLines(NamedTuple):
    """ends: of each line, where its line end is. first: of each line, the next number in it or
    after it. shape_of: of each line, the number of its shape; first_of, hashes: of each shape, its
    first line, and 64 bits that no other shape has in this process. stops, lengths, values: of each
    number of ASCII digits, where it ends, how many digits it has and what it is, modulo 2^64. All
    int64."""

    ends: np.ndarray
    first: np.ndarray
    shape_of: np.ndarray
    first_of: np.ndarray
    hashes: np.ndarray
    stops: np.ndarray
    lengths: np.ndarray
    values: np.ndarray


def scanned(data: bytes) -> ScannedLines:
    """The lines of a text, each of which ends with a line feed."""
    n_lines, n_most = data.count(b"\n"), len(data) // 2 + 1
    lines = [np.empty(n_lines, np.int64) for _ in range(5)]
    numbers = [np.empty(n_most, np.int64) for _ in range(3)]
    bits = max(n_lines, 1).bit_length() + 1
    table, counts = np.zeros((1 << bits, 2), np.int64), np.zeros(2, np.int64)
    arrays = *lines, *numbers, table, counts
    text = np.frombuffer(data, np.uint8)
    _scan()(
        text.ctypes.data, len(data), n_lines, _KEY, 64 - bits, *(one.ctypes.data for one in arrays)
    )
    n_shapes, n_numbers = counts.tolist()
    ends, first, shape_of, first_of, hashes = lines
    stops, lengths, values = (one[:n_numbers] for one in numbers)
    shapes = first_of[:n_shapes], hashes[:n_shapes]
    return ScannedLines(ends, first, shape_of, *shapes, stops, lengths, values)


@functools.cache
def _scan() -> Callable[..., None]:
    module = ir.Module("lines")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * _N_ARGS), "scan")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    _write(Code(builder), [Value(builder, one) for one in function.args])
    builder.ret_void()
    engine = loaded(compiled(module), has_threads=False)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_uint64] * _N_ARGS)
    found = call(engine.get_function_address("scan"))
    found.engine = engine  # type: ignore[attr-defined]
    return found


def _write(code: Code, args: Sequence[Value]) -> None:
    """The loop over all bytes."""
    text, n_bytes, n_lines, key, shift, ends, first, shape_of, first_of, hashes, *rest = args
    stops, lengths, values, table, counts = rest
    zero = code.integer(0)
    line, n_shapes, number, value, length = (code.variable(zero) for _ in range(5))
    state = code.variable(key)
    slot, found = code.variable(zero), code.variable(zero)

    def mix(more: Value | int) -> None:
        mixed = (state.value ^ more) * key
        state.set(mixed ^ (mixed >> 32))

    def is_other() -> Value:
        found.set(code.load(table + slot.value * 16, I64))
        is_free = found.value.equal(0)
        return (is_free | found.value.equal(state.value)).equal(0)

    code.store(zero, first)
    with code.loop(0, n_bytes) as at:
        byte = code.load(text + at, I8)
        digit, byte = (byte - _ZERO).resize(I64), byte.resize(I64)
        with code.builder.if_else(digit.less(10).ir) as (is_digit, is_none):
            with is_digit:
                with code.when(length.value.equal(0)):
                    mix(_ZERO)
                    value.set(zero)
                value.set(value.value * 10 + digit)
                length.set(length.value + 1)
            with is_none:
                with code.when(zero.less(length.value)):
                    for array, one in ((stops, at), (lengths, length.value), (values, value.value)):
                        code.store(one, array + number.value * 8)
                    number.set(number.value + 1)
                    length.set(zero)
                mix(byte)
                with code.when(byte.equal(_NEW_LINE)):
                    state.set(state.value | 1)  # an empty place of the table is 0
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
                    shape = code.load(table + slot.value * 16 + 8, I64)
                    code.store(shape, shape_of + line.value * 8)
                    code.store(at, ends + line.value * 8)
                    line.set(line.value + 1)
                    with code.when(line.value.less(n_lines)):
                        code.store(number.value, first + line.value * 8)
                    state.set(key)
    code.store(n_shapes.value, counts)
    code.store(number.value, counts + 8)
