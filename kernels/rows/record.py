"""Record of rows of logits: all that a round wants to know of each one, in one small matrix,
so that it comes to the host in one copy. The host decides nothing, so it can be part of a recorded
pass (engine.machine.graphs). So is the step between two passes of one token: the results of a pass
are kept, and the token of its largest logit becomes the next one's.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import COUNTERS, operation, runs_triton, torch_version
from kernels.llvm import F32, F32X16, Code, Program, Value, kernel
from kernels.llvm.functions import LANES, run, start, vectors
from kernels.llvm.program import LaunchTable
from kernels.llvm.values import I8, I16, I32, I64
from kernels.rows.reductions import (
    LEAST,
    MOST_TOP,
    argmax,
    largest_of_row,
    softmax_sums,
    sums_of_row,
    top_k,
)

_ASKED = 4
"""Numbers of a row about the token that was asked about, the largest among them."""


class RowRecord(NamedTuple):
    """What is known of n rows, on the host.

    ids int32, values (logits) f32 [n, k]: of the largest, the largest first. sums f32 [n, 2]: see
    softmax_sums. best, int32 [n]: the lowest index of the largest logit; asked, int32 [n]: the
    token asked about; n_larger, int32 [n]: how many logits are larger than its own; own f32 [n]:
    that logit.
    """

    ids: np.ndarray
    values: np.ndarray
    sums: np.ndarray
    best: np.ndarray
    asked: np.ndarray
    n_larger: np.ndarray
    own: np.ndarray


def weights(logits: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """e to the power of the distance of logits from the largest of their rows, f32."""
    # a banned or infinitely unlikely token stays finite and adds nothing
    found = np.maximum(logits - largest, LEAST)
    torch.from_numpy(found).exp_()
    return found


def row_record(logits: Tensor, k: int, asked: Tensor) -> Tensor:
    """The parts of a RowRecord side by side, those of f32 by their bits: int32 [n, 2 k + 6].

    logits: f32 [n, n_vocab], n_vocab >= k. asked: int64 [n].
    """
    if runs_triton(logits):
        from kernels.rows import with_triton

        if k <= with_triton.MOST_TOP and len(logits) <= COUNTERS:
            return with_triton.row_record(logits, k, asked)
    return _record(logits, k, asked)


@operation(llvm=__name__)
def _record(logits: Tensor, k: int, asked: Tensor) -> Tensor:
    top, ids = top_k(logits, k)
    sums, asked = softmax_sums(logits, top[:, 0]), asked.unsqueeze(1)
    own, n_larger = larger_than(logits, asked)
    parts = [ids, top, sums, argmax(logits).unsqueeze(1), asked, n_larger, own]
    as_int = [x.view(torch.int32) if x.is_floating_point() else x.int() for x in parts]
    return torch.cat(as_int, 1)


def _record_with_llvm(logits: Tensor, k: int, asked: Tensor) -> Tensor:
    if k > MOST_TOP:
        return torch_version(_record)(logits, k, asked)
    n, d = logits.shape
    record = logits.new_empty(n, 2 * k + 2 + _ASKED, dtype=torch.int32)
    run(_program(d, k), n, d, (logits,), asked, record)
    return record


@kernel(6)
def _program(code: Code, args: Sequence[Value], row: Value, d: int, k: int) -> None:
    """Arguments: logits in RowPlaces, the tokens asked about, the record."""
    *x, asked, record = args
    source, at = start(x, row), record + row * 4 * (2 * k + 2 + _ASKED)
    for i, places in enumerate(largest_of_row(code, source, d, k)):
        code.store_first(places, at + 4 * LANES * i, min(LANES, k - LANES * i))
    with code.loop(0, code.integer(k)) as nth:
        place = code.load(at + nth * 4, I32).resize(I64)
        code.store(code.load(source + place * 4, F32), at + (nth + k) * 4)
    best, rest = code.load(at, I32), at + 4 * 2 * k
    sums_of_row(code, source, d, code.load(at + 4 * k, F32), rest)
    token = code.load(asked + row * 8, I64)
    own = code.load(source + token * 4, F32)
    n_larger = code.variable(code.constant(I32, 0))
    for place, count in vectors(code, d):
        larger = code.splat(own).less(code.load_first(source + place, F32X16, count))
        if count < LANES:
            there = [int(lane < count) for lane in range(LANES)]
            larger = larger & code.constants(larger.type, there)
        bits = larger.bits(I16)
        n_larger.set(n_larger.value + code.call("llvm.ctpop.i16", I16, bits).resize(I32))
    for i, value in enumerate((best, token.resize(I32), n_larger.value, own)):
        code.store(value, rest + 8 + 4 * i)


@operation(llvm=__name__, any_type=True)
def tokens_after(tokens: Tensor, rows: Tensor) -> Tensor:
    """The token after each of these flat rows of a batch, of the last one the first: int64 [n].
    tokens: int64, contiguous; rows: int64 [n]."""
    return tokens.flatten().roll(-1)[rows]


def tokens_after_with_llvm(tokens: Tensor, rows: Tensor) -> Tensor:
    found, rows = torch.empty_like(rows), rows.contiguous()
    places = tokens.data_ptr(), tokens.numel(), rows.data_ptr(), found.data_ptr()
    _after().alone(len(rows), *places)
    return found


@kernel(4)
def _after(code: Code, args: Sequence[Value], i: Value) -> None:
    """Arguments: the tokens, how many, the rows, the tokens found."""
    tokens, n, rows, found = args
    place = (code.load(rows + i * 8, I64) + 1) % n
    code.store(code.load(tokens + place * 8, I64), found + i * 8)


def larger_than(logits: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """The logit of each row's token, and how many of the row [n, n_vocab] are larger; both [n, 1].
    asked: int64 [n, 1]."""
    own = logits.gather(1, asked)
    return own, (logits > own).sum(1, keepdim=True)


def on_host(record: np.ndarray) -> RowRecord:
    """The values of `row_record`, or some of its rows."""
    floats, k = record.view(np.float32), (record.shape[1] - 2 - _ASKED) // 2
    best, asked, n_larger = record[:, -_ASKED:-1].T
    values, sums = floats[:, k : 2 * k], floats[:, 2 * k : 2 * k + 2]
    return RowRecord(record[:, :k], values, sums, best, asked, n_larger, floats[:, -1])


_MONOTONIC = 1
_INFINITE = 0x7F800000
"""Bits of the exponent of what is not finite."""


TokenPlace = tuple[Tensor, Tensor, Tensor, Tensor]
"""Where a pass of one token finds it: token, position and cell, int64 of one number each, and
which cells it sees, bool [n_cells]."""


def decode_on(
    table: LaunchTable, outputs: Sequence[Tensor], place: TokenPlace, n: int, ends: Collection[int]
) -> tuple[list[tuple[Tensor, ...]], list[float]]:
    """Up to n passes, of `place` and of what they choose; what each computed, copied, and when it
    had, in seconds of perf_counter.

    table: the pass. outputs: what it writes, the record (kernels.rows.record) of one row last.
    ends: a pass that chooses one of these tokens, or whose largest logit is not finite, is the last
    one. Cells after `place` are free, and seen when decoded.
    """
    n_top = (outputs[-1].shape[-1] - 6) // 2
    kept = [x.new_empty(n, *x.shape) for x in outputs]
    state, times = np.zeros(2, np.int64), np.zeros((n, 2), np.int64)
    last = np.array([n, *sorted(ends)], np.int64)
    copies = [
        number
        for x, copy in zip(outputs, kept, strict=True)
        for number in (x.data_ptr(), copy.data_ptr(), x.nbytes)
    ]
    places = [x.data_ptr() for x in place]
    arrays = [last.ctypes.data, len(last), state.ctypes.data, times.ctypes.data]
    table.run_on(_step(len(outputs), n_top), [*copies, *places, *arrays], state)
    found = list(zip(*(copy[: state[0]].unbind(0) for copy in kept), strict=True))
    return found, (times[: state[0]] @ [1.0, 1e-9]).tolist()


@functools.cache
def _step(n_outputs: int, n_top: int) -> Program:
    return Program(functools.partial(_body, n_outputs, n_top), 3 * n_outputs + 8)


def _body(
    n_outputs: int, n_top: int, code: Code, args: Sequence[Value], first: Value, stop: Value
) -> None:
    """Arguments: source, target and bytes of each output; a TokenPlace; most passes and the tokens
    that end them, how many numbers these are; passes done and whether it was the last; times."""
    copies, (token, position, cell, seen, last, n_last, state, times) = (
        args[: 3 * n_outputs],
        args[3 * n_outputs :],
    )
    i = code.load(state, I64)
    code.call("clock_gettime", I32, code.constant(I32, _MONOTONIC), times + i * 16)
    for at in range(0, len(copies), 3):
        source, target, n_bytes = copies[at : at + 3]
        code.copy(target + i * n_bytes, source, n_bytes)
    record = copies[-3]
    best = code.load(record + 4 * (2 * n_top + 2), I32).resize(I64)
    exponent = code.load(record + 4 * n_top, I32) & _INFINITE
    done = i + 1
    is_last = done.equal(code.load(last, I64)) | exponent.equal(_INFINITE)
    ended = code.variable(is_last)
    with code.loop(1, n_last) as end:
        ended.set(ended.value | best.equal(code.load(last + end * 8, I64)))
    code.store(done, state)
    code.store(ended.value.resize(I64), state + 8)
    with code.when(ended.value.equal(0)):
        code.store(best, token)
        for place in (position, cell):
            code.store(code.load(place, I64) + 1, place)
        code.store(code.constant(I8, 1), seen + code.load(cell, I64))
