"""State-space duality on a CPU: the recurrence at every length.

A row of a state takes three operations a number, with what a token brings in the nearest cache:
chunks would need more of them, in products too small for what surrounds them.

Rows [N] do not mix in the recurrence. A task takes its rows through all tokens, reading and
writing them once per token:

    s <- e^g s + (dt x_p) B,   o_p = s . C + D x_p

Every token goes through the same operations in the same order, so its bits do not depend on how
tokens and sequences are portioned, and a log folds to the very states. Where a tensor is asked for,
a program takes its address and three strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.llvm import F32, F32X16, Code, Value, kernel
from kernels.llvm.functions import (
    StatePlace,
    StateSlots,
    StridedTensor,
    addresses,
    divisor,
    exp,
    slot_rows,
    slot_table,
    strided_tensors,
    vectors,
)
from kernels.llvm.functions import rows_together as _rows
from kernels.llvm.functions import strided as _where
from kernels.recurrence import UpdateLog
from kernels.recurrence.ssd.naive import SsdArguments, SsdInputs, SsdSlotArguments

# rows of a task, and those that share what is read of B and C
ROWS, TOGETHER = 16, 4


class SsdSides(NamedTuple):
    """The sides of a state [P, N]."""

    p: int
    n: int

    @property
    def rows(self) -> int:
        """Rows of a task."""
        return divisor(self.p, ROWS)


def _written(code: Code, numbers: Value, step: Value, log: Value | None, p: Value) -> Value:
    """What row p is written with: a number at an address, times `step`; it goes to `log` too."""
    u = code.load(numbers + p * 4, F32) * step
    if log is not None:
        code.store(u, log + p * 4)
    return u


def _give(code: Code, x: Value, skip: Value, o: Value, p: Value, total: Value) -> None:
    """o_p = total + skip * x_p. x, o: addresses."""
    code.store(code.fma(code.load(x + p * 4, F32), skip, total), o + p * 4)


class _Rows:
    """Writes the operations on a task's rows into `code`."""

    def __init__(self, code: Code, sides: SsdSides) -> None:
        self._code, self._sides = code, sides
        self.own = StatePlace(code.stack(4 * sides.n * sides.rows), code.integer(4 * sides.n))
        start, row = (code.variable(part) for part in self.own)
        self._now = start, row

    def begin(self, place: StatePlace) -> None:
        """The rows are read from there first."""
        for variable, value in zip(self._now, place, strict=True):
            variable.set(value)

    def place_if(self, condition: Value, place: StatePlace) -> StatePlace:
        """`place` if the condition holds, else the task's own memory on the stack."""
        choose = self._code.choose
        return StatePlace(*(choose(condition, a, b) for a, b in zip(place, self.own, strict=True)))

    def token(
        self,
        g: Value,
        written: Callable[[Value], Value],
        B: Value,
        C: Value,
        target: StatePlace,
        give: Callable[[Value, Value], None],
    ) -> None:
        """One token, from where the rows are to `target`. g, B, C: addresses. written: what a row
        is written with; give: takes a row and its s . C."""
        code, n_rows = self._code, self._sides.rows
        together = divisor(n_rows, TOGETHER)
        decay = code.splat(exp(code, code.load(g, F32)))
        source = StatePlace(*(variable.value for variable in self._now))
        with code.loop(0, code.integer(n_rows), together) as first:
            rows = [first + i for i in range(together)]
            u = [code.splat(written(p)) for p in rows]
            totals = [code.variable(code.constant(F32X16, 0.0)) for _ in rows]
            for at, count in vectors(code, self._sides.n):
                b = code.load_first(B + at, F32X16, count)
                c = code.load_first(C + at, F32X16, count)
                for p, u_p, total in zip(rows, u, totals, strict=True):
                    s = code.load_first(source.start + p * source.row + at, F32X16, count)
                    s = code.fma(b, u_p, s * decay)
                    code.store_first(s, target.start + p * target.row + at, count)
                    total.set(code.fma(s, c, total.value))
            for p, total in zip(rows, totals, strict=True):
                give(p, code.sum(total.value))
        self.begin(target)


