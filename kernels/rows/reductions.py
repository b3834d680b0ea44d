"""Reductions of long rows, such as logits: the largest values, the index of the largest, and the
divisor of a softmax with the sum for its entropy, without computing the softmax."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from llvmlite import ir
from torch import Tensor

from kernels.dispatch import operation, torch_version
from kernels.llvm import F32, F32X16, Code, Value, kernel, vector
from kernels.llvm.code import Variable
from kernels.llvm.functions import LANES, exp, run, start, vectors
from kernels.llvm.values import I16, I32, I32X16, I64


@operation(llvm=__name__)
def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of every row, largest first, and where they stand.

    x: [..., n], 1 <= k <= n; NaN counts as the largest. Returns values [..., k] and indices int64
    [..., k]. Of equal values any may come first, except that k = 1 gives the lowest index.
    """
    # the k largest values of a row lie in the k stretches with the largest maxima: PyTorch finds
    # maxima at the speed of memory, but sorts out the largest elements of a vocabulary seven times
    # slower than this
    n = x.shape[-1]
    n_stretches = n // STRETCH
    if n < (LONG_FOR_ONE if k == 1 else LONG) or 8 * k > n_stretches:
        return _largest(x, k)
    whole = x[..., : n_stretches * STRETCH].unflatten(-1, (n_stretches, STRETCH))
    best = _largest(whole.amax(-1), k)[1].unsqueeze(-1)
    candidates = whole.gather(-2, best.expand(*best.shape[:-1], STRETCH)).flatten(-2)
    ids = (best * STRETCH + torch.arange(STRETCH, device=x.device)).flatten(-2)
    start = n_stretches * STRETCH
    if start < n:
        rest = torch.arange(start, n, device=x.device)
        candidates = torch.cat((candidates, x[..., start:]), -1)
        ids = torch.cat((ids, rest.expand(*ids.shape[:-1], -1)), -1)
    values, where = _largest(candidates, k)
    return values, ids.gather(-1, where)


