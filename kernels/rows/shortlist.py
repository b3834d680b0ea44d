"""The places of the largest values of long rows, found without the host: candidates of a draft."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.dispatch import operation
from kernels.llvm import F32, F32X16, Code, Program, Value
from kernels.llvm.code import Variable
from kernels.llvm.functions import LANES, run
from kernels.llvm.values import I64


@operation(llvm=__name__)
def shortlist(x: torch.Tensor, k: int) -> torch.Tensor:
    """The places of the k largest values of every row, the largest first; of equal ones the lowest
    index comes first.

    x: f32 [..., n] of numbers, contiguous, 1 <= k <= n. Returns int64 [..., k], always within the
    row. Where a NaN or -inf is among the values, indices may come twice.
    """
    # topk promises no order among equal values
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def shortlist_naive(x: torch.Tensor, k: int) -> torch.Tensor:
    """The largest values by sorting everything."""
    order = [_largest_first(row)[:k] for row in x.reshape(-1, x.shape[-1]).tolist()]
    return torch.tensor(order, device=x.device).view(*x.shape[:-1], k)


def _largest_first(row: Sequence[float]) -> list[int]:
    # a stable sort: of equal values the lowest index comes first
    return sorted(range(len(row)), key=lambda i: -row[i])


STRETCH = 128
_NONE = -float("inf")


def shortlist_with_llvm(x: torch.Tensor, k: int) -> torch.Tensor:
    """The largest values on a CPU, as a tournament of stretches.

    One program finds the largest value of every stretch of a row. Another takes the best stretch k
    times: it looks up where that value is, and which is the next one of this stretch.
    """
    n, found = x.shape[-1], x.new_empty((*x.shape[:-1], k), dtype=torch.int64)
    n_rows, width = found.numel() // k, _width(n)
    best = x.new_empty(n_rows * width)
    nexts = x.new_empty(n_rows * width, dtype=torch.int64)
    places = x.data_ptr(), best.data_ptr(), nexts.data_ptr()
    run(_stretches(n), n_rows * width, STRETCH, *places)
    run(_tournament(n, k), n_rows, 1, *places, found.data_ptr())
    return found


def _width(n: int) -> int:
    """Stretches of a row, filled up to whole vectors with empty ones."""
    return -(-n // (STRETCH * LANES)) * LANES


@functools.cache
def _stretches(n: int) -> Program:
    return Program(functools.partial(_largest_of_stretches, n), 3)


@functools.cache
def _tournament(n: int, k: int) -> Program:
    return Program(functools.partial(_take_largest, n, k), 4)


def _largest_of_stretches(
    n: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Arguments: x; the largest number of each stretch; where to look for it from."""
    with code.loop(first, last) as task:
        x = args[0] + task // _width(n) * (4 * n)
        start = task % _width(n) * STRETCH
        most = code.variable(code.constant(F32, _NONE))
        with code.loop(start, _end(code, start, n)) as i:
            most.set(code.larger(code.load(x + i * 4, F32), most.value))
        code.store(most.value, args[1] + task * 4)
        code.store(start, args[2] + task * 8)


def _take_largest(
    n: int, k: int, code: Code, args: Sequence[Value], first: Value, last: Value
) -> None:
    """Arguments: as above, then the indices found."""
    width, last_one = _width(n), code.integer(-(-n // STRETCH) - 1)
    with code.loop(first, last) as row:
        x, best, nexts = (
            args[i] + row * n_bytes for i, n_bytes in enumerate((4 * n, 4 * width, 8 * width))
        )
        with code.loop(0, code.integer(k)) as nth:
            most = code.variable(code.constant(F32X16, _NONE))
            with code.loop(0, code.integer(4 * width), 4 * LANES) as at:
                most.set(code.larger(code.load(best + at, F32X16), most.value))
            top = code.maximum(most.value)
            stretch = _find(code, best, code.integer(0), last_one, top).value
            start = stretch * STRETCH
            end = _end(code, start, n)
            place = _find(code, x, code.load(nexts + stretch * 8, I64), end - 1, top).value
            code.store(place, args[3] + (row * k + nth) * 8)
            # the next one: as large after it, or the largest that is smaller
            behind = _find(code, x, place + 1, end, top)
            code.store(behind.value, nexts + stretch * 8)
            with code.when(behind.value.equal(end)):
                lower = code.variable(code.constant(F32, _NONE))
                with code.loop(start, end) as i:
                    number = code.load(x + i * 4, F32)
                    with code.when(number.less(top)):
                        lower.set(code.larger(number, lower.value))
                code.store(lower.value, best + stretch * 4)
                code.store(start, nexts + stretch * 8)


def _end(code: Code, start: Value, n: int) -> Value:
    """The place after the last number of a stretch; for one that fills a vector up its start."""
    end = code.choose((start + STRETCH).less(n), start + STRETCH, code.integer(n))
    return code.choose(start.less(end), end, start)


def _find(code: Code, numbers: Value, start: Value, last: Value, wanted: Value) -> Variable:
    """The first place from `start` on with the wanted number, or `last` if none before it has."""
    place = code.variable(start)

    def is_another(place: Value) -> Value:
        # nothing after the last number is read
        here = code.choose(place.less(last), place, code.integer(0))
        number = code.load(numbers + here * 4, F32)
        return place.less(last) & (number.less(wanted) | wanted.less(number))

    with code.repeat(lambda: is_another(place.value)):
        place.set(place.value + 1)
    return place
