"""Few rows of x: each weight row is decoded in registers and multiplied with all of them.

For one row this waits for memory alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.linear.block_linear.operands_with_llvm import (
    GROUP,
    PLAIN,
    Arithmetic,
    has_terms,
    operands,
    sizes,
    terms,
)
from kernels.linear.decode_with_llvm import HALVES
from kernels.llvm import F32X16, Code, Program, Value, kernel
from kernels.llvm.values import transposed
from kernels.processor import has_feature

ROWS = 8
"""More rows of x than this many share no reading of the weights."""

# weight rows that a thread takes at a time
CHUNK = 256
# numbers of a row of x that are used for all weight rows of a chunk before the next ones
STRETCH = 1024
# rows of x that stay in the cache as they are
HARDLY_ANY = 2
# bytes; the CPU's own prefetching starts anew with every row
AHEAD = 1024

Product = tuple[str, int, Arithmetic]
"""Parameters of a program: type of the blocks, rows of x, and how they are multiplied."""


def multiply_rows(x: Tensor, blocks: Tensor, type: str, how: Arithmetic, y: Tensor) -> None:
    """y f32 [n, out] = x f32 [n, in] @ weight.T, n <= ROWS; all contiguous."""
    n_out, row_bytes = blocks.shape
    n_rows, n_in = x.shape
    threads = torch.get_num_threads()
    inputs = x
    if how.rounded:
        inputs = torch.empty(_input_bytes(n_in, how) * n_rows, dtype=torch.uint8)
        _prepare(how)(x.data_ptr(), inputs.data_ptr(), n_in, tasks=n_rows, chunk=n_rows, threads=1)
    in_groups = n_in <= STRETCH and takes_groups(type, n_rows, how, n_out, row_bytes)
    per_task = TOGETHER if in_groups else 1
    n_tasks = n_out // per_task
    _program(type, n_rows, how, in_groups)(
        blocks.data_ptr(),
        row_bytes,
        inputs.data_ptr(),
        n_in,
        y.data_ptr(),
        n_out,
        tasks=n_tasks,
        chunk=min(CHUNK // per_task, -(-n_tasks // (4 * threads))),
        threads=threads,
    )


@functools.cache
def _input_bytes(n_in: int, how: Arithmetic) -> int:
    """Bytes of a row of x as a product reads it, sums of groups included."""
    return n_in * how.size + 4 * (n_in // GROUP)


@kernel(3)
def _prepare(code: Code, args: Sequence[Value], r: Value, how: Arithmetic) -> None:
    """Round rows of x, and append the sums of its groups to each."""
    x, out, n_in = args
    start = out + r * _row_bytes(n_in, how)
    with code.loop(0, n_in, GROUP) as k:
        low, high = (code.load(x + (r * n_in + k) * 4 + at, F32X16) for at in (0, 64))
        rounded = [half.rounded_to_bf16() for half in (low, high)]
        if how.fused:
            code.store(how.operand(code, low, high), start + k * 2)
        else:
            for i, half in enumerate(rounded):
                code.store(half, start + k * 4 + 64 * i)
        code.store(code.sum(rounded[0] + rounded[1]), start + n_in * how.size + k // GROUP * 4)


@functools.cache
def _program(type: str, n_rows: int, how: Arithmetic, in_groups: bool) -> Program:
    if in_groups:
        body = multiply_groups
    else:
        body = _by_terms if how.fused and has_terms(type) else _by_numbers
    return Program(functools.partial(body, (type, n_rows, how)), 6)


def _row_bytes(n_in: Value, how: Arithmetic) -> Value:
    return n_in * how.size + n_in // GROUP * 4 if how.rounded else n_in * 4


def _by_numbers(
    product: Product, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """The body of a program that decodes weights to floating point and multiplies them."""
    type, n_rows, how = product
    elements, _ = sizes(type)
    zero = code.constant(F32X16, 0.0)
    for stretch in _stretches(product, code, args, first, last):
        sums = [code.variable(zero) for _ in range(n_rows)]
        for block, b in stretch.blocks():
            inputs = [stretch.input(r) + b * (elements * how.size) for r in range(n_rows)]
            for i, weights in enumerate(operands(code, type, block, how)):
                for total, at in zip(sums, inputs, strict=True):
                    factor = how.load(code, at + i * how.step * how.size)
                    total.set(how.add(code, total.value, weights, factor))
        for r, total in enumerate(sums):
            stretch.add(r, code.sum(total.value))


def _by_terms(
    product: Product, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """The body of a program that multiplies integers, then each group's sum with its scale."""
    type, n_rows, how = product
    elements, _ = sizes(type)
    n_in, n_groups = args[3], elements // GROUP
    zero = code.constant(F32X16, 0.0)
    for stretch in _stretches(product, code, args, first, last):
        sums = [code.variable(zero) for _ in range(n_rows)]
        # what the offsets take away
        lesses = [code.variable(zero.part(0, n_groups)) for _ in range(n_rows)]
        for block, b in stretch.blocks():
            starts = [stretch.input(r) for r in range(n_rows)]
            parts, offsets = terms(code, type, block)
            for i, (weights, scale) in enumerate(parts):
                for total, at in zip(sums, starts, strict=True):
                    factor = how.load(code, at + b * (elements * 2) + 64 * i)
                    total.set(code.fma(how.add(code, zero, weights, factor), scale, total.value))
            if offsets is not None:
                for less, at in zip(lesses, starts, strict=True):
                    groups = code.load(at + n_in * 2 + b * (4 * n_groups), offsets.type)
                    less.set(code.fma(offsets, groups, less.value))
        for r, (total, less) in enumerate(zip(sums, lesses, strict=True)):
            stretch.add(r, code.sum(total.value) - code.sum(less.value))