def top_k_naive(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The largest values by sorting everything. Of equal values the lowest index comes first."""
    values, ids = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


STRETCH = 128
# shorter rows are not worth the second step, those of which one is wanted even less
LONG, LONG_FOR_ONE = 32 * STRETCH, 160 * STRETCH


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    # only max promises the first of equal values
    values, ids = x.max(-1, keepdim=True) if k == 1 else torch.topk(x, k)
    return values, ids


MOST_TOP = 256
"""Values that are kept in their order while a row is read once."""
_NOTHING, _NAN = -(2**31), 2**31 - 1
"""Below and above every number as `_ordered` has them."""


def top_k_with_llvm(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The largest values on a CPU; of equal ones the lowest index comes first."""
    if k > MOST_TOP:
        return torch_version(top_k)(x, k)
    d, shape = x.shape[-1], (*x.shape[:-1], k)
    values, ids = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
    run(_top_program(d, k), values.numel() // k, d, (x,), values, ids)
    return values, ids


@kernel(6)
def _top_program(code: Code, args: Sequence[Value], row: Value, d: int, k: int) -> None:
    """Arguments: x in RowPlaces, the values, their places."""
    *x, values, ids = args
    source, at = start(x, row), row * k
    for i, places in enumerate(largest_of_row(code, source, d, k)):
        n = min(LANES, k - LANES * i)
        code.store_first(places.extended(I64), ids + (at + LANES * i) * 8, n)
    with code.loop(0, code.integer(k)) as nth:
        place = code.load(ids + (at + nth) * 8, I64)
        code.store(code.load(source + place * 4, F32), values + (at + nth) * 4)


def largest_of_row(code: Code, source: Value, d: int, k: int) -> list[Value]:
    """The places of the k largest of d numbers, int32 in vectors that are filled up with others:
    the largest first, of equal ones the lowest place."""
    n = -(-k // LANES)
    keys = [code.variable(code.constant(I32X16, _NOTHING)) for _ in range(n)]
    places = [code.variable(code.constant(I32X16, 0)) for _ in range(n)]
    least = code.variable(code.constant(I32, _NOTHING))
    for at, count in vectors(code, d):
        key = _ordered(code, code.load_first(source + at, F32X16, count))
        larger = code.splat(least.value).less(key)
        if count < LANES:
            there = [int(lane < count) for lane in range(LANES)]
            larger = larger & code.constants(vector(ir.IntType(1), LANES), there)
        found = code.variable(larger.bits(I16).resize(I32))
        with code.repeat(functools.partial(_has_more, code, found)):
            bits = found.value
            lane = code.call("llvm.cttz.i32", I32, bits, code.constant(ir.IntType(1), 0))
            found.set(bits & (bits - 1))
            own = _ordered(code, code.load(source + at + lane.resize(I64) * 4, F32))
            place = (at >> 2).resize(I32) + lane
            _insert(code, keys, places, code.splat(own), code.splat(place))
            least.set(code.sum(keys[-1].value.part((k - 1) % LANES, 1)))
    return [one.value for one in places]


def _has_more(code: Code, bits: Variable) -> Value:
    return code.constant(I32, 0).less(bits.value)


def _insert(
    code: Code, keys: Sequence[Variable], places: Sequence[Variable], key: Value, place: Value
) -> None:
    """Put a number in its place among the largest, after those it equals; the last one goes."""
    before_key, before_place = code.constant(I32X16, _NAN), code.constant(I32X16, 0)
    by_one = range(LANES - 1, 2 * LANES - 1)
    for of_key, of_place in zip(keys, places, strict=True):
        its_key, its_place = of_key.value, of_place.value
        left_key, left_place = (
            before_key.take(by_one, its_key),
            before_place.take(by_one, its_place),
        )
        goes, left_goes = its_key.less(key), left_key.less(key)
        of_key.set(code.choose(goes, code.choose(left_goes, left_key, key), its_key))
        of_place.set(code.choose(goes, code.choose(left_goes, left_place, place), its_place))
        before_key, before_place = its_key, its_place


def _ordered(code: Code, x: Value) -> Value:
    """Integers in the order of f32, zeros of either sign the same, NaN the largest."""
    type = vector(I32, x.type.count) if isinstance(x.type, ir.VectorType) else I32
    bits = (x + 0.0).bits(type)
    key = bits ^ (bits.down_signed(31) & (2**31 - 1))
    is_number = Value(code.builder, code.builder.fcmp_ordered("ord", x.ir, x.ir))
    return code.choose(is_number, key, code.constant(type, _NAN))


@operation(llvm=__name__)
def argmax(x: Tensor) -> Tensor:
    """The lowest index of the largest value of every row.

    x: f32 [..., d] of numbers or -inf, any strides. Returns int64 [...], always within the row.
    """
    # argmax promises no order among equal values, max does
    return x.max(-1).indices


def argmax_with_llvm(x: Tensor) -> Tensor:
    """The place that comes first of the largest value."""
    return top_k(x, 1)[1].squeeze(-1)


LEAST = -1e4
"""Numbers further below the largest count as this far below: finite, and e to the power of it is
0."""


@operation(llvm=__name__)
def softmax_sums(x: Tensor, largest: Tensor) -> Tensor:
    """The sums of e^s and of s e^s for every row, s = max(x - largest, LEAST).

    x: f32 [n, d]; largest: f32 [n]. Returns f32 [n, 2]; NaN where the row has one. A row has the
    same bits whatever the other rows are.
    """
    s = (x - largest.unsqueeze(1)).clamp_min_(LEAST)
    weights = s.exp()
    return torch.stack((weights.sum(1), torch.linalg.vecdot(weights, s)), 1)


def softmax_sums_naive(x: Tensor, largest: Tensor) -> Tensor:
    """The sums of a softmax in float64."""
    s = (x - largest.unsqueeze(1)).clamp_min(LEAST).double()
    return torch.stack((s.exp().sum(1), (s * s.exp()).sum(1)), 1).float()


# sums added up at a time: each addition waits for the one before
SUMS = 4


def softmax_sums_with_llvm(x: Tensor, largest: Tensor) -> Tensor:
    """The sums of a softmax on a CPU: each row read once, its sums added up in one order."""
    n, d = x.shape
    sums = x.new_empty(n, 2)
    run(_sums_program(d), n, d, (x,), largest, sums)
    return sums


@kernel(6)
def _sums_program(code: Code, args: Sequence[Value], row: Value, d: int) -> None:
    """Arguments: x in RowPlaces, the largest of each row, the sums."""
    *x, largest, sums = args
    most = code.load(largest + row * 4, F32)
    sums_of_row(code, start(x, row), d, most, sums + row * 8)


def sums_of_row(code: Code, source: Value, d: int, largest: Value, target: Value) -> None:
    """Store the two sums of `softmax_sums` of d numbers."""
    zero, least = code.constant(F32X16, 0.0), code.constant(F32X16, LEAST)
    most = code.splat(largest)
    totals = [[code.variable(zero) for _ in range(SUMS)] for _ in range(2)]
    for i, (at, count) in enumerate(vectors(code, d, SUMS)):
        # b where there is a NaN: it stays
        s = code.larger(least, code.load_first(source + at, F32X16, count) - most)
        weight = exp(code, s)
        if count < LANES:
            there = [lane < count for lane in range(LANES)]
            weight = code.choose(code.constants(vector(ir.IntType(1), LANES), there), weight, zero)
        for total, part in zip(totals, (weight, weight * s), strict=True):
            total[i % SUMS].set(total[i % SUMS].value + part)
    for i, total in enumerate(totals):
        a, b, c, e = (part.value for part in total)
        code.store(code.sum((a + b) + (c + e)), target + 4 * i)
