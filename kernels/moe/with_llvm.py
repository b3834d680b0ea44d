"""Mixture of experts on a CPU. The router chooses for a row in one pass of code. Of few rows every
(row, expert) pair is computed in programs that read the choices from memory, of more rows each
expert on all of its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.linear.integer_blocks import rows_with_llvm as one_matrix
from kernels.linear.integer_blocks.activations_with_llvm import STRETCH, Layout, write_rows
from kernels.linear.integer_blocks.row_products_with_llvm import layout_for
from kernels.llvm import F32, F32X16, Code, Program, Value, kernel
from kernels.llvm.functions import LANES, addresses, exp, run, sigmoid, softplus, start, vectors
from kernels.llvm.values import I32, I32X16, I64
from kernels.moe import MIN_SUM, Choice, apply_each
from kernels.moe.packed import ExpertPlaces, PackedExperts

# less than any sum: what is chosen already, what may not be, and what fills up the last vector
GONE = float("-inf")
_NOWHERE = -(2**31)


def softmax(code: Code, n: int, logits: Value, p: Value) -> None:
    """The probabilities of a row of n logits, and others in the rest of the last vector."""
    largest = code.variable(code.constant(F32X16, float("-inf")))
    for at, count in vectors(code, n):
        values = filled(code, code.load_first(logits + at, F32X16, count), count, GONE)
        largest.set(code.larger(values, largest.value))
    shift = code.splat(code.maximum(largest.value))
    total = code.variable(code.constant(F32X16, 0.0))
    for at, count in vectors(code, n):
        powers = exp(code, code.load_first(logits + at, F32X16, count) - shift)
        code.store(powers, p + at)
        total.set(total.value + filled(code, powers, count, 0.0))
    whole = code.splat(code.sum(total.value))
    for at, _ in vectors(code, n):
        code.store(code.load(p + at, F32X16) / whole, p + at)


def largest_of(code: Code, n: int, p: Value) -> tuple[Value, Value]:
    """The largest of n numbers and the lowest place it is at; among NaN the first place."""
    best = code.variable(code.constant(F32X16, GONE))
    for at, _ in vectors(code, n):
        best.set(code.larger(best.value, code.load(p + at, F32X16)))
    largest = code.maximum(best.value)
    everywhere, back = code.splat(largest), code.constants(I32X16, range(0, -LANES, -1))
    lowest = code.variable(code.constant(I32X16, _NOWHERE))
    for at, _ in vectors(code, n):
        here = back - code.splat((at // 4).resize(I32))
        is_less = code.load(p + at, F32X16).less(everywhere)
        nowhere = code.constant(I32X16, _NOWHERE)
        lowest.set(code.larger(lowest.value, code.choose(is_less, nowhere, here)))
    return largest, code.integer(0) - code.maximum(lowest.value).extended(I64)


def filled(code: Code, values: Value, count: int, filling: float) -> Value:
    """A vector whose first `count` elements stay."""
    if count == LANES:
        return values
    inside = code.constants(I32X16, range(LANES)).less(count)
    return code.choose(inside, values, code.constant(F32X16, filling))


def route(logits: Tensor, bias: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    n_rows, n_experts = logits.shape
    weights = torch.empty(n_rows, choice.n_used)
    ids = torch.empty(n_rows, choice.n_used, dtype=torch.int64)
    program = _program(n_experts, bias is not None, choice)
    run(program, n_rows, n_experts * choice.n_used, (logits,), bias, weights, ids)
    return weights, ids


def route_given(logits: Tensor, ids: Tensor, choice: Choice) -> Tensor:
    n_rows, n_experts = logits.shape
    weights = torch.empty(n_rows, choice.n_used)
    run(_given_program(n_experts, choice), n_rows, n_experts, (logits,), ids, weights)
    return weights


@kernel(6)
def _given_program(code: Code, args: Sequence[Value], row: Value, n: int, choice: Choice) -> None:
    """Arguments: logits in RowPlaces, ids, weights."""
    ids, weights = args[4:]
    scores = code.stack(4 * (-(-n // LANES) * LANES))
    _score(code, n, choice, start(args[:4], row), scores)
    total = code.variable(code.constant(F32, 0.0))
    with code.loop(0, code.integer(choice.n_used)) as i:
        at = row * choice.n_used + i
        score = code.load(scores + code.load(ids + at * 8, I64) * 4, F32)
        code.store(score, weights + at * 4)
        total.set(total.value + score)
    _weigh(code, choice, total.value, weights + row * (4 * choice.n_used))


def _score(code: Code, n: int, choice: Choice, logits: Value, scores: Value) -> None:
    """The scores of a row, and others in the rest of the last vector."""
    if choice.scores == "softmax":
        return softmax(code, n, logits, scores)
    for at, count in vectors(code, n):
        x = code.load_first(logits + at, F32X16, count)
        if choice.scores == "softplus":
            code.store(code.sqrt(softplus(code, x)), scores + at)
        else:
            code.store(sigmoid(code, x), scores + at)


def _weigh(code: Code, choice: Choice, total: Value, weights: Value) -> None:
    """Scores of chosen experts, whose sum is `total`, become their weights."""
    least = code.constant(F32, MIN_SUM)
    divisor = code.choose(total.less(least), least, total)
    with code.loop(0, code.integer(choice.n_used)) as i:
        weight = code.load(weights + i * 4, F32)
        if choice.normalised:
            weight = weight / divisor
        code.store(weight * choice.scale, weights + i * 4)


@kernel(7)
def _program(
    code: Code, args: Sequence[Value], row: Value, n: int, biased: bool, choice: Choice
) -> None:
    """Arguments: logits in RowPlaces, the bias if there is one, weights, ids."""
    bias, weights, ids = args[4:]
    whole = -(-n // LANES) * LANES
    scores, sums = code.stack(4 * whole), code.stack(4 * whole)
    _score(code, n, choice, start(args[:4], row), scores)
    for at, count in vectors(code, n):
        total = code.load(scores + at, F32X16)
        if biased:
            total += code.load_first(bias + at, F32X16, count)
        code.store(filled(code, total, count, GONE), sums + at)
    if choice.n_groups > 1:
        _leave_groups_out(code, n // choice.n_groups, choice, sums)
    all_ = code.variable(code.constant(F32, 0.0))
    with code.loop(0, code.integer(choice.n_used)) as i:
        _, index = largest_of(code, whole, sums)
        code.store(code.constant(F32, GONE), sums + index * 4)
        score, at = code.load(scores + index * 4, F32), row * choice.n_used + i
        code.store(score, weights + at * 4)
        code.store(index, ids + at * 8)
        all_.set(all_.value + score)
    _weigh(code, choice, all_.value, weights + row * (4 * choice.n_used))


def _leave_groups_out(code: Code, size: int, choice: Choice, sums: Value) -> None:
    """The sums of all groups but those with the largest two become less than any."""
    gone, n_groups = code.constant(F32, GONE), code.integer(choice.n_groups)
    padded = -(-choice.n_groups // LANES) * LANES
    best_two = code.stack(4 * padded)
    for at in range(0, 4 * padded, 4 * LANES):
        code.store(code.constant(F32X16, GONE), best_two + at)
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
        _, index = largest_of(code, padded, best_two)
        code.store(gone, best_two + index * 4)
    with code.loop(0, n_groups) as group:
        is_left = gone.less(code.load(best_two + group * 4, F32))
        with code.when(is_left), code.loop(0, code.integer(size)) as i:
            code.store(gone, sums + (group * size + i) * 4)


FEW = 16
"""More rows than this many share experts."""


def experts(x: Tensor, weights: Tensor, ids: Tensor, packed: PackedExperts) -> Tensor:
    """See kernels.moe.experts; a row has the same bits for any number of rows, if it has them in
    the products."""
    places = packed.places
    if places is None or len(x) > FEW:
        lines = apply_each(x, ids, packed)
    else:
        opened = packed.activation.run(multiply_pairs(x, ids, places[0]).flatten(0, 1))
        lines = multiply_pairs(opened, ids.view(-1, 1), places[1]).view(*ids.shape, -1)
    return combine(lines, weights)


def combine(lines: Tensor, weights: Tensor) -> Tensor:
    """The sum over j of weights[i, j] lines[i, j], in the order of j.

    lines: f32 [n, k, d]; weights: f32 [n, k]; both contiguous. Returns f32 [n, d].
    """
    n_rows, n_used, d = lines.shape
    y = torch.empty(n_rows, d)
    run(_combine_program(d, n_used), n_rows, d * n_used, *addresses(lines, weights, y))
    return y


@kernel(3)
def _combine_program(code: Code, args: Sequence[Value], row: Value, d: int, n_used: int) -> None:
    lines, weights, y = args
    factors = [code.splat(code.load(weights + (row * n_used + j) * 4, F32)) for j in range(n_used)]
    for at, count in vectors(code, d):
        total = code.constant(F32X16, 0.0)
        for j, factor in enumerate(factors):
            line = lines + (row * n_used + j) * (4 * d) + at
            total = total + factor * code.load_first(line, F32X16, count)
        code.store_first(total, y + row * (4 * d) + at, count)


# weight rows of a task
CHUNK = 64


def multiply_pairs(x: Tensor, ids: Tensor, places: ExpertPlaces) -> Tensor:
    """Row i of x with the matrix of each expert in row i of ids.

    x: f32 [n, in]; ids: int64 [n, k], contiguous. Returns f32 [n, k, out].
    """
    n_rows, n_used = ids.shape
    n_in, n_pairs = x.shape[1], n_rows * n_used
    vnni = one_matrix.vector_bits()
    alone, couple = (layout_for(places.type, n, vnni=vnni) for n in (1, 2))
    n_stretches = -(-n_in // STRETCH)
    x = x.contiguous()
    n_bytes = n_rows * alone.tile_bytes(n_stretches) + n_pairs * couple.tile_bytes(n_stretches)
    rows = torch.empty(n_bytes, dtype=torch.uint8)
    y = torch.empty(n_rows, n_used, places.n_parts * places.n_rows)
    partners = torch.empty(n_pairs, dtype=torch.int64)
    _pair_program(places.type, vnni=vnni)(
        x.data_ptr(),
        n_in,
        n_rows,
        *addresses(rows, partners, ids),
        n_used,
        *addresses(y, places.addresses),
        places.addresses.shape[1],
        places.n_parts,
        places.n_rows,
        places.row_bytes,
        tasks=places.n_parts * -(-places.n_rows // CHUNK) * n_pairs,
        chunk=1,
        threads=torch.get_num_threads(),
    )
    return y


@functools.cache
def _pair_program(type: str, *, vnni: int) -> Program:
    layouts = tuple(layout_for(type, n, vnni=vnni) for n in (1, 2))
    body = functools.partial(_pair_body, type, vnni, layouts)
    return Program(body, 13, functools.partial(_find_couples, layouts))


def _find_couples(layouts: Sequence[Layout], code: Code, args: Sequence[Value]) -> None:
    """Quantise the rows, and find pairs of one expert, two by two: they share a reading of it.

    Of each pair its partner, itself where it has none.
    """
    x, n_in, n_rows, rows, partners, ids, n_used, *_ = args
    row_bytes, one, none = n_in * 4, code.integer(1), code.integer(0)
    write_rows(layouts[0], code, [x, one, row_bytes, none, n_in, rows], none, n_rows)
    n_pairs = n_rows * n_used
    with code.loop(0, n_pairs) as pair:
        code.store(pair, partners + pair * 8)
    with code.loop(0, n_pairs) as pair, code.loop(pair + 1, n_pairs) as other:
        free = code.load(partners + pair * 8, I64).equal(pair)
        free = free & code.load(partners + other * 8, I64).equal(other)
        same = code.load(ids + pair * 8, I64).equal(code.load(ids + other * 8, I64))
        with code.when(free & same):
            code.store(other, partners + pair * 8)
            code.store(pair, partners + other * 8)
            row, step = pair // n_used, other // n_used - pair // n_used
            place = [x + row * row_bytes, one, step * row_bytes, none]
            tile = _tile_of(layouts, n_in, n_rows, rows, pair)
            write_rows(layouts[1], code, [*place, n_in, tile], none, code.integer(2))


def _tile_of(
    layouts: Sequence[Layout], n_in: Value, n_rows: Value, rows: Value, pair: Value
) -> Value:
    """Where the two rows are that begin with this pair's."""
    n_stretches = (n_in + (STRETCH - 1)) // STRETCH
    alone, couple = (layout.tile_bytes(n_stretches) for layout in layouts)
    return rows + n_rows * alone + pair * couple