class _Task(NamedTuple):
    """Which sequence, head, group and first row a task is for."""

    b: Value
    head: Value
    group: Value
    first: Value

    @classmethod
    def of(cls, task: Value, sides: SsdSides, n_heads: Value, n_groups: Value) -> _Task:
        n_parts = sides.p // sides.rows
        head = task // n_parts
        b, h = head // n_heads, head % n_heads
        return cls(b, h, h // (n_heads // n_groups), task % n_parts * sides.rows)

    def place(self, state: StridedTensor) -> StatePlace:
        """Its rows of a state."""
        return state.place(self.head, self.first * state.steps[1])


@kernel(36)
def _program(
    code: Code, args: Sequence[Value], task: Value, sides: SsdSides, indexed: bool, log: bool
) -> None:
    """All tokens through the states.

    Arguments: x, dt, g, B, C and the states, tensors; the address of D; o and, for the log, u
    [B, T, H, P], contiguous; n_slots, n_tokens, n_heads, n_groups; then where states go: the
    arguments of StateSlots.
    """
    x, dt, g, B, C, state = strided_tensors(args, 6)
    D, o, u_log, n_slots, n_tokens, n_heads, n_groups, *where = args[24:]
    rows = _Rows(code, sides)
    mine = _Task.of(task, sides, n_heads, n_groups)
    b, h = mine.b, mine.head
    states = StateSlots(code, state, where, b, indexed)
    rows.begin(mine.place(states.begin))
    skip = code.load(D + h * 4, F32)
    with code.loop(0, n_tokens) as t:
        at = (((b * n_tokens + t) * n_heads + h) * sides.p + mine.first) * 4
        values, step = x.row(b, t, h) + mine.first * 4, code.load(dt.row(b, t, h), F32)
        written = partial(_written, code, values, step, u_log + at if log else None)
        target = rows.own
        if not log:
            back = n_tokens - t - 1
            slot = states.slot(code.smaller(back, n_slots - 1))
            target = rows.place_if(back.less(n_slots), mine.place(slot))
        give = partial(_give, code, values, skip, o + at)
        B_row, C_row = (side.row(b, t, mine.group) for side in (B, C))
        rows.token(g.row(b, t, h), written, B_row, C_row, target, give)


# numbers of a state times tokens that are worth a second thread
GRAIN = 32768


def ssd(*inputs: *SsdArguments, n_snapshots: int = 1) -> tuple[Tensor, Tensor]:
    kept = torch.empty(min(inputs[0].shape[1], n_snapshots), *inputs[6].shape)
    return ssd_into(*inputs, slots=kept.unbind(0)), kept.transpose(0, 1)


def ssd_into(*inputs: *SsdArguments, slots: Sequence[Tensor]) -> Tensor:
    """See kernels.recurrence.ssd.ssd_into; always invariant, as every token goes through the same
    operations, whatever other tokens there are."""
    where, table = slot_table(slots)
    return _run(inputs[:6], _rows(inputs[6]), len(slots), where, indexed=False, holds=table)


def ssd_slots(*inputs: *SsdSlotArguments) -> Tensor:
    pool, read, write = inputs[6:]
    where = slot_rows(pool, read, write)
    return _run(inputs[:6], pool, write.shape[1], where, indexed=True)


def ssd_log(*inputs: *SsdArguments) -> tuple[Tensor, UpdateLog]:
    x, _, g, B, *_ = inputs
    u = torch.empty(x.shape)
    o = _run(inputs[:6], _rows(inputs[6]), 0, (0, 0, 0, 0, 0), indexed=False, u=u)
    return o, UpdateLog(u, B, g)


def _run(
    inputs: SsdInputs,
    states: Tensor,
    n_slots: int,
    where: tuple[int, ...],
    *,
    indexed: bool,
    u: Tensor | None = None,
    holds: object = None,
) -> Tensor:
    """where: the last arguments of the program; holds: what they point to, tensors apart. u: memory
    for the rows of the log, if any."""
    x, dt, g, B, C, D = inputs
    x, B, C, D = _rows(x), _rows(B), _rows(C), D.contiguous()
    n_batch, n_tokens, n_heads, p = x.shape
    sides = SsdSides(p, B.shape[3])
    o = torch.empty(x.shape)
    _program(sides, indexed, u is not None)(
        *_where(x, dt, g, B, C, states),
        *addresses(D, o),
        0 if u is None else u.data_ptr(),
        n_slots,
        n_tokens,
        n_heads,
        B.shape[2],
        *where,
        tasks=n_batch * n_heads * (p // sides.rows),
        chunk=_chunk(sides, n_tokens),
        threads=torch.get_num_threads(),
        holds=holds,
    )
    return o


def _chunk(sides: SsdSides, n_tokens: int) -> int:
    """Tasks that a thread takes at a time."""
    return -(-GRAIN // (max(n_tokens, 1) * sides.n * sides.rows))
