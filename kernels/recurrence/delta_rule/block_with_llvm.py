"""The delta rule on a block of columns of one state, as code for LLVM.

Columns do not mix in the recurrence. A task keeps its block S [d_k, width] in the nearest cache
and takes it through all tokens, each in two passes, with a = e^g:

    w = S^T (a k),  r = S^T (a q);   u = beta (v - w),  o = (r + (q . k) u) / sqrt(d_k)
    S <- a S + k u^T

Every token goes through the same operations in the same order, so its bits do not depend on how
tokens and sequences are portioned, and the second pass rebuilds the very state from a log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kernels.llvm import F32, Code, Value, vector
from kernels.llvm.code import Variable
from kernels.llvm.functions import exp

LANES = 16
# columns of a block: with keys of 128 numbers it has room in a nearest cache of 32 KiB
COLUMNS = 64
# bytes
LINE = 64
# sums formed side by side, because each waits for its last addition
CHAINS = 8


class Sides(NamedTuple):
    """The sides of a state [d_k, d_v]. channels: one gate per key channel, else one per head."""

    d_k: int
    d_v: int
    channels: bool = False

    @property
    def width(self) -> int:
        """Columns of a block."""
        return _divisor(self.d_v, COLUMNS)


def _divisor(n: int, most: int) -> int:
    """The largest power of two that divides n, up to `most`."""
    return min(n & -n, most)


class Place(NamedTuple):
    """Where a block lies: the address of its first number, and the bytes from row to row."""

    start: Value
    row: Value


class Block:
    """Writes the operations on one block into `code`.

    Rows of v, o and u are given by the address of the first number in the block's columns.
    """

    def __init__(self, code: Code, sides: Sides) -> None:
        self._code, self._sides = code, sides
        self._d_k = code.integer(sides.d_k)
        self._lanes = min(sides.width, LANES)
        self._n_vectors = sides.width // self._lanes
        self._type = vector(F32, self._lanes)
        self.own = Place(code.stack(4 * sides.d_k * sides.width), code.integer(4 * sides.width))
        self._decays, self._keys, self._queries = (code.stack(4 * sides.d_k) for _ in range(3))

    def place_if(self, condition: Value, place: Place) -> Place:
        """`place` if the condition holds, else the block's own memory on the stack."""
        choose = self._code.choose
        return Place(*(choose(condition, a, b) for a, b in zip(place, self.own, strict=True)))

    def token(
        self, S: Place, q: Value, k: Value, v: Value, g: Value, beta: Value
    ) -> tuple[list[Value], list[Value]]:
        """The first pass: o and u of every column."""
        code = self._code
        gram = self._spread(self._scale(q, k, g))
        w, r = self._read(S)
        strength = self._spread(code.load(beta, F32))
        u = [(v_n - w_n) * strength for v_n, w_n in zip(self.load(v), w, strict=True)]
        scale = self._sides.d_k**-0.5
        return [code.fma(gram, u_n, r_n) * scale for u_n, r_n in zip(u, r, strict=True)], u

    def decay(self, g: Value) -> None:
        """What `write` needs of the gates where no first pass has gone before."""
        if not self._sides.channels:
            return
        lanes = _divisor(self._sides.d_k, LANES)
        with self._code.loop(0, self._d_k, lanes) as d:
            gates = self._code.load(g + d * 4, vector(F32, lanes))
            self._code.store(exp(self._code, gates), self._decays + d * 4)

    def write(self, S: Place, k: Value, g: Value, u: Sequence[Value], target: Place) -> None:
        """The second pass, from S to target."""
        code = self._code
        whole = None if self._sides.channels else self._spread(exp(code, code.load(g, F32)))
        with code.loop(0, self._d_k) as d:
            decay, key = whole or self._number(self._decays, d), self._number(k, d)
            rows = self.load(S.start + d * S.row)
            new = [code.fma(key, u_n, S_n * decay) for S_n, u_n in zip(rows, u, strict=True)]
            self.store(new, target.start + d * target.row)

    def copy(self, S: Place, target: Place) -> None:
        with self._code.loop(0, self._d_k) as d:
            self.store(self.load(S.start + d * S.row), target.start + d * target.row)

    def copy_past_caches(self, S: Place, target: Place) -> None:
        """`copy` to what is not read soon, where rows begin on lines of the cache; else `copy`."""
        code, step = self._code, 4 * self._lanes
        off = (target.start | target.row) % LINE
        on_lines = off.less(1) if step == LINE else code.integer(1).less(0)
        with code.when(on_lines), code.loop(0, self._d_k) as d:
            for n, value in enumerate(self.load(S.start + d * S.row)):
                to = target.start + d * target.row + step * n
                code.store_past_caches(value, to, LINE)
        with code.when(on_lines ^ 1):
            self.copy(S, target)

    def load(self, address: Value) -> list[Value]:
        """One number for every column."""
        step = 4 * self._lanes
        return [self._code.load(address + step * n, self._type) for n in range(self._n_vectors)]

    def store(self, values: Sequence[Value], address: Value) -> None:
        for n, value in enumerate(values):
            self._code.store(value, address + 4 * self._lanes * n)

    def _scale(self, q: Value, k: Value, g: Value) -> Value:
        """Keys and queries times their decay, and the decays, into memory; returns q . k."""
        code, channels = self._code, self._sides.channels
        lanes = _divisor(self._sides.d_k, LANES)
        type = vector(F32, lanes)
        total = code.variable(code.constant(type, 0.0))
        whole = None if channels else code.splat(exp(code, code.load(g, F32)), lanes)
        with code.loop(0, self._d_k, lanes) as d:
            at = d * 4
            keys, queries = code.load(k + at, type), code.load(q + at, type)
            decay = whole or exp(code, code.load(g + at, type))
            if channels:
                code.store(decay, self._decays + at)
            code.store(keys * decay, self._keys + at)
            code.store(queries * decay, self._queries + at)
            total.set(code.fma(keys, queries, total.value))
        return code.sum(total.value)

    def _read(self, S: Place) -> tuple[list[Value], list[Value]]:
        """w and r."""
        code = self._code
        n_rows = _divisor(self._sides.d_k, max(CHAINS // (2 * self._n_vectors), 1))
        zero = code.constant(self._type, 0.0)
        w, r = (
            [[code.variable(zero) for _ in range(self._n_vectors)] for _ in range(n_rows)]
            for _ in range(2)
        )
        with code.loop(0, self._d_k, n_rows) as first:
            for i in range(n_rows):
                d = first + i
                k, q = self._number(self._keys, d), self._number(self._queries, d)
                for n, S_n in enumerate(self.load(S.start + d * S.row)):
                    w[i][n].set(code.fma(S_n, k, w[i][n].value))
                    r[i][n].set(code.fma(S_n, q, r[i][n].value))
        return _added(w), _added(r)

    def _number(self, row: Value, d: Value) -> Value:
        """Number d of a row, for every column."""
        return self._spread(self._code.load(row + d * 4, F32))

    def _spread(self, value: Value) -> Value:
        return self._code.splat(value, self._lanes)


def _added(sums: Sequence[Sequence[Variable]]) -> list[Value]:
    """The sum of several rows of sums, in pairs of halves."""
    rows = [[x.value for x in row] for row in sums]
    while len(rows) > 1:
        half = len(rows) // 2
        pairs = zip(rows[:half], rows[half:], strict=True)
        rows = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
    return rows[0]
