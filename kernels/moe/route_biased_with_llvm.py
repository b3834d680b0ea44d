"""The router with a bias on a processor: scores, groups, the largest sums in one pass of code."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.llvm import F32, F32X16, Code, Program, Value
from kernels.llvm.functions import sigmoid
from kernels.llvm.rows import LANES, rows, run, start, vectors
from kernels.moe.route_with_llvm import filled, largest_of, softmax
from kernels.moe.routing import Choice
from kernels.moe.with_torch import MIN_SUM

# less than any sum: what is chosen already, what may not be, and what fills up the last vector
_GONE = float("-inf")


def route_biased(
    logits: torch.Tensor, bias: torch.Tensor | None, choice: Choice
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.moe.route_biased."""
    n_rows, n_experts = logits.shape
    weights = torch.empty(n_rows, choice.n_used)
    ids = torch.empty(n_rows, choice.n_used, dtype=torch.int64)
    logits, places = rows(logits)
    bias = None if bias is None else bias.contiguous()
    run(
        _program(n_experts, bias is not None, choice),
        n_rows,
        n_experts * choice.n_used,
        *places,
        0 if bias is None else bias.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
    )
    return weights, ids


@functools.cache
def _program(n_experts: int, biased: bool, choice: Choice) -> Program:
    return Program(functools.partial(_body, n_experts, biased, choice), 7)


def _body(
    n: int,
    biased: bool,
    choice: Choice,
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    """Arguments: logits in RowPlaces, the bias if there is one, weights, ids."""
    bias, weights, ids = args[4:]
    whole = -(-n // LANES) * LANES
    scores, sums = code.stack(4 * whole), code.stack(4 * whole)
    with code.loop(first, last) as row:
        logits = start(args[:4], row)
        if choice.scores == "softmax":
            softmax(code, n, logits, scores)
        for at, count in vectors(code, n):
            if choice.scores == "sigmoid":
                score = sigmoid(code, code.load_first(logits + at, F32X16, count))
                code.store(score, scores + at)
            total = code.load(scores + at, F32X16)
            if biased:
                total += code.load_first(bias + at, F32X16, count)
            code.store(filled(code, total, count, _GONE), sums + at)
        if choice.n_groups > 1:
            _leave_groups_out(code, n // choice.n_groups, choice, sums)
        all_ = code.variable(code.constant(F32, 0.0))
        with code.loop(0, code.integer(choice.n_used)) as i:
            _, index = largest_of(code, whole, sums, _GONE)
            code.store(code.constant(F32, _GONE), sums + index * 4)
            score, at = code.load(scores + index * 4, F32), row * choice.n_used + i
            code.store(score, weights + at * 4)
            code.store(index, ids + at * 8)
            all_.set(all_.value + score)
        least = code.constant(F32, MIN_SUM)
        divisor = code.choose(all_.value.less(least), least, all_.value)
        with code.loop(0, code.integer(choice.n_used)) as i:
            at = weights + (row * choice.n_used + i) * 4
            weight = code.load(at, F32)
            if choice.normalised:
                weight = weight / divisor
            code.store(weight * choice.scale, at)


def _leave_groups_out(code: Code, size: int, choice: Choice, sums: Value) -> None:
    """The sums of all groups but those with the largest two become less than any."""
    gone, n_groups = code.constant(F32, _GONE), code.integer(choice.n_groups)
    padded = -(-choice.n_groups // LANES) * LANES
    best_two = code.stack(4 * padded)
    for at in range(0, 4 * padded, 4 * LANES):
        code.store(code.constant(F32X16, _GONE), best_two + at)
    with code.loop(0, n_groups) as group:
        best, second = code.variable(gone), code.variable(gone)
        with code.loop(0, code.integer(size)) as i:
            value = code.load(sums + (group * size + i) * 4, F32)
            second.set(code.larger(second.value, code.smaller(value, best.value)))
            best.set(code.larger(best.value, value))
        # of one expert the second is none
        both = best.value + second.value if size > 1 else best.value
        code.store(both, best_two + group * 4)
    # those that stay are taken out, the others are left
    with code.loop(0, code.integer(choice.n_groups_used)):
        _, index = largest_of(code, padded, best_two, _GONE)
        code.store(gone, best_two + index * 4)
    with code.loop(0, n_groups) as group:
        is_left = gone.less(code.load(best_two + group * 4, F32))
        with code.when(is_left), code.loop(0, code.integer(size)) as i:
            code.store(gone, sums + (group * size + i) * 4)
