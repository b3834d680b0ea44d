"""The record of rows of logits: all that a round wants to know of each one, in one small matrix,
so that it comes to the host in one copy. The host decides nothing, so it can be part of a recorded
pass (engine.machine.graphs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kernels.dispatch import operation, runs_triton, torch_version
from kernels.llvm import F32, F32X16, Code, Value, kernel
from kernels.llvm.functions import LANES, rows, run, start, vectors
from kernels.llvm.values import I16, I32, I64
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
    found = logits - largest
    torch.from_numpy(found).clamp_min_(LEAST).exp_()
    return found


def row_record(logits: torch.Tensor, k: int, asked: torch.Tensor) -> torch.Tensor:
    """The parts of a RowRecord side by side, those of f32 by their bits: int32 [n, 2 k + 6].

    logits: f32 [n, n_vocab], n_vocab >= k. asked: int64 [n].
    """
    if runs_triton(logits):
        from kernels.rows import with_triton

        if k <= with_triton.MOST_TOP:
            return with_triton.row_record(logits, k, asked)
    return _record(logits, k, asked)


@operation(llvm=__name__)
def _record(logits: torch.Tensor, k: int, asked: torch.Tensor) -> torch.Tensor:
    top, ids = top_k(logits, k)
    sums, asked = softmax_sums(logits, top[:, 0]), asked.unsqueeze(1)
    own, n_larger = larger_than(logits, asked)
    parts = [ids, top, sums, argmax(logits).unsqueeze(1), asked, n_larger, own]
    as_int = [x.view(torch.int32) if x.is_floating_point() else x.int() for x in parts]
    return torch.cat(as_int, 1)


def _record_with_llvm(logits: torch.Tensor, k: int, asked: torch.Tensor) -> torch.Tensor:
    if k > MOST_TOP:
        return torch_version(_record)(logits, k, asked)
    d, asked = logits.shape[1], asked.contiguous()
    record = logits.new_empty(len(logits), 2 * k + 2 + _ASKED, dtype=torch.int32)
    logits, places = rows(logits)
    run(_program(d, k), len(record), d, *places, asked.data_ptr(), record.data_ptr())
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
def tokens_after(tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The token after each of these flat rows of a batch, of the last one the first: int64 [n].
    tokens: int64, contiguous; rows: int64 [n]."""
    return tokens.flatten().roll(-1)[rows]


def tokens_after_with_llvm(tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """See tokens_after."""
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


def larger_than(logits: torch.Tensor, asked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
