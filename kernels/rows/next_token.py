"""The step between two recorded passes of one token: the results of a pass are kept, and the token
of its largest logit becomes the next one's, without the host."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import numpy as np
import torch

from kernels.llvm import Code, Program, Value
from kernels.llvm.program import LaunchTable
from kernels.llvm.values import I8, I32, I64

_MONOTONIC = 1
_INFINITE = 0x7F800000
"""Bits of the exponent of what is not finite."""


TokenPlace = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Where a pass of one token finds it: token, position and cell, int64 of one number each, and
which cells it sees, bool [n_cells]."""


def decode_on(
    table: LaunchTable,
    outputs: Sequence[torch.Tensor],
    place: TokenPlace,
    n: int,
    ends: Collection[int],
) -> tuple[list[tuple[torch.Tensor, ...]], list[float]]:
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
