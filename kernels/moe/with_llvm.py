"""Mixture of experts on a CPU: of few rows every (row, expert) pair in programs that read the
choices from memory, of more rows each expert on all of its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels.linear.integer_blocks import rows_with_llvm as one_matrix
from kernels.linear.integer_blocks.activations_with_llvm import STRETCH, Layout, write_rows
from kernels.linear.integer_blocks.row_products_with_llvm import layout_for
from kernels.llvm import F32, F32X16, Code, Program, Value, kernel
from kernels.llvm.functions import addresses, run, vectors
from kernels.llvm.values import I64
from kernels.moe import apply_each
from kernels.moe.packed import ExpertPlaces, PackedExperts
from kernels.moe.route_with_llvm import route, route_biased, route_given

__all__ = ["experts", "route", "route_biased", "route_given"]

FEW = 16
"""More rows than this many share experts."""


def experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, packed: PackedExperts
) -> torch.Tensor:
    """See kernels.moe.experts; a row has the same bits for any number of rows, if it has them in
    the products."""
    places = packed.places
    if places is None or len(x) > FEW:
        lines = apply_each(x, ids, packed)
    else:
        opened = packed.activation.run(multiply_pairs(x, ids, places[0]).flatten(0, 1))
        lines = multiply_pairs(opened, ids.view(-1, 1), places[1]).view(*ids.shape, -1)
    return combine(lines, weights)


def combine(lines: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
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


def multiply_pairs(x: torch.Tensor, ids: torch.Tensor, places: ExpertPlaces) -> torch.Tensor:
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
