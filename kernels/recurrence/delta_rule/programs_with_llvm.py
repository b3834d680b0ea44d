"""The programs of the gated delta rule on a processor; a task is some columns of one state.

Where a tensor is asked for, a program takes four arguments: its address and three strides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kernels.llvm import Code, Program, Value
from kernels.llvm.values import I64
from kernels.recurrence.delta_rule.block_with_llvm import Block, Place, Sides


class _Tensor(NamedTuple):
    """A tensor of 4-byte numbers as a program sees it; steps: its first three strides, in bytes."""

    address: Value
    steps: Sequence[Value]

    def row(self, b: Value, t: Value, head: Value) -> Value:
        """Address of a row [d] of a tensor [B, T, H, d]."""
        return self.address + b * self.steps[0] + t * self.steps[1] + head * self.steps[2]

    def place(self, b: Value, head: Value, column: Value) -> Place:
        """The block that begins at a column, in bytes, of a tensor [B, H, d_k, d_v]."""
        start = self.address + b * self.steps[0] + head * self.steps[1]
        return Place(start + column, self.steps[2])


def _tensors(args: Sequence[Value], count: int) -> Iterator[_Tensor]:
    """The first `count` tensors among a program's arguments."""
    for i in range(0, 4 * count, 4):
        yield _Tensor(args[i], [step * 4 for step in args[i + 1 : i + 4]])


class _Heads(NamedTuple):
    """Which sequence, head and columns a task is for."""

    sides: Sides
    grouped: bool
    n_heads: Value
    n_k_heads: Value

    def of(self, task: Value) -> tuple[Value, Value, Value, Value]:
        """Sequence, value head, key head, and the bytes in front of the first column."""
        n_blocks = self.sides.d_v // self.sides.width
        head = task // n_blocks
        b, j = head // self.n_heads, head % self.n_heads
        i = j // (self.n_heads // self.n_k_heads) if self.grouped else j % self.n_k_heads
        return b, j, i, (task % n_blocks) * (4 * self.sides.width)


class _Kept(NamedTuple):
    """slot: the place of the state so many tokens before the last one; n_slots: of them. is_large:
    whether they would only push other things out of the caches."""

    slot: Callable[[Value], Place]
    n_slots: Value
    is_large: Value


@functools.cache
def recurrence(sides: Sides, grouped: bool, log: bool) -> Program:
    """All tokens through the states.

    Arguments: q, k, v, g, beta, the state; the addresses of the slots, newest first, as a table
    with the strides that all of them have; o and, for the log, u [B, T, H_v, d_v], contiguous;
    n_slots, n_tokens, n_heads, n_k_heads; whether new states go past the caches. A log makes no
    last state and needs no slots.
    """
    return Program(functools.partial(_recurrence, sides, grouped, log), 35)


def _recurrence(
    sides: Sides,
    grouped: bool,
    log: bool,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    *inputs, state, slots = _tensors(args, 7)
    o, u_log, n_slots, n_tokens, n_heads, n_k_heads, is_large = args[28:]
    heads, block = _Heads(sides, grouped, n_heads, n_k_heads), Block(code, sides)
    with code.loop(first, last) as task:
        b, j, _, column = heads.of(task)

        def slot(back: Value) -> Place:
            address = code.load(slots.address + back * 8, I64)
            return slots._replace(address=address).place(b, j, column)

        start = state.place(b, j, column)
        kept = None if log else _Kept(slot, n_slots, is_large)
        _tokens(code, block, heads, task, inputs, n_tokens, start, o, u_log, kept)


@functools.cache
def slots(sides: Sides, grouped: bool) -> Program:
    """All tokens through states in rows of one pool, which numbers in memory choose.

    Arguments: q, k, v, g, beta; the pool [n_rows, H_v, d_k, d_v]; the numbers of the rows to read
    [B] and to write [B, n], newest first, contiguous; o; n, n_tokens, n_heads, n_k_heads; whether
    new states go past the caches.
    """
    return Program(functools.partial(_slots, sides, grouped), 32)


def _slots(
    sides: Sides, grouped: bool, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    *inputs, pool = _tensors(args, 6)
    read, write, o, n_slots, n_tokens, n_heads, n_k_heads, is_large = args[24:]
    heads, block = _Heads(sides, grouped, n_heads, n_k_heads), Block(code, sides)
    with code.loop(first, last) as task:
        b, j, _, column = heads.of(task)

        def row(number: Value) -> Place:
            return pool.place(code.load(number, I64), j, column)

        def slot(back: Value) -> Place:
            return row(write + (b * n_slots + back) * 8)

        kept = _Kept(slot, n_slots, is_large)
        _tokens(code, block, heads, task, inputs, n_tokens, row(read + b * 8), o, None, kept)


def _tokens(
    code: Code,
    block: Block,
    heads: _Heads,
    task: Value,
    inputs: Sequence[_Tensor],
    n_tokens: Value,
    start: Place,
    o: Value,
    u_log: Value | None,
    kept: _Kept | None,
) -> None:
    """A task's tokens from the state at `start`. u_log: where u is logged, if it is. kept: None if
    not even the last state is made."""
    q, k, v, g, beta = inputs
    b, j, i, column = heads.of(task)
    nothing = code.integer(0)
    with code.loop(0, n_tokens) as t:
        S = block.place_if(t.less(1), start)
        key, gate = k.row(b, t, i), g.row(b, t, j)
        value, strength = v.row(b, t, j) + column, beta.row(b, t, j)
        outputs, u = block.token(S, q.row(b, t, i), key, value, gate, strength)
        written = ((b * n_tokens + t) * heads.n_heads + j) * (4 * heads.sides.d_v) + column
        block.store(outputs, o + written)
        back = n_tokens - t - 1
        if kept is None:
            assert u_log is not None  # a log is what is left of the tokens
            block.store(u, u_log + written)
            with code.when(nothing.less(back)):
                block.write(S, key, gate, u, block.own)
        else:
            in_place = back.less(1) & kept.is_large.less(1)
            block.write(S, key, gate, u, block.place_if(in_place, kept.slot(nothing)))
            with code.when(back.less(kept.n_slots)):
                with code.when(nothing.less(back) & kept.is_large.less(1)):
                    block.copy(block.own, kept.slot(back))
                with code.when(nothing.less(kept.is_large)):
                    block.copy_past_caches(block.own, kept.slot(back))


@functools.cache
def fold(sides: Sides, grouped: bool, counted: bool) -> Program:
    """The second pass over the tokens of a log.

    Arguments: the state, k, u, g, the state to fill; n_tokens, or the address of one for every
    sequence if they are counted; n_heads, n_k_heads.
    """
    return Program(functools.partial(_fold, sides, grouped, counted), 23)


def _fold(
    sides: Sides,
    grouped: bool,
    counted: bool,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    state, k, u, g, out = _tensors(args, 5)
    n_tokens, n_heads, n_k_heads = args[20:]
    heads, block = _Heads(sides, grouped, n_heads, n_k_heads), Block(code, sides)
    with code.loop(first, last) as task:
        b, j, i, column = heads.of(task)
        before, after = state.place(b, j, column), out.place(b, j, column)
        count = code.load(n_tokens + b * 8, I64) if counted else n_tokens
        with code.when(count.less(1)):
            block.copy(before, after)
        with code.loop(0, count) as t:
            S = block.place_if(t.less(1), before)
            target = block.place_if((count - 2).less(t), after)
            u_t, gate = block.load(u.row(b, t, j) + column), g.row(b, t, j)
            block.decay(gate)
            block.write(S, k.row(b, t, i), gate, u_t, target)