def _pair_body(
    type: str,
    vnni: int,
    layouts: Sequence[Layout],
    code: Code,
    args: Sequence[Value],
    first: Value,
    last: Value,
) -> None:
    """Arguments: x, how long its rows are and how many, room for them quantised, and for partners;
    ids and how many of a row; y; addresses, how many experts, their parts, rows of a part and their
    bytes."""
    x, n_in, n_rows, rows, partners, ids, n_used, y, addresses = args[:9]
    n_experts, n_parts, height, row_bytes = args[9:]
    n_pairs, n_out = n_rows * n_used, n_parts * height
    n_chunks = (height + (CHUNK - 1)) // CHUNK
    with code.loop(first, last) as task:
        pair, chunk = task % n_pairs, task // n_pairs
        part, begin = chunk // n_chunks, chunk % n_chunks * CHUNK
        expert = code.load(ids + pair * 8, I64)
        partner = code.load(partners + pair * 8, I64)
        weights = code.load(addresses + (part * n_experts + expert) * 8, I64)
        target = y + (pair * n_out + part * height) * 4
        end = code.smaller(begin + CHUNK, height)
        with code.when(partner.equal(pair)):
            stretches = (n_in + (STRETCH - 1)) // STRETCH
            source = rows + pair // n_used * layouts[0].tile_bytes(stretches)
            matrix = x, n_in, source, weights, row_bytes, target, n_out
            one_matrix.write(type, 1, vnni, code, matrix, begin, end)
        with code.when(pair.less(partner)):
            source = _tile_of(layouts, n_in, n_rows, rows, pair)
            step = (partner - pair) * n_out
            matrix = x, n_in, source, weights, row_bytes, target, step
            one_matrix.write(type, 2, vnni, code, matrix, begin, end)