class _Stretch:
    """Neighbouring blocks of a weight row, as few as let x's numbers for them stay in the cache."""

    def __init__(
        self,
        type: str,
        how: Arithmetic,
        code: Code,
        args: Sequence[Value],
        row: Value,
        begin: Value,
        end: Value,
        ahead: Value | int,
    ) -> None:
        """ahead: bytes to what will be read some time after a block."""
        blocks, row_bytes, self._x, n_in, self._y, self._n_out = args
        self._code, self._row, self._begin, self._end, self._ahead = code, row, begin, end, ahead
        self._n_bytes = sizes(type)[1]
        self._start = blocks + row * row_bytes
        self._input_bytes = _row_bytes(n_in, how)

    def blocks(self) -> Iterator[tuple[Value, Value]]:
        """The address of each block, and its number in the row."""
        with self._code.loop(self._begin, self._end) as b:
            block = self._start + b * self._n_bytes
            for line in range(0, self._n_bytes, 64):
                self._code.prefetch(block + self._ahead + line)
            yield block, b

    def input(self, r: int) -> Value:
        """The address of a row of x."""
        return self._x + self._input_bytes * r

    def add(self, r: int, result: Value) -> None:
        """Add a stretch's part of a sum to y; the first stretch sets it."""
        code, at = self._code, self._y + (self._n_out * r + self._row) * 4
        nothing = code.constant(result.type, 0.0)
        before = code.choose(self._begin.less(1), nothing, code.load(at, result.type))
        code.store(before + result, at)


def _stretches(
    product: Product, code: Code, args: Sequence[Value], first: Value, last: Value
) -> Iterator[_Stretch]:
    """The stretches of all weight rows, one row at a time: two streams of memory are slower.

    Row by row for hardly any x, else stretch by stretch; a row's sum is the same either way.
    """
    type, n_rows, how = product
    elements, _ = sizes(type)
    n_blocks = args[3] // elements
    step = STRETCH // elements
    if n_rows <= HARDLY_ANY:
        with code.loop(first, last) as row, code.loop(0, n_blocks, step) as begin:
            end = code.smaller(begin + step, n_blocks)
            yield _Stretch(type, how, code, args, row, begin, end, AHEAD)
    else:
        with code.loop(0, n_blocks, step) as begin:
            end = code.smaller(begin + step, n_blocks)
            with code.loop(first, last) as row:
                # the same place of the next row: the CPU would not guess it
                yield _Stretch(type, how, code, args, row, begin, end, args[1])


TOGETHER = 4
"""Weight rows of a task."""

_LINE = 64
# bytes; of a matrix that comes from memory four rows at once are slower than one
_CACHED = 4 << 20
# with other types, a single block fills the registers
_TYPES = ("Q8_0", PLAIN, *HALVES)
# sums of 16 numbers that leave registers for what is added to them
_MOST_SUMS = {True: 16, False: 4}


def takes_groups(type: str, n_rows: int, how: Arithmetic, n_out: int, row_bytes: int) -> bool:
    """Whether weight rows come to whole groups, whose sums with n_rows rows of x stay in the
    registers, and may be in the CPU's caches."""
    if type not in _TYPES or how.rounded or n_out % TOGETHER or n_out * row_bytes > _CACHED:
        return False
    return n_rows * TOGETHER <= _MOST_SUMS[has_feature("avx512f")]


def multiply_groups(
    product: Product, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """The body of a program whose tasks are groups. Rows of x are one stretch of rows_with_llvm, or
    less; the arguments are those of its programs."""
    type, n_rows, how = product
    blocks, row_bytes, x, n_in, y, n_out = args
    elements, n_bytes = sizes(type)
    zero = code.constant(F32X16, 0.0)
    with code.loop(first, last) as group:
        start = blocks + group * row_bytes * TOGETHER
        sums = [[code.variable(zero) for _ in range(TOGETHER)] for _ in range(n_rows)]
        with code.loop(0, n_in // elements) as b:
            rows = [x + (n_in * r + b * elements) * how.size for r in range(n_rows)]
            blocks_here = [start + b * n_bytes + row_bytes * w for w in range(TOGETHER)]
            for block in blocks_here:
                # the same place of the next group: the CPU would not guess it
                for line in range(0, n_bytes, _LINE):
                    code.prefetch(block + row_bytes * TOGETHER + line)
            decoded = [operands(code, type, block, how) for block in blocks_here]
            for i, weights in enumerate(zip(*decoded, strict=True)):
                factors = [how.load(code, row + i * how.step * how.size) for row in rows]
                for w, weight in enumerate(weights):
                    for totals, factor in zip(sums, factors, strict=True):
                        totals[w].set(how.add(code, totals[w].value, weight, factor))
        for r, totals in enumerate(sums):
            results = _sums([total.value for total in totals])
            code.store(results, y + (n_out * r + group * TOGETHER) * 4)


def _sums(vectors: Sequence[Value]) -> Value:
    """The sum of each of TOGETHER vectors, in the order of `Code.sum`."""
    while (half := vectors[0].type.count // 2) >= TOGETHER:
        vectors = [x.part(0, half) + x.part(half, half) for x in vectors]
    a, b, c, d = transposed(vectors)
    # a stretch is added to 0, which leaves no negative one
    return ((a + c) + (b + d)) + 0.0
